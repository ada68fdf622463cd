"""What is seen around forward and backward."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.graph.census import Held
from autoprec.trial.inside.judging.by_hand import UpdateRecorder
from autoprec.trial.inside.judging.forward import Step
from autoprec.trial.inside.judging.held import Update
from autoprec.trial.inside.judging.loop import Loop, seen
from autoprec.trial.inside.judging.shadow import ShadowRecorder
from benchmarks.precision.running import found_in_text


def step(*, clip: bool = False, scale: float = 1.0) -> Step:
    model = nn.Linear(4, 4).bfloat16()
    with ShadowRecorder(model) as recorder:
        model(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
        grads = [p.grad for p in model.parameters()]
        if clip:
            torch.stack([g.float().norm() for g in grads]).norm()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.ones(1))
    return Step(recorder, recorder.report(), scaled=scale != 1.0, scale=scale)


@pytest.mark.parametrize(
    ("between", "codes"),
    [
        (lambda _: None, ["step-before-unscale"]),
        (lambda grads: torch.nn.utils.get_total_norm(grads), ["step-before-unscale"]),
        (lambda grads: torch._foreach_mul_(grads, torch.stack([g.norm() for g in grads]).norm().clamp(max=1.0)),
         ["step-before-unscale"]),
        (lambda grads: [g.zero_() for g in grads], ["step-before-unscale"]),
        (lambda grads: torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.ones(1)), []),
        (lambda grads: [g.div_(1024.0) for g in grads], []),
        (lambda grads: [g.mul_(1 / 1024.0) for g in grads], []),
        (lambda grads: torch._foreach_div_(grads, 1024.0), []),
        (lambda grads: torch._foreach_mul_(grads, torch.tensor(1 / 1024.0)), []),
        (lambda grads: [g.float() / 1024 for g in grads], []),
    ],
)  # fmt: skip
def test_a_step_with_scaled_gradients_is_seen_where_nobody_divides_them(between: Any, codes: list[str]) -> None:
    model = nn.Linear(4, 4).bfloat16()
    with ShadowRecorder(model) as recorder:
        model(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
        between([p.grad for p in model.parameters()])
    seen_step = Step(recorder, recorder.report(), scaled=True, scale=1024.0)
    found = seen(Loop(bare="train.py:9", scaler="train.py:8"), seen_step, [])
    assert [one.code for one in found if one.code != "scaler-bf16"] == codes
    assert not codes or (found[0].where, found[0].also, found[0].figures) == (
        "train.py:9",
        ("train.py:8",),
        {"scale": 1024.0},
    )
    assert seen(Loop(scaler=""), seen_step, []) == []
    assert seen(Loop(bare="train.py:9"), replace(seen_step, scale=1.0), []) == []


UPDATE = Update("bf16", 0, 0, 20, ("weight",), 0.9, 0.1, 0.9, 1e-4, 1e-5, 1e-5, 1e-5)


def test_a_norm_before_unscaling_is_seen_where_the_loss_is_scaled() -> None:
    assert [one.code for one in seen(Loop(), step(clip=True, scale=1024.0), [])] == ["clip-before-unscale"]
    assert seen(Loop(), step(clip=True), []) == []
    assert seen(Loop(), step(scale=1024.0), []) == []


def test_each_part_of_the_loop_has_its_line() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1e-5)
    loop = Loop(
        [(optimizer, "train.py:7")],
        (("train.py:4", "bf16"),),
        updates=[UPDATE],
        scaler="train.py:12",
        stale="train.py:14",
        reduced=(("train.py:9", "bf16"), ("train.py:9", "bf16"), ("fully_shard", "bf16")),
    )
    kept = [Held("parameter", "wo.weight", "bf16", asked="fp32 by _keep_in_fp32_modules")]
    found = {(one.code, one.where): one for one in seen(loop, step(scale=2.0), kept)}
    assert found.keys() == {
        ("updates-lost", "train.py:4"),
        ("scaler-bf16", "train.py:12"),
        ("stale-casts", "train.py:14"),
        ("gradients-reduced-16bit", "train.py:9"),
        ("gradients-reduced-16bit", ""),
        ("kept-module-cast", "train.py:4"),
    }
    lost = found["updates-lost", "train.py:4"]
    assert (lost.also, lost.operator, lost.figures["rising"]) == (("train.py:7",), "SGD", False)


def test_a_moving_average_is_what_is_kept_and_not_the_optimizer_s_own() -> None:
    weights, average = torch.ones(8), torch.ones(8, dtype=torch.bfloat16)
    with UpdateRecorder(nn.Linear(2, 2)) as update:
        average.lerp_(weights.bfloat16() + 1, 1e-4)
    assert [one.code for one in seen(Loop(update=update), step(), [])] == ["ema-16bit"]
    assert seen(Loop(update=update, stepping=((0, 99),)), step(), []) == []
    storage = frozenset((average.untyped_storage()._cdata,))
    assert seen(Loop(update=update, trained=storage), step(), []) == []


@pytest.mark.parametrize(
    ("loop", "skipped"),
    [
        (Loop(scaler="t.py:8", skipped=(2.0**24,) * 4), 4),
        (Loop(scaler="t.py:8", skipped=(1024.0, 2048.0)), 2),
        (Loop(scaler="t.py:8", skipped=(1024.0,) * 2, fixed=True), 2),
        (Loop(scaler="t.py:8", fixed=True), 0),
        (Loop(scaler="t.py:8", skipped=(1024.0,), fixed=True), 0),
        (Loop(scaler="t.py:8", skipped=(65536.0, 32768.0, 16384.0, 8192.0)), None),  # which is how one begins
        (Loop(scaler="t.py:8", skipped=(65536.0,)), None),
        (Loop(scaler="t.py:8", fixed=True, bare="t.py:9"), None),  # that gradients are scaled still is said
        (Loop(scaler="t.py:8"), None),
        (Loop(skipped=(1024.0,) * 3, fixed=True), None),
    ],
)
def test_a_loss_scale_that_stays_is_an_error_where_updates_are_skipped_at_it(loop: Loop, skipped: int | None) -> None:
    model = nn.Linear(4, 4)
    with ShadowRecorder(model) as recorder, torch.autocast("cpu", torch.float16):
        model(torch.randn(2, 4)).sum().backward()
    found = seen(loop, Step(recorder, recorder.report(), scaled=True, scale=256.0), [])
    said = [(one.code, one.figures.get("skipped")) for one in found]
    assert said == (
        [("scaler-fixed", skipped)] if skipped is not None else [("step-before-unscale", None)] * bool(loop.bare)
    )


_SCALED = """
import torch
from torch import nn
torch.manual_seed(0)
net, head = nn.Linear(16, 16), nn.Linear(16, 4)
MADE
for step in range(5):
    with torch.autocast("cpu", torch.float16):
        loss = head(net(torch.randn(8, 16))).float().square().mean()
    for one in several:
        one.zero_grad()
    scaler.scale(loss).backward()
    for one in several:
        STEP
    AFTER
