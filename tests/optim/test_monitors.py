import pytest
import torch
from torch import nn

from autoprec.optim.codecs import CODECS, CastCodec, TensorCodec
from autoprec.optim.monitors import StateMonitor, StateReport
from autoprec.optim.optimizer import wrap_optimizer
from autoprec.policy import OptimizerPolicy
from tests.levels import LEVELS


class UnscaledHalf:
    """FP16 without a scale: what is refused by name."""

    name, bits = "fp16", 16.0

    def encode(self, values, generator=None):
        return (values.half(),)

    def decode(self, parts, shape):
        return parts[0].float().view(shape)


def run(choice: OptimizerPolicy, *, steps=60, lr=1e-3, scale=1.0, every=5, betas=(0.9, 0.95), closure=False):
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas)
    wrap_optimizer(optimizer, choice, model)
    monitor = StateMonitor(optimizer, every=every)
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)

        def gradients(x=x):
            optimizer.zero_grad()
            ((model(x) - torch.tanh(2 * x)).square().mean() * scale).backward()

        if closure:
            optimizer.step(gradients)
        else:
            gradients()
            optimizer.step()
    return monitor.report()


@pytest.fixture(scope="module")
def reference() -> StateReport:
    return run(OptimizerPolicy())


@pytest.mark.parametrize("name", ["msamp-o1", "msamp-o2", "msamp-o3", "bf16-kahan", "bf16-sr-fp8"])
def test_healthy_levels_have_no_problems(name, reference):
    report = run(LEVELS[name].optimizer)
    assert report.watched == 12
    assert report.problems() == []
    assert report.penalty() == 0


def test_a_plain_optimizer_loses_nothing(reference):
    assert reference.lost_updates == reference.flushed_state == 0
    assert reference.problems() == []


def test_gradients_that_a_closure_makes_are_watched(reference):
    choice = LEVELS["msamp-o2"].optimizer
    assert run(choice, closure=True) == run(choice)


def test_plain_bf16_weights_lose_updates(monkeypatch, reference):
    monkeypatch.setitem(CODECS, ("weights", "bf16_stochastic"), CastCodec("bf16", torch.bfloat16))
    report = run(OptimizerPolicy(weights="bf16_stochastic"), lr=1e-4)
    assert report.lost_updates > 0.2
    assert "lost in rounding" in report.problems()[0]
    assert run(OptimizerPolicy(weights="bf16_kahan"), lr=1e-4).lost_updates < 0.02


def test_a_frozen_second_moment_is_seen(monkeypatch, reference):
    frozen = TensorCodec("e4m3", torch.float8_e4m3fn, power_of_2=True)
    monkeypatch.setitem(CODECS, ("exp_avg_sq", "int8_block"), frozen)
    report = run(OptimizerPolicy(exp_avg_sq="int8_block"), betas=(0.9, 0.999), every=2)
    assert report.lost_state_updates > 0.25
    assert any("stalls" in line for line in report.problems())
    assert report.penalty() > 0


def test_a_flushed_second_moment_is_seen(monkeypatch):
    monkeypatch.setitem(CODECS, ("exp_avg_sq", "fp16_scaled"), UnscaledHalf())
    choice = OptimizerPolicy(exp_avg_sq="fp16_scaled")
    report = run(choice, scale=1e-2)
    assert report.flushed_state > 0.5
    monkeypatch.undo()
    assert run(choice, scale=1e-2).flushed_state == 0


def test_skipped_steps_count():
    report = StateReport(steps=10, skipped_steps=3)
    assert "30.0%" in report.problems()[0]


def test_reports_survive_json():
    report = StateReport(lost_updates=0.25, steps=3)
    assert report.to_json()["lost_updates"] == 0.25


def test_watching_changes_nothing_and_can_be_removed():
    def train(watch: bool):
        model = nn.Linear(8, 8)
        nn.init.constant_(model.weight, 0.1)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.AdamW(model.parameters())
        wrap_optimizer(optimizer, OptimizerPolicy(weights="bf16_stochastic", exp_avg_sq="int8_block"), model)
        monitor = StateMonitor(optimizer, every=1)
        if not watch:
            monitor.remove()
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 8), 1.0 + step)).square().sum().backward()
            optimizer.step()
        return model.weight.detach().clone() + 0, monitor.report().watched

    (watched, seen), (alone, unseen) = train(True), train(False)
    assert torch.equal(watched, alone)
    assert (seen, unseen) == (4, 0)
