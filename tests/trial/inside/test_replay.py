"""Replaying a step gives the gradients that running it again would have given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.trial.inside.replay import Replay
from autoprec.trial.protocol import Probe, TrialSpec
from benchmarks.held import Held
from tests.trial.conftest import uniform


class DoneError(Exception):
    pass


def scanned(found: Found, step: Callable[[], None], *probes: Probe, **changes: Any) -> dict[str, Any]:
    """Return what a scan answers that begins in the first of ten steps."""
    hooks = Hooks()
    hooks.install()
    payloads: list[dict[str, Any]] = []

    def done(payload: dict[str, Any]) -> None:
        payloads.append(payload)
        raise DoneError

    replay = Replay(TrialSpec(kind="sensitivity", probes=probes, **changes), found, hooks, done)
    try:
        hooks.watch(lambda module, args, kwargs: (hooks.unwatch(), replay.start(module, args, kwargs)))
        for _ in range(10):
            step()
    except DoneError:
        pass
    finally:
        hooks.remove()
    return payloads[0]


@pytest.mark.parametrize("autocast", [False, True])
def test_loss_outside_the_model_dropout_autocast_and_scaling(autocast: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def step() -> None:
        x, y = torch.randn(8, 6), torch.randint(0, 5, (8,))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
            loss = F.cross_entropy(out * 2.0, y) + out.square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    weights = [p.detach().clone() for p in model.parameters()]
    probes = (Probe("none", None), Probe("bf16", uniform("bf16")), Probe("wrong", uniform("bf16", "nothing.*")))
    found = scanned(Found([model], [optimizer], list(model.parameters())), step, *probes)
    rows = {row["id"]: row for row in found["probes"]}
    assert rows["none"]["gradient_error"] == pytest.approx(0.0, abs=1e-7)
    assert rows["none"]["loss"] == pytest.approx(found["reference_loss"], rel=1e-6)
    if not autocast:
        assert 1e-4 < rows["bf16"]["gradient_error"] < 0.05
    assert "nothing.*" in rows["wrong"]["failed"]
    assert found["noise_batches"] == 4
    assert 0.1 < found["gradient_noise"] < 10
    assert 0 <= found["lost_updates"] <= 1
    changed = [not torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)]
    assert not any(changed[1:]) or not autocast  # weights of the scan stay; the last update is the script's own


def test_a_scan_out_of_time_answers_one_probe_and_ends() -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()

    probes = tuple(Probe(name, uniform("bf16")) for name in "abc")
    found = scanned(Found([model], [optimizer], list(model.parameters())), step, *probes, within_s=0.0)
    assert [row["id"] for row in found["probes"]] == ["a"]
    assert found["gradient_noise"] > 0


def test_a_layer_behind_a_projection_of_zeros_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 5, (8,))).backward()
        optimizer.step()

    found = scanned(Found([model], [optimizer], list(model.parameters())), step, Probe("bf16", uniform("bf16")))
    assert found["hardly_moved"] == ["0"]


def test_a_scan_holds_few_bytes_per_parameter() -> None:
    """A model of 1.3 billion parameters is scanned on an 80 GB card: under 20 bytes each beside what the script has."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    held = Held()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 512)).square().mean().backward()
        optimizer.step()

    step()
    probes = (Probe("bf16", uniform("bf16")), Probe("fp8", uniform("fp8_rowwise")))
    with held:
        scanned(Found([model], [optimizer], parameters), step, *probes)
    own = 4  # gradients that zero_grad dropped, made anew by the script itself
    assert held.peak / sum(p.numel() for p in parameters) < 20 + own
