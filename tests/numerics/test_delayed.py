"""Delayed scales over ranks: which operands take part, and what one rank does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoprec.numerics import delayed
from autoprec.numerics.conv import ConvExecution
from autoprec.numerics.delayed import DelayedReduction, data_parallel_groups
from autoprec.numerics.linear import LinearExecution
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES

DELAYED, BF16 = BUILTIN_RECIPES["fp8_delayed"], BUILTIN_RECIPES["bf16"]


def test_only_delayed_operands_take_part_each_once() -> None:
    conv = ConvExecution(LayerPlan.uniform(BF16), nn.Conv1d(2, 2, 1), "bf16")
    runs: list[Any] = [LinearExecution(LayerPlan.uniform(recipe)) for recipe in (DELAYED, BF16)]
    runs += [conv, LinearExecution(LayerPlan(fprop=DELAYED))]
    slots = DelayedReduction(nn.Linear(2, 2), runs).slots
    assert [operand for _, operand, _ in slots] == ["input", "weight", "grad_output", "input", "weight"]
    assert {id(state) for state, _, _ in slots} == {id(runs[0].quantizers), id(runs[3].quantizers)}


def test_without_other_ranks_a_layer_learns_alone() -> None:
    assert data_parallel_groups(nn.Linear(2, 2)) == []
    model, run = nn.Linear(32, 32), LinearExecution(LayerPlan.uniform(DELAYED))
    reduction = DelayedReduction(model, [run])
    reduction()
    run(torch.ones(4, 32), model.weight, None)
    assert not run.quantizers.shared
    assert not reduction.pending


class Wire:
    """Two ranks of which this process is one; the other has seen 5 of everything."""

    ReduceOp = dist.ReduceOp

    def __init__(self) -> None:
        self.calls = 0

    def get_world_size(self, group: Any) -> int:
        return 2

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: Any) -> None:
        self.calls += 1
        tensor.clamp_(min=5.0)


def test_ranks_agree_on_the_largest_amax_once_per_training_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    monkeypatch.setattr(delayed, "dist", wire)
    monkeypatch.setattr(delayed, "data_parallel_groups", lambda root: ["all"])
    model, run = nn.Linear(32, 32), LinearExecution(LayerPlan.uniform(DELAYED))
    reduction = DelayedReduction(model, [run])
    for _ in range(2):
        reduction()
        run(torch.ones(4, 32, requires_grad=True), model.weight, None).sum().backward()
    assert wire.calls == 1  # before the first forward there was nothing to agree on
    _, operand, spec = reduction.slots[0]
    assert run.quantizers.delayed_scale(operand, spec, torch.tensor(1.0), update=False, recompute=False) == 448.0 / 5.0
    model.eval()
    reduction()
    model.train()
    with torch.no_grad():
        reduction()
    assert wire.calls == 1  # evaluation neither learns nor communicates
