"""Twins: what an operator would have given without rounding, beside a step that is not changed by them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.trial.inside.judging.samples import relative_error
from autoprec.trial.inside.judging.shadow import Measure, ShadowRecorder

BF16 = torch.bfloat16


def recorded(run: Any, model: nn.Module | None = None) -> tuple[ShadowRecorder, dict[str, list[Measure]], Any]:
    """Return the recorder, measures by the operator's name, and what was computed."""
    with ShadowRecorder(model or nn.Linear(2, 2)) as recorder:
        out = run()
        twins = recorder.twin_of(out) if isinstance(out, torch.Tensor) else None
    found: dict[str, list[Measure]] = {}
    for index, measure in recorder.measures.items():
        found.setdefault(recorder.trace.calls[index].name, []).append(measure)
    return recorder, found, (out, twins)


def test_an_error_grows_along_a_chain_that_is_rounded_at_each_operator() -> None:
    x = torch.rand(64, 300).to(BF16)

    def run() -> torch.Tensor:
        total = torch.zeros(64, dtype=BF16)
        for column in range(300):
            total = total + x[:, column]
        return total

    _, found, (out, twin) = recorded(run)
    exact = x.double().sum(1)
    assert twin is not None
    assert relative_error(twin, exact) < 1e-6
    assert relative_error(out, exact) == pytest.approx(found["add"][-1].error, rel=1e-3)
    assert found["add"][-1].error > 5 * found["add"][0].error
    assert found["add"][-1].before == pytest.approx(found["add"][-2].error)


def test_a_step_in_fp32_has_no_twins_and_one_in_16_bits_is_not_changed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    x = torch.randn(4, 8)

    def step(dtype: torch.dtype) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            loss = F.cross_entropy(model(x), torch.arange(4))
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    _, found, _ = recorded(lambda: step(torch.float32), model)
    assert not found
    alone = step(BF16)
    _, found, (beside, _) = recorded(lambda: step(BF16), model)
    assert found
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))


@pytest.mark.parametrize(
    ("write", "share"),
    [
        (lambda a, b: a.add_(b, alpha=0.001), 1.0),
        (lambda a, b: a.lerp_(b, 0.0005), 1.0),
        (lambda a, b: a.mul_(0.9999), 1.0),
        (lambda a, b: a.mul_(0.5), 0.0),
        (lambda a, b: torch._foreach_add_([a], [b], alpha=0.001), 1.0),
        (lambda a, b: torch._foreach_lerp_([a], [b], 0.9), 0.0),
    ],
)
def test_what_stays_where_its_twin_moves_is_counted(write: Any, share: float) -> None:
    a, b = torch.full((32,), 1.0, dtype=BF16), torch.full((32,), 1.5, dtype=BF16)
    recorder, _, _ = recorded(lambda: write(a, b))
    assert [m.unchanged for m in recorder.measures.values()] == [share]


def test_master_weights_lose_nothing_where_they_are_rounded() -> None:
    weights, master = torch.ones(8, dtype=BF16), torch.ones(8)

    def run() -> None:
        master.add_(1e-4)
        weights.copy_(master)

    _, found, _ = recorded(run)
    assert found["copy"][0].unchanged is None
    _, found, _ = recorded(lambda: weights.copy_(weights.float() + 1e-4))
    assert found["copy"][0].unchanged == 1.0


def test_positions_that_become_one_are_counted() -> None:
    _, found, _ = recorded(lambda: torch.arange(600).to(BF16))
    assert found["_to_copy"][0].figures == {
        "distinct": int(torch.arange(600).to(BF16).unique().numel()),
        "positions": 600,
    }
    _, found, _ = recorded(lambda: torch.arange(250, dtype=BF16))
    assert found["arange"][0].figures == {"distinct": 250, "positions": 250}
    _, found, _ = recorded(lambda: torch.randint(0, 600, (600,)).to(BF16))
    assert not found["_to_copy"][0].figures  # labels, not positions


def test_experts_that_fp32_would_have_chosen_are_counted_through_the_gate() -> None:
    torch.manual_seed(0)
    gate, x = nn.Linear(64, 16, bias=False), torch.randn(512, 64)

    def run() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", BF16):
            return gate(x).softmax(-1).topk(2).indices

    _, found, (chosen, _) = recorded(run, gate)
    wanted = (x @ gate.weight.t()).detach().topk(2).indices
    changed = float((chosen.sort(-1).values != wanted.sort(-1).values).any(-1).float().mean())
    assert changed > 0
    assert found["topk"][0].figures["changed"] == pytest.approx(changed)
    assert found["topk"][0].figures["tokens"] == 512


@pytest.mark.parametrize(
    ("run", "eps"),
    [
        (lambda x: x + 1e-8, 1e-8),
        (lambda x: x.clamp_min(1e-9), 1e-9),
        (lambda x: x + 1e-4, None),
        (lambda x: x.float() + 1e-8, None),
        (lambda x: x.to(BF16) + 1e-8, None),
    ],
)
def test_an_epsilon_that_is_zero_in_the_dtype_is_noted(run: Any, eps: float | None) -> None:
    recorder, _, _ = recorded(lambda: run(torch.ones(4, dtype=torch.float16)))
    assert [m.figures.get("eps") for m in recorder.measures.values()][-1:] in ([eps], [])
    assert (eps is None) == all("eps" not in m.figures for m in recorder.measures.values())


def test_overflow_is_what_fp32_would_have_held() -> None:
    big = torch.full((4,), 300.0, dtype=torch.float16)
    _, found, _ = recorded(lambda: big * big)
    assert found["mul"][0].overflowed == 4
    masked = torch.tensor([1.0, float("-inf")], dtype=torch.float16)
    _, found, _ = recorded(lambda: masked * 2)
    assert found["mul"][0].overflowed == 0


def test_running_statistics_have_twins_though_batch_norm_does_not_say_that_it_writes() -> None:
    norm = nn.BatchNorm1d(8, momentum=0.0001).to(BF16)
    x = torch.randn(16, 8).to(BF16)
    _, found, _ = recorded(lambda: norm(x), norm)
    (measure,) = [m for several in found.values() for m in several if m.unchanged is not None]
    assert measure.unchanged == pytest.approx(0.5, abs=0.1)  # a mean of 0 moves, a variance of 1 does not


@pytest.mark.parametrize(
    "used",
    [
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, F.one_hot(y, 8).to(x.dtype)),
        lambda x, y, w: x * (1 - (y > 3).to(x.dtype))[:, None],
        lambda x, y, w: x - y.to(x.dtype)[:, None],
        lambda x, y, w: x + torch.arange(8).to(x.dtype) ** 0.5,
        lambda x, y, w: x.masked_fill(x > 0, 0) * -(y == 1).to(x.dtype)[:, None],
        lambda x, y, w: w.to(x.dtype).reciprocal() + x,
    ],
)
def test_integers_and_flags_that_are_cast_have_a_twin_that_is_computed_with(used: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(torch.bfloat16)
    x, y, w = torch.randn(16, 8, dtype=torch.bfloat16), torch.arange(16) % 8, torch.arange(1, 9, dtype=torch.int32)
    with ShadowRecorder(model) as recorder:
        used(model(x), y, w).sum().backward()
    assert recorder.failures == 0
