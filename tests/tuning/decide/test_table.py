from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from autoprec.errors import UsageError
from autoprec.policy import policy_from_dict, resolve
from autoprec.policy.space import load_space
from autoprec.trial.protocol import GradientErrors, ProbeResult
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.scan import SensitivityScan
from autoprec.tuning.decide.table import SensitivityTable, families, mixed_params, plan_probes
from tests.tuning.models import even_space, gpt

HOPPER = Problem.build(gpt(), even_space("hopper-fp8"))
CPU = Problem.build(gpt(), load_space("cpu"))


def answers(problem: Problem, error2: np.ndarray, extra: float = 0.0) -> GradientErrors:
    """Answer a complete plan of a model whose squares add exactly."""
    rows = []
    for probe in plan_probes(problem):
        head, _, tail = probe.id.partition("|")
        if head == "parameter":
            layers = error2[:, problem.choice_names.index("bf16")].sum() if tail == "activations=bf16" else 0.0
            value = layers + extra
        elif head == "mixed":
            value = error2[np.arange(len(error2)), problem.indices(mixed_params(problem, int(tail)))].sum()
        else:
            value = sum(error2[int(g), problem.choice_names.index(tail)] for g in head.split(","))
        rows.append(ProbeResult(probe.id, math.sqrt(value), 1.0))
    return GradientErrors(tuple(rows), 0.5, reference_loss=1.0)


def table_of(problem: Problem, found: GradientErrors) -> SensitivityTable:
    scan = SensitivityScan(problem)
    scan.add(found)
    return scan.table()


def errors(problem: Problem, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = rng.lognormal(-9, 1, problem.allowed.shape)
    if "keep" in problem.choice_names:
        out[:, problem.choice_names.index("keep")] = 0.0
    return out


def test_a_complete_scan_gives_back_what_was_measured() -> None:
    wanted = errors(HOPPER)
    table = table_of(HOPPER, answers(HOPPER, wanted))
    np.testing.assert_allclose(table.error2, wanted, rtol=1e-9)
    assert table.measured is not None
    assert table.measured.all()
    assert table.noise == 0.5
    assert table.misfit.count == 4
    assert table.misfit.ratio == pytest.approx(1.0)
    point = mixed_params(HOPPER, 99)
    index = HOPPER.indices(point)
    expected = math.sqrt(wanted[np.arange(17), index].sum())
    assert table.predict(HOPPER, point) == pytest.approx(expected)


def test_a_probe_changes_only_what_it_asks_about() -> None:
    for probe in plan_probes(HOPPER):
        head, _, choice = probe.id.partition("|")
        policy = policy_from_dict(probe.policy)
        if head in ("parameter", "mixed"):
            continue
        assert policy.activations == "keep"
        plans = resolve(policy, [layer.name for layer in HOPPER.report.layers])
        changed = {name for name, plan in plans.items() if not plan.keeps}
        assert changed == {name for g in head.split(",") for name in HOPPER.groups[int(g)].layers}, choice


def test_autocast_is_charged_for_what_its_gemms_do_not_explain() -> None:
    wanted = errors(CPU)
    table = table_of(CPU, answers(CPU, wanted, extra=1e-4))
    cast, gemms = CPU.params_of("bf16", activations="bf16"), CPU.params_of("bf16")
    assert table.predict(CPU, cast) ** 2 == pytest.approx(table.predict(CPU, gemms) ** 2 + 1e-4)
    assert table.predict(CPU, CPU.params_of("keep")) == 0.0


def test_a_probe_that_was_not_finite_rules_the_choice_out() -> None:
    found = answers(HOPPER, errors(HOPPER))
    probe = found.probes[3]
    head, _, choice = probe.id.partition("|")
    table = table_of(
        HOPPER, replace(found, probes=(*found.probes[:3], replace(probe, nonfinite=True), *found.probes[4:]))
    )
    assert table.error2[int(head), HOPPER.choice_names.index(choice)] == math.inf


def test_missing_probes_are_filled_in_from_group_and_choice() -> None:
    level, depth = np.array([1.0, 2.0, 4.0, 3.0, 1.5, 2.5, 2.0]), np.geomspace(1, 10, 17)
    wanted = 1e-6 * depth[:, None] * level
    found = answers(HOPPER, wanted)
    table = table_of(HOPPER, replace(found, probes=tuple(row for k, row in enumerate(found.probes) if k % 6)))
    np.testing.assert_allclose(table.error2, wanted, rtol=0.35)
    assert table.measured is not None
    assert not table.measured.all()


def test_a_choice_that_no_probe_is_about_is_told_from_its_format() -> None:
    """A scan that was cut off had asked about bf16 alone, and predicted all fp8_delayed like bf16."""
    rows = [ProbeResult(f"{g}|bf16", 0.001 * (g + 1)) for g in range(4)]
    table = table_of(HOPPER, GradientErrors(tuple(rows)))
    found = {name: table.predict(HOPPER, HOPPER.params_of(name)) for name in ("bf16", "fp8_rowwise", "fp8_delayed")}
    assert found["fp8_delayed"] == pytest.approx(10 * found["bf16"], rel=0.3)
    assert found["fp8_rowwise"] == pytest.approx(10 * found["bf16"], rel=0.3)
    # one probe of a choice, of the group that errs least, is not the level of all groups
    least = [*rows, ProbeResult("0|fp8_delayed", 0.012)]
    table = table_of(HOPPER, GradientErrors(tuple(least)))
    column = table.error2[:4, HOPPER.choice_names.index("fp8_delayed")]
    np.testing.assert_allclose(np.sqrt(column), [0.012, 0.024, 0.036, 0.048], rtol=0.02)


def test_one_pass_per_family_is_shared_out_along_the_profile() -> None:
    depth = np.geomspace(1, 8, 4)
    rows = []
    family = next(f for f in families(HOPPER) if len(f) == 4)
    for g, value in zip(family, depth, strict=True):
        rows.append(ProbeResult(f"{g}|fp8_tensorwise", math.sqrt(1e-4 * value)))
    rows.append(ProbeResult(",".join(map(str, family)) + "|fp8_rowwise", math.sqrt(1e-5)))
    table = table_of(HOPPER, GradientErrors(tuple(rows)))
    column = HOPPER.choice_names.index("fp8_rowwise")
    np.testing.assert_allclose(table.error2[family, column], 1e-5 * depth / depth.sum())


def test_json_round_trip() -> None:
    found = answers(HOPPER, errors(HOPPER))
    failed = replace(found.probes[0], gradient_error=None)
    table = table_of(HOPPER, replace(found, probes=(failed, *found.probes[1:])))
    again = SensitivityTable.from_json(json.loads(json.dumps(table.to_json(), allow_nan=False)))
    np.testing.assert_array_equal(again.error2, table.error2)
    assert (again.noise, again.misfit, again.passes, again.groups) == (0.5, table.misfit, table.passes, table.groups)


def test_rows_are_in_units_of_the_gradient_noise() -> None:
    rows = table_of(HOPPER, answers(HOPPER, errors(HOPPER))).rows()
    assert len(rows) == HOPPER.allowed.sum()
    assert rows[0]["noise_share"] == pytest.approx(rows[0]["gradient_error"] / 0.5)


def test_a_probe_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="not of this model"):
        table_of(HOPPER, GradientErrors((ProbeResult("99|bf16", 0.1),)))
