"""A small policy file that most command tests start from."""

from pathlib import Path

import pytest

POLICY = """\
schema: autoprec.policy/1
recipes:
  bf16: {format: bf16}
  fp8: {format: fp8, scaling: {granularity: row}}
layers:
  - {match: "blocks.*.fc", recipe: fp8, gemms: {wgrad: bf16}}
  - {match: "head", recipe: keep, optional: true}
default: bf16
model: {class: GPT, parameters: 3307008}
evidence: {target: cpu, speedup: 1.91, divergence: 0.00071, memory_bytes: 52000000, seeds: 4}
guard: {metrics: [loss], thresholds: {loss_gap: 0.01}, fallback: [all bf16, script]}
"""


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY, encoding="utf-8")
    return path
