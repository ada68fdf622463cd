"""Replaying a step gives the gradients that running it again would have given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from autoprec.optim.communication import install_gradient_hook
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.trial.inside.sensitivity.recorded_step import RecordedStep
from autoprec.trial.inside.sensitivity.replay import Replay
from autoprec.trial.protocol import GradientErrors, Probe, ScanSpec
from benchmarks.numerics.held import Held
from tests.trial.conftest import uniform
from tests.warm import run_ranks


class DoneError(Exception):
    pass


def scanned(found: Found, step: Callable[[], None], *probes: Probe, **changes: Any) -> GradientErrors:
    """Return what a scan answers that begins in the first of ten steps."""
    hooks = Hooks()
    hooks.install()
    answers: list[GradientErrors] = []

    def done(found: GradientErrors) -> None:
        answers.append(found)
        raise DoneError

    replay = Replay(ScanSpec(probes=probes, **changes), found, hooks, done)
    try:
        hooks.watch(lambda *_: (hooks.unwatch(), replay.start()))
        for _ in range(10):
            step()
    except DoneError:
        pass
    finally:
        hooks.remove()
    return answers[0]


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
    rows = {row.id: row for row in found.probes}
    assert rows["none"].gradient_error == pytest.approx(0.0, abs=1e-7)
    assert rows["none"].loss == pytest.approx(found.reference_loss, rel=1e-6)
    if not autocast:
        assert 1e-4 < rows["bf16"].gradient_error < 0.05
    assert "nothing.*" in rows["wrong"].failed
    assert found.noise_batches == 4
    assert 0.1 < found.gradient_noise < 10
    changed = [not torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)]
    assert not any(changed[1:]) or not autocast  # weights of the scan stay; the last update is the script's own


def test_two_optimizers_under_one_scaler() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 5))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 6)).square().mean()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    found = scanned(Found([model], optimizers, list(model.parameters())), step, Probe("bf16", uniform("bf16")))
    (row,) = found.probes
    assert 1e-4 < row.gradient_error < 0.05
    assert 0.1 < found.gradient_noise < 10


class Past(nn.Module):
    """Calls its layers' forward, as scripts do with a whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.forward(torch.relu(self.up.forward(x)))


@pytest.mark.parametrize("make", [Past, lambda: nn.Linear(6, 5)])
def test_the_error_of_a_forward_that_is_called_past_the_module(make: Callable[[], nn.Module]) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        nn.Module.__call__(nn.Identity(), None)  # a call to begin at, before the model's
        model.forward(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()

    probes = Probe("none", None), Probe("bf16", uniform("bf16"))
    found = scanned(Found([model], [optimizer], list(model.parameters())), step, *probes)
    none, bf16 = (row.gradient_error for row in found.probes)
    assert none == 0.0
    assert 1e-4 < bf16 < 0.05
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_a_step_that_overflows_under_a_scaler_is_not_the_one_replayed(fused: bool, clips: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    seen: list[float] = []

    def step() -> None:
        loss = (model(torch.randn(8, 16)).half().float() - 3).square().sum()  # 16 bits hold no gradient this large
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        seen.append(loss.item())
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    probes = Probe("none", None), Probe("bf16", uniform("bf16"))
    found = scanned(Found([model], [optimizer], list(model.parameters())), step, *probes)
    none, bf16 = (row.gradient_error for row in found.probes)
    assert scaler.get_scale() < 2.0**14
    assert none == pytest.approx(0.0, abs=1e-6)
    assert 1e-4 < bf16 < 0.05
    assert found.reference_loss == pytest.approx(seen[3])
    assert 0.1 < found.gradient_noise < 1


def test_a_scan_out_of_time_answers_one_probe_and_ends() -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()

    probes = tuple(Probe(name, uniform("bf16")) for name in "abc")
    found = scanned(Found([model], [optimizer], list(model.parameters())), step, *probes, within_s=0.0)
    assert [row.id for row in found.probes] == ["a"]
    assert found.gradient_noise > 0


def test_a_layer_behind_a_projection_of_zeros_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 5, (8,))).backward()
        optimizer.step()

    found = scanned(Found([model], [optimizer], list(model.parameters())), step, Probe("bf16", uniform("bf16")))
    assert found.hardly_moved == ("0",)


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


