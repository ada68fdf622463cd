"""Rows of the census that no module holds."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autoprec.trial.inside.judging.by_hand import UpdateRecorder
from autoprec.trial.inside.judging.counted import copies, hooked, read_by
from autoprec.trial.inside.judging.forward import Step
from autoprec.trial.inside.judging.noise import NoiseRecorder
from benchmarks.precision.running import judged

SCRIPT = """
import torch
from torch import nn
net = nn.Linear(8, 4)
averaged = [p.detach().clone() for p in net.parameters()]
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    loss = nn.functional.cross_entropy(net(torch.randn(16, 8)), torch.randint(4, (16,)))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    torch._foreach_lerp_(averaged, [p.detach() for p in net.parameters()], 0.1)
"""


def test_logits_norms_and_averages_are_rows(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    seen = judged(script).judged
    assert seen is not None
    rows = [(row.kind, row.shape) for row in seen.census]
    assert ("logits", (16, 4)) in rows
    assert {("copy of the weights", (4, 8)), ("copy of the weights", (4,))} <= set(rows)
    assert "clipping norm" in {kind for kind, _ in rows}


def test_what_is_written_and_is_a_gradient_is_no_copy_of_a_weight() -> None:
    net, average, gradient = nn.Linear(3, 2, bias=False), torch.zeros(2, 3), torch.zeros(2, 3)
    with UpdateRecorder(net) as update:
        average.mul_(0.9)
        gradient.mul_(0.5)
        torch.zeros(2, 3).add_(1)  # made within
        torch.zeros(5).mul_(2)
    found = list(copies(update, list(net.parameters()), [gradient]))
    assert [(row.shape, row.dtype, row.twin) for row in found] == [((2, 3), "fp32", "")]


def test_an_accumulator_is_read_by_a_step() -> None:
    net, sums = nn.Linear(3, 2, bias=False).bfloat16(), torch.zeros(2, 3, dtype=torch.bfloat16)
    with NoiseRecorder(net) as recorder:
        net(torch.ones(4, 3).bfloat16()).sum().backward()
        assert net.weight.grad is not None
        sums.add_(net.weight.grad)
    rows = list(read_by(Step(recorder, recorder.report())))
    assert [(row.kind, row.dtype, row.twin) for row in rows] == [("gradient accumulator", "bf16", "fp32")]


def test_fsdp_says_what_it_reduces_in() -> None:
    net: Any = nn.Linear(2, 2)
    assert list(hooked(net)) == []
    policy = SimpleNamespace(reduce_dtype=None, param_dtype=torch.bfloat16)
    net._get_fsdp_state = lambda: SimpleNamespace(_mp_policy=policy)
    assert list(hooked(net)) == [("fully_shard", "bf16")]
