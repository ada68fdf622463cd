"""Every integration example runs as it stands, under a policy with several precisions, and executes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.support.optional import is_available
from tests.warm import run_forked, run_ranks

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "integrations"
POLICY = """
schema: autoprec.policy/1
recipes: {bf16: {format: bf16}, fp8: {format: fp8, scaling: {granularity: row, power_of_2: true}}}
layers: [{match: "*2", recipe: fp8, gemms: {wgrad: bf16}}]
default: bf16
"""
NEEDS = {
    "hf_trainer": "transformers",
    "accelerate_loop": "accelerate",
    "peft_lora": "peft",
    "lightning_trainer": "lightning",
    "fabric_loop": "lightning",
}
#: The base of a LoRA fine-tune in FP8, its adapters in bf16.
POLICIES = {
    "peft_lora": """
schema: autoprec.policy/1
recipes: {bf16: {format: bf16}, fp8: {format: fp8, scaling: {granularity: row, power_of_2: true}}}
layers: [{match: "*.base_layer", recipe: fp8}, {match: "*lora_*", recipe: bf16}]
"""
}


def test_every_example_is_tested() -> None:
    names = {path.stem for path in FOLDER.glob("*.py")} - {"toy"}
    assert names == {"plain_torch", "ddp", "fsdp2", *NEEDS}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_torch", *NEEDS, "ddp", "fsdp2"])
def test_example(tmp_path: Path, name: str) -> None:
    package = NEEDS.get(name)
    if package and not is_available(package):
        pytest.skip(f"{package} is not installed")
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICIES.get(name, POLICY), encoding="utf-8")
    script = FOLDER / f"{name}.py"
    if name in ("ddp", "fsdp2"):
        done = run_ranks(script, policy, cwd=tmp_path)
    else:
        done = run_forked([script, policy], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    assert "loss 0." in last
    assert "executed as asked: True" in last or name == "hf_trainer"
    assert "breaches: 0" in last or "breaches" not in last