def on_ranks(folder: Path, work: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    """Return what each rank of gloo found."""

    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        torch.save(work(rank), folder / f"out.{rank}")
        dist.destroy_process_group()

    ended = run_ranks(body, cwd=folder, ranks=ranks)
    assert ended.returncode == 0, ended.stderr
    return [torch.load(folder / f"out.{rank}", weights_only=False) for rank in range(ranks)]


def distributed_scan(rank: int, fails_on: int | None, wire: str = "fp32") -> dict[str, Any]:
    """Scan a model under DDP; the pass of the second probe runs out of memory on ``fails_on``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
    wrapped = nn.parallel.DistributedDataParallel(model)
    install_gradient_hook(wrapped, wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    played, original = [0], RecordedStep.play

    def play(self: RecordedStep, **options: Any) -> float:
        played[0] += 1
        if played[0] == 3 and rank == fails_on:  # the first is the step as it is
            raise torch.OutOfMemoryError("no room for a pass")
        return original(self, **options)

    def step() -> None:
        loss = F.cross_entropy(wrapped(torch.randn(8, 6, generator=generator)), torch.arange(8) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    probes = [Probe(name, policy) for name, policy in (("none", None), ("bf16", uniform("bf16")), ("after", None))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedStep, "play", play)
        found = Found([wrapped], [optimizer], list(model.parameters()))
        return {row.id: row for row in scanned(found, step, *probes).probes}


@pytest.mark.slow
def test_a_probe_that_fails_on_one_rank_fails_on_all_and_the_others_are_measured(tmp_path: Path) -> None:
    for rows in on_ranks(tmp_path, lambda rank: distributed_scan(rank, fails_on=1)):
        assert rows["none"].gradient_error == pytest.approx(0.0, abs=1e-7)
        assert rows["bf16"].gradient_error is None
        assert rows["bf16"].failed.startswith("rank 1: ")
        assert "no room for a pass" in rows["bf16"].failed
        assert rows["after"].gradient_error == pytest.approx(0.0, abs=1e-7)


@pytest.mark.slow
def test_what_is_exchanged_in_16_bits_is_part_of_the_error(tmp_path: Path) -> None:
    def work(rank: int) -> tuple[float, ...]:
        rows = distributed_scan(rank, None, "bf16")
        return tuple(rows[name].gradient_error for name in ("none", "bf16"))

    first, second = on_ranks(tmp_path, work)
    assert first == pytest.approx(second)
    assert first[1] > 1e-4


class Halves(nn.Module):
    """A layer that can be sharded, beside one that every rank holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(16), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def sharded_scan(how: str) -> GradientErrors:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = Halves()
    if how == "tp":
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        loss = model(torch.randn(8, 16, generator=generator)).square().mean() * 100
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    found = Found([model], [optimizer], list(model.parameters()))
    return scanned(found, step, Probe("f", uniform("fp8", "up")))


@pytest.mark.slow
def test_replicated_parameters_count_once_beside_sharded_ones(tmp_path: Path) -> None:
    found = on_ranks(tmp_path, lambda rank: [sharded_scan(how) for how in ("whole", "tp")])
    for whole, parts in found:
        assert parts.gradient_noise == pytest.approx(whole.gradient_noise, rel=1e-3)
        (one,), (other,) = whole.probes, parts.probes
        assert other.gradient_error == pytest.approx(one.gradient_error, rel=0.01)


def test_a_gan_of_two_ranks_is_scanned_by_its_generators_loss(host: Any) -> None:
    probes = (Probe("none", {"schema": "autoprec.policy/1"}), Probe("bf16", uniform("bf16")))
    with host("torchrun", "--nproc-per-node", "2", "gan_ddp.py") as runner:
        scan = runner.run(ScanSpec(warmup=1, probes=probes))
    rows = {row.id: row for row in scan.answer.probes}
    assert rows["none"].gradient_error == 0.0, rows
    assert 0 < rows["bf16"].gradient_error < 0.1
