"""Every integration example runs as it stands, under a policy with several precisions, and executes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoprec.support.optional import is_available
from tests.warm import Ended, run_forked

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
    "lightning_trainer": "lightning",
    "fabric_loop": "lightning",
}


def run_real_ranks(script: Path, policy: Path, folder: Path) -> Ended:
    """Under the launcher that the example names: ranks that are forks of this process may hang at their end."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-W", "ignore", *launcher, str(script), str(policy)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return Ended(done.returncode, done.stdout, done.stderr)


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
    policy.write_text(POLICY, encoding="utf-8")
    script = FOLDER / f"{name}.py"
    if name in ("ddp", "fsdp2"):
        done = run_real_ranks(script, policy, tmp_path)
    else:
        done = run_forked([script, policy], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    assert "loss 0." in last
    assert "executed as asked: True" in last or name == "hf_trainer"
    assert "breaches: 0" in last or "breaches" not in last
