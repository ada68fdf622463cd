"""Replaying a step gives the gradients that running it again would have given."""

from __future__ import annotations

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


@pytest.mark.parametrize("autocast", [False, True])
def test_loss_outside_the_model_dropout_autocast_and_scaling(autocast: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    found = Found([model], [optimizer], list(model.parameters()))
    hooks = Hooks()
    hooks.install()
    payloads: list[dict[str, Any]] = []

    def done(payload: dict[str, Any]) -> None:
        payloads.append(payload)
        raise DoneError

    probes = (Probe("none", None), Probe("bf16", uniform("bf16")), Probe("wrong", uniform("bf16", "nothing.*")))
    replay = Replay(TrialSpec(kind="sensitivity", probes=probes), found, hooks, done)
    weights = [p.detach().clone() for p in model.parameters()]
    try:
        hooks.watch(lambda module, args, kwargs: (hooks.unwatch(), replay.start(module, args, kwargs)))
        for _ in range(10):
            x, y = torch.randn(8, 6), torch.randint(0, 5, (8,))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(x)
                loss = F.cross_entropy(out * 2.0, y) + out.square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    except DoneError:
        pass
    finally:
        hooks.remove()
    rows = {row["id"]: row for row in payloads[0]["probes"]}
    assert rows["none"]["gradient_error"] == pytest.approx(0.0, abs=1e-7)
    assert rows["none"]["loss"] == pytest.approx(payloads[0]["reference_loss"], rel=1e-6)
    if not autocast:
        assert 1e-4 < rows["bf16"]["gradient_error"] < 0.05
    assert "nothing.*" in rows["wrong"]["failed"]
    assert payloads[0]["noise_batches"] == 4
    assert 0.1 < payloads[0]["gradient_noise"] < 10
    assert 0 <= payloads[0]["lost_updates"] <= 1
    changed = [not torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)]
    assert not any(changed[1:]) or not autocast  # weights of the scan stay; the last update is the script's own


def test_a_scan_out_of_time_answers_one_probe_and_ends() -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = Hooks()
    hooks.install()
    payloads: list[dict[str, Any]] = []

    def done(payload: dict[str, Any]) -> None:
        payloads.append(payload)
        raise DoneError

    probes = tuple(Probe(name, uniform("bf16")) for name in "abc")
    spec = TrialSpec(kind="sensitivity", probes=probes, within_s=0.0)
    replay = Replay(spec, Found([model], [optimizer], list(model.parameters())), hooks, done)
    try:
        hooks.watch(lambda module, args, kwargs: (hooks.unwatch(), replay.start(module, args, kwargs)))
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    except DoneError:
        pass
    finally:
        hooks.remove()
    assert [row["id"] for row in payloads[0]["probes"]] == ["a"]
    assert payloads[0]["gradient_noise"] > 0


def test_a_scan_holds_few_bytes_per_parameter() -> None:
    """A model of 1.3 billion parameters is scanned on an 80 GB card: under 20 bytes each beside what the script has."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    hooks = Hooks()
    hooks.install()
    held = Held()

    def done(_payload: dict[str, Any]) -> None:
        raise DoneError

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 512)).square().mean().backward()
        optimizer.step()

    try:
        step()
        probes = (Probe("bf16", uniform("bf16")), Probe("fp8", uniform("fp8_rowwise")))
        spec, found = TrialSpec(kind="sensitivity", probes=probes), Found([model], [optimizer], parameters)
        with held:
            replay = Replay(spec, found, hooks, done)
            hooks.watch(lambda module, args, kwargs: (hooks.unwatch(), replay.start(module, args, kwargs)))
            for _ in range(5):
                step()
    except DoneError:
        pass
    finally:
        hooks.remove()
    own = 4  # gradients that zero_grad dropped, made anew by the script itself
    assert held.peak / sum(p.numel() for p in parameters) < 20 + own
