"""Counting bytes."""

from __future__ import annotations

import torch
from torch import nn

from autoprec.trial.inside.observe.memory import SavedBytes, memory_of, state_bytes


def test_saved_bytes_count_storages_once_and_not_parameters() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    x = torch.randn(4, 8)
    with SavedBytes([weight]) as saved:
        y = torch.nn.functional.linear(x, weight)
        z = y * y  # saves y twice: one storage
        z.sum().backward()
    assert saved.peak == x.numel() * 4 + y.numel() * 4


def test_saved_bytes_are_given_back_when_backward_frees_them() -> None:
    with SavedBytes([]) as saved:
        for _ in range(3):
            x = torch.randn(100, requires_grad=True)
            (x.exp()).sum().backward()
    assert saved.peak == 400  # never two iterations at once


def test_checkpointing_lowers_the_peak() -> None:
    from torch.utils.checkpoint import checkpoint

    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(4))

    def peak(use: bool) -> int:
        with SavedBytes(list(layers.parameters())) as saved:
            h = torch.randn(32, 64)
            for layer in layers:
                h = checkpoint(layer, h, use_reentrant=False) if use else layer(h)
            h.sum().backward()
        return saved.peak

    assert peak(True) < peak(False) / 2


def test_the_split() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    assert state_bytes([optimizer]) == 0
    optimizer.step()
    split = memory_of(list(model.parameters()), [], [optimizer], 7)
    assert split == {
        "parameters": 64,
        "gradients": 64,
        "optimizer": state_bytes([optimizer]),
        "saved_for_backward": 7,
        "buffers": 0,
    }
    assert split["optimizer"] >= 128
