"""A step written out of blocks that were recorded once is the step that all blocks make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec.cost.configuration import repeated_blocks, run_once
from autoprec.graph.fake import record_fake
from autoprec.graph.repeated import Blocks, repeat
from autoprec.graph.report import GraphReport


class Block(nn.Module):
    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(width)
        inner = 2 * width if kind == "wide" else width
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.gate = nn.Linear(width, inner) if kind == "gated" else None

    def forward(self, hidden_states: torch.Tensor) -> Any:
        y = self.norm(hidden_states)
        h = torch.tanh(self.up(y))
        if self.gate is not None:
            h = h * self.gate(y)
        x = hidden_states + self.down(h)
        return (x, h) if self.kind == "tuple" else x


class Model(nn.Module):
    def __init__(self, kinds: str, *, checkpointed: bool = False, tied: bool = False) -> None:
        super().__init__()
        width = 16
        names = {"p": "plain", "w": "wide", "g": "gated", "t": "tuple"}
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Block(width, names[kind]) for kind in kinds)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointed = checkpointed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def step(model: nn.Module) -> None:
    model(torch.zeros((2, 8), dtype=torch.long)).backward()


def recorded(make: Callable[[], nn.Module], *, once: bool) -> GraphReport:
    found: list[Blocks] = []

    def build() -> nn.Module:
        model = make()
        blocks = repeated_blocks(model)
        assert blocks is not None
        found.append(blocks)
        if once:
            run_once(model, blocks)
        return model

    report = record_fake(build, step)
    return repeat(report, found[0]) if once else report


def rows(report: GraphReport) -> list[tuple[Any, ...]]:
    return [
        (row.module, row.op, row.phase, row.cls, row.shapes, row.out_shapes, row.out_saved, row.weight, row.sources)
        for row in report.operators
    ]


@pytest.mark.parametrize("kinds", ["ppp", "pppppp", "pwpw", "pgwpgw", "wppp", "pppw", "tttt", "ptpt"])
@pytest.mark.parametrize("how", ["", "checkpointed", "tied"])
def test_operators_layers_and_memory_are_those_of_all_blocks(kinds: str, how: str) -> None:
    def make() -> nn.Module:
        return Model(kinds, checkpointed=how == "checkpointed", tied=how == "tied")

    once, whole = (recorded(make, once=once) for once in (True, False))
    assert rows(once) == rows(whole)
    assert once.layers == whole.layers
    assert once.groups == whole.groups
    assert (once.total_flops, once.tunable_flops_share) == (whole.total_flops, whole.tunable_flops_share)
    for name in ("parameters", "saved_for_backward", "live_at_backward"):
        assert once.memory.get(name) == whole.memory.get(name), name


def test_alike_are_blocks_of_the_same_shapes_and_settings() -> None:
    assert repeated_blocks(Model("pwppw")) == Blocks("layers", (0, 1, 0, 0, 1))
    model = Model("pppp")
    model.layers[2].window = 4  # a setting, as of attention that slides
    model.layers[3].layer_idx = 3  # only counts
    for number in range(3):
        model.layers[number].layer_idx = number
    assert repeated_blocks(model) == Blocks("layers", (0, 0, 2, 0))
    assert repeated_blocks(Model("pp")) is None  # two blocks are run
    assert repeated_blocks(nn.Linear(2, 2)) is None


def test_names_move_with_their_block_alone() -> None:
    blocks = Blocks("model.layers", (0, 0, 2))
    assert blocks.recorded == (0, 2)
    assert blocks.moved("model.layers.0.mlp.up", 0, 1) == "model.layers.1.mlp.up"
    assert blocks.moved("model.layers.01.mlp", 0, 1) == "model.layers.01.mlp"
    assert [blocks.of(name) for name in ("model.layers.2.mlp", "model.norm", "layers.1")] == [2, None, None]


def test_where_every_block_was_recorded_nothing_changes() -> None:
    report = recorded(lambda: Model("pwg"), once=False)
    assert repeat(report, Blocks("layers", (0, 1, 2))) is report


def test_blocks_that_run_into_each_other_are_refused() -> None:
    report = recorded(lambda: Model("ppp"), once=False)
    mixed = (*report.operators[:4], *reversed(report.operators[4:40]), *report.operators[40:])
    with pytest.raises(ValueError, match="run into each other"):
        repeat(GraphReport({}, report.layers, mixed, {}, 0, 0.0), Blocks("layers", (0, 1, 1)))
    with pytest.raises(ValueError, match="does not run in the forward pass"):
        repeat(GraphReport({}, report.layers, report.operators[:2], {}, 0, 0.0), Blocks("layers", (0, 0, 0)))