"""
_MADE = "scaler, several = torch.amp.GradScaler('cpu', init_scale=256.0), "
_ONE = _MADE + "[torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)]"
_TWO = _MADE + "[torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, head)]"
_OWN = "class Own(torch.amp.GradScaler):\n    def update(self):\n        self._per_optimizer_states.clear()\n"
_OWN += _ONE.replace("torch.amp.GradScaler", "Own")
_BY_HAND = (
    "scale = scaler.get_scale(); [p.grad.mul_(1 / scale) for g in one.param_groups for p in g['params']]; one.step()"
)


@pytest.mark.parametrize(
    ("made", "taken", "after", "severities"),
    [
        (_ONE, "scaler.step(one)", "scaler.update()", []),
        (_TWO, "scaler.step(one)", "scaler.update()", []),
        (_OWN, "scaler.step(one)", "scaler.update()", []),
        (_ONE, "scaler.unscale_(one); scaler.step(one)", "scaler.update(256.0)", []),
        (_ONE, "scaler.step(one)", "", ["warning"]),
        (_ONE, _BY_HAND, "", ["warning"]),
        (_ONE.replace("256.0", "2.0**30"), "scaler.step(one)", "scaler.update(2.0**30)", ["error"]),
        (_ONE.replace("256.0", "2.0**30"), "scaler.step(one)", "scaler._per_optimizer_states.clear()", ["error"]),
        (_ONE.replace("256.0", "2.0**30"), "scaler.step(one)", "scaler.update()", []),
    ],
)
def test_a_scaler_that_nobody_updates_is_seen(made: str, taken: str, after: str, severities: list[str]) -> None:
    found = found_in_text(_SCALED.replace("MADE", made).replace("STEP", taken).replace("AFTER", after))
    assert [(one.code, one.severity) for one in found] == [("scaler-fixed", severity) for severity in severities]
