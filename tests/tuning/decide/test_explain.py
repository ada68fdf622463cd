from __future__ import annotations

import math

import numpy as np
import pytest

from autoprec.tuning.decide.explain import explain_layers, importance
from autoprec.tuning.decide.problem import layer_key
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.study.run import Run, metrics_of
from tests.tuning.synthetic import Synthetic, synthetic


def table_of(found: Synthetic, noise: float | None = 0.5) -> SensitivityTable:
    problem = found.problem
    return SensitivityTable(
        tuple(g.name for g in problem.groups), problem.choice_names, found.prior.error2, noise=noise
    )


def test_every_group_has_a_reason_with_its_numbers() -> None:
    found = synthetic()
    params = found.problem.params_of("bf16") | {layer_key("h.1.mlp.c_fc"): "fp8_rowwise"}
    reasons = explain_layers(found.problem, params, found.prior.time_ms, table_of(found))
    assert [r.group for r in reasons] == [g.name for g in found.problem.groups]
    changed = next(r for r in reasons if r.group == "h.1.mlp.c_fc")
    g = [g.name for g in found.problem.groups].index("h.1.mlp.c_fc")
    base, here = (found.problem.choice_names.index(c) for c in ("bf16", "fp8_rowwise"))
    assert changed.saved_ms == pytest.approx(found.prior.time_ms[g, base] - found.prior.time_ms[g, here])
    assert changed.gradient_error == pytest.approx(math.sqrt(found.prior.error2[g, here]))
    assert changed.error_share > 0.9
    assert "saves" in changed.text
    assert "of the noise)" in changed.text
    kept = next(r for r in reasons if r.group == "lm_head")
    assert kept.saved_ms == 0
    assert "would be faster but add an error" in kept.text
    assert sum(r.error_share for r in reasons) == pytest.approx(1.0)


def test_another_choice_is_only_said_to_break_a_limit_that_it_breaks() -> None:
    found = synthetic()
    args = found.problem, found.problem.params_of("bf16"), found.prior.time_ms, table_of(found)
    strict = {r.group: r.text for r in explain_layers(*args, limit=1e-9)}
    assert "% in all, beyond the limit of 1e-07 %" in strict["h.1.mlp.c_fc"]
    loose = {r.group: r.text for r in explain_layers(*args, limit=1e9)}
    assert "within the limit in all; no better policy that was measured has it" in loose["h.1.mlp.c_fc"]
    assert not any("but add an error" in text for text in loose.values())


def test_a_choice_is_not_called_faster_for_what_the_fit_leaves_open() -> None:
    found = synthetic()
    same = np.ones_like(found.prior.time_ms)
    same[:, 1:] -= 1e-3
    reasons = explain_layers(found.problem, found.problem.params_of("bf16"), same, table_of(found))
    assert not any("faster but" in r.text for r in reasons)


def test_what_is_adopted_is_not_called_slower_and_worse_without_a_word() -> None:
    found = synthetic()
    slower = found.prior.time_ms.copy()
    index = found.problem.choice_names.index("fp8_rowwise")
    slower[:, index] = 2 * slower[:, found.problem.choice_names.index("bf16")]
    params = found.problem.params_of("bf16") | {layer_key("h.1.mlp.c_fc"): "fp8_rowwise"}
    reason = next(
        r for r in explain_layers(found.problem, params, slower, table_of(found)) if r.group == "h.1.mlp.c_fc"
    )
    assert "expected to be" in reason.text
    assert reason.text.endswith("no better policy that was measured has another choice here")


def test_what_groups_save_adds_up_to_no_more_than_was_measured() -> None:
    """The cost model may promise more than the policy was timed to save."""
    found = synthetic()
    args = found.problem, found.problem.params_of("fp8_rowwise"), found.prior.time_ms, table_of(found)
    whole = sum(r.saved_ms for r in explain_layers(*args))
    reasons = explain_layers(*args, whole_ms=whole / 2)
    assert sum(r.saved_ms for r in reasons) == pytest.approx(whole / 2)
    assert any("saves about" in r.text for r in reasons)
    assert sum(r.saved_ms for r in explain_layers(*args, whole_ms=2 * whole)) == pytest.approx(whole)
    assert not any("saves" in r.text for r in explain_layers(*args, whole_ms=-1.0))


def test_a_choice_whose_gradient_is_not_finite_is_named_so() -> None:
    found = synthetic()
    error2 = found.prior.error2.copy()
    error2[3, 1:] = np.inf
    table = SensitivityTable(table_of(found).groups, found.problem.choice_names, error2)
    reason = explain_layers(found.problem, found.problem.params_of("bf16"), found.prior.time_ms, table)[3]
    assert "not finite" in reason.text


def test_the_group_that_moves_the_objectives_most_leads() -> None:
    found = synthetic()
    g = 5
    found.prior.error2[g, 1:] *= 500
    found.prior.time_ms[g] *= 4
    rng = np.random.default_rng(0)
    records = []
    for k in range(40):
        params = {
            name: str(rng.choice(np.array(d.choices, dtype=object)))
            for name, d in found.problem.distributions().items()
        }
        params = {n: int(v) if v.isdigit() else v for n, v in params.items()}
        step, gap = found.step(params)
        metrics = {"step_time_ms": step, "divergence": gap}
        records.append(Run(k, "search", f"trial {k}", params, {}, "ok", metrics=metrics_of(metrics)))
    found_importance = importance(found.problem, found.prior.time_ms, table_of(found), records)
    assert found_importance[0].name == layer_key(found.problem.groups[g].name)
    assert sum(i.time_share for i in found_importance) == pytest.approx(1.0)
    assert sum(i.error_share for i in found_importance) == pytest.approx(1.0)
    idle = next(i for i in found_importance if "amax_history_len" in i.name)
    assert idle.time_share < 0.05


def searched(found: Synthetic, seed: int, matters: str = "", factor: float = 1.0) -> list[Run]:
    """Random trials, each gap off by a lognormal factor; one parameter's last value may multiply it as well."""
    rng = np.random.default_rng(seed)
    records = []
    for k in range(18):
        params = {
            name: d.choices[int(rng.integers(len(d.choices)))] for name, d in found.problem.distributions().items()
        }
        step, gap = found.step(params)
        gap *= float(np.exp(0.4 * rng.normal()))
        if matters and params[matters] == found.problem.parameters[matters][-1]:
            gap *= factor
        metrics = {"step_time_ms": step, "divergence": gap}
        records.append(Run(k, "search", f"trial {k}", params, {}, "ok", metrics=metrics_of(metrics)))
    return records


@pytest.mark.parametrize("seed", range(4))
def test_noise_is_not_called_importance(seed: int) -> None:
    """A history length that cannot matter was told to explain most of the divergence."""
    found = synthetic(space="te-delayed")
    told = importance(found.problem, found.prior.time_ms, table_of(found), searched(found, seed))
    parameters = {i.name: i for i in told if not i.name.startswith("layer:")}
    assert parameters
    assert all(i.error_share == 0.0 and i.time_share == 0.0 for i in parameters.values())


def test_a_parameter_that_matters_is_found() -> None:
    found = synthetic(space="te-delayed")
    name = next(n for n in found.problem.parameters if "margin" in n or "amax" in n)
    told = importance(found.problem, found.prior.time_ms, table_of(found), searched(found, 0, name, 30.0))
    assert max(told, key=lambda i: i.error_share).name == name
