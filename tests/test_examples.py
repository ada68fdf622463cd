"""The examples: plain training scripts that learn something, repeat exactly, and know nothing of AutoPrec."""

import re
from pathlib import Path

import pytest

from tests.warm import run_forked

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.slow


def run(*words: str, cwd: Path = ROOT) -> str:
    ended = run_forked(words, cwd)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.parametrize("name", ["train_gpt.py", "train_vit.py"])
def test_training_scripts_know_nothing_of_autoprec(name: str) -> None:
    assert "autoprec" not in (EXAMPLES / name).read_text(encoding="utf-8").lower()


def test_the_gpt_learns_repeats_and_saves_only_when_asked(tmp_path: Path) -> None:
    small = ("--width", "64", "--depth", "2", "--heads", "2", "--batch", "8", "--steps", "41")
    script = str(EXAMPLES / "train_gpt.py")
    first = losses(run(script, *small, cwd=tmp_path))
    assert first[-1] < first[0] - 1.0
    assert list(tmp_path.iterdir()) == []
    again = losses(run(script, *small, "--out", "gpt.pt", cwd=tmp_path))
    assert again == first
    assert (tmp_path / "gpt.pt").stat().st_size > 100_000
    assert losses(run(script, *small, "--seed", "1", cwd=tmp_path)) != first


def test_the_proxy_of_a_llama_learns_and_has_the_names_of_one(tmp_path: Path) -> None:
    small = ("--width", "32", "--depth", "2", "--heads", "2", "--kv-heads", "1", "--steps", "31", "--batch", "4")
    found = losses(run(str(EXAMPLES / "llama_proxy.py"), *small, cwd=tmp_path))
    assert found[-1] < found[0] - 1.0
    text = (EXAMPLES / "llama_proxy.py").read_text(encoding="utf-8")
    assert all(name in text for name in ("q_proj", "o_proj", "gate_proj", "down_proj", "lm_head", "self_attn"))


def test_the_vit_learns_to_read_digits(tmp_path: Path) -> None:
    output = run(str(EXAMPLES / "train_vit.py"), "--epochs", "3", "--width", "64", "--depth", "2", cwd=tmp_path)
    accuracy = [float(value) for value in re.findall(r"accuracy (\d\.\d+)", output)]
    assert accuracy[-1] > 0.3, "chance is 0.1"
    assert losses(output)[-1] < losses(output)[0]


def test_a_policy_is_applied_in_five_lines(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "schema: autoprec.policy/1\nrecipes: {bf16: {format: bf16}}\nlayers: [{match: 'blocks.*', recipe: bf16}]\n"
    )
    output = run(str(EXAMPLES / "use_policy.py"), str(policy))
    assert "executed as asked: True" in output
    assert len(losses(output)) == 5


def test_reinforcement_learning_with_both_sides_learns_to_copy_digits(tmp_path: Path) -> None:
    output = run(str(EXAMPLES / "train_grpo.py"), "--steps", "51", cwd=tmp_path)
    rewards, mismatches = (re.findall(rf"{name} (\S+)", output) for name in ("reward", "mismatch"))
    assert float(rewards[0]) < 0.2, "chance is 0.1"
    assert float(rewards[-1]) > 0.4
    assert all(1e-8 < float(value) < 1e-4 for value in mismatches)


def test_the_table_of_mismatches_has_fp16_below_bf16_and_a_policy_of_a_file(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("schema: autoprec.policy/1\nrollout: {weights: fp16, activations: fp16}\n", encoding="utf-8")
    words = ("--seeds", "2", "--steps", "4", "--policy", str(policy))
    output = run(str(EXAMPLES / "grpo_mismatch.py"), *words, cwd=tmp_path)
    rows = {cells[1].strip(): cells[3].split()[0] for line in output.splitlines() if (cells := line.split("|"))[1:]}
    assert float(rows["fp16"]) < 0.1 < 1.0 < float(rows["FP8 tensorwise in the blocks"])
    assert float(rows[str(policy)]) < 1.0
