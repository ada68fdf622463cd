from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autoprec.graph.report import GraphReport
from autoprec.trial.protocol import GradientErrors, Probe, ProbeResult
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.scan import SensitivityScan, scan_batches
from autoprec.tuning.decide.table import SensitivityTable, mixed_params, plan_probes
from tests.tuning.models import even_space, gpt


def answer(problem: Problem, error2: np.ndarray, probes: list[Probe]) -> GradientErrors:
    rows = []
    for probe in probes:
        head, _, tail = probe.id.partition("|")
        if head == "parameter":
            value = error2[:, problem.choice_names.index("bf16")].sum()
        elif head == "mixed":
            value = error2[np.arange(len(error2)), problem.indices(mixed_params(problem, int(tail)))].sum()
        else:
            value = sum(error2[int(g), problem.choice_names.index(tail)] for g in head.split(","))
        rows.append(ProbeResult(probe.id, math.sqrt(value)))
    return GradientErrors(tuple(rows), 0.4)


def run(problem: Problem, error2: np.ndarray, max_passes: int) -> SensitivityScan:
    scan = SensitivityScan(problem, max_passes)
    while probes := scan.next_round():
        scan.add(answer(problem, error2, probes))
    return scan


def true_errors(problem: Problem, seed: int = 0) -> np.ndarray:
    """Squared errors as they look on transformers: a level per role and recipe, a trend with depth, a little rest."""
    rng = np.random.default_rng(seed)
    roles = {role: rng.lognormal(0, 1) for role in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "lm_head")}
    role = np.array([next(v for k, v in roles.items() if group.name.endswith(k)) for group in problem.groups])
    depth = np.array([int(g.name.split(".")[1]) if "." in g.name else 0 for g in problem.groups])
    choice = np.array([1e-9 if c == "bf16" else 1e-5 * rng.lognormal(0, 0.5) for c in problem.choice_names])
    rest = rng.lognormal(0, 0.15, problem.allowed.shape)
    return role[:, None] * np.exp(-0.2 * depth)[:, None] * choice[None, :] * rest


def test_a_small_model_is_scanned_completely_in_one_round() -> None:
    problem = Problem.build(gpt(2), even_space("hopper-fp8"))
    scan = run(problem, true_errors(problem), 200)
    table = scan.table()
    assert table.measured is not None
    assert table.measured.all()
    np.testing.assert_allclose(table.error2, true_errors(problem), rtol=1e-9)


def test_a_large_model_stays_within_its_passes_and_is_ranked_right() -> None:
    problem = Problem.build(gpt(12), even_space("hopper-fp8"))
    truth = true_errors(problem)
    scan = run(problem, truth, 60)
    assert scan.passes <= 60
    table = scan.table()
    rows = np.arange(len(truth))
    rng = np.random.default_rng(5)
    pairs = []
    for _ in range(60):
        index = np.array([rng.integers(0, truth.shape[1]) if rng.random() < 0.5 else 0 for _ in rows])
        index[rng.random(len(rows)) < rng.random()] = 0
        pairs.append((truth[rows, index].sum(), table.error2[rows, index].sum()))
    ranks = [np.argsort(np.argsort(column)) for column in zip(*pairs, strict=True)]
    assert np.corrcoef(ranks[0], ranks[1])[0, 1] > 0.95


def test_passes_are_spent_where_depth_matters() -> None:
    problem = Problem.build(gpt(12), even_space("hopper-fp8"))
    truth = true_errors(problem)
    outlier = next(i for i, g in enumerate(problem.groups) if g.name == "h.11.mlp.c_proj")
    truth[outlier, 1:] *= 300
    table = run(problem, truth, 60).table()
    column = problem.choice_names.index("fp8_tensorwise")
    others = [i for i, g in enumerate(problem.groups) if g.name.endswith("mlp.c_proj") and i != outlier]
    assert table.error2[outlier, column] > 10 * table.error2[others, column].max()


def test_a_budget_too_small_for_anything_still_ends() -> None:
    problem = Problem.build(gpt(12), even_space("hopper-fp8"))
    scan = run(problem, true_errors(problem), 5)
    assert np.isfinite(scan.table().error2).all()


def test_tiny_batches_are_asked_several_times() -> None:
    report = gpt(2)  # 4096 rows

    def with_rows(rows: int) -> GraphReport:
        layers = [replace(x, gemms=tuple(replace(g, m=rows) for g in x.gemms)) for x in report.layers]
        return replace(report, layers=tuple(layers))

    assert [scan_batches(with_rows(rows)) for rows in (4096, 256, 255, 64, 1)] == [1, 1, 2, 4, 4]


def test_batches_and_completeness_need_room() -> None:
    problem = Problem.build(gpt(2), even_space("hopper-fp8"))
    every = len(plan_probes(problem)) + 1
    cases = {(every, every): 1, (every, 3 * every - 1): 2, (every, 9 * every): 4, (every - 1, 0): 1}
    for (most, room), batches in cases.items():
        scan = SensitivityScan(problem, most, room=room, batches=4)
        assert scan.batches == batches
        assert (len(scan.next_round()) + 1 == every) == (most >= every)


def test_squares_are_averaged_over_batches() -> None:
    problem = Problem.build(gpt(2), even_space("hopper-fp8"))
    one, other = true_errors(problem), true_errors(problem, seed=1)
    scan = SensitivityScan(problem, room=200, batches=2)
    asked = 0
    while probes := scan.next_round():
        asked += len(probes) + 1
        scan.add(answer(problem, one, probes), answer(problem, other, probes))
    np.testing.assert_allclose(scan.table().error2, (one + other) / 2, rtol=1e-9)
    assert scan.table().passes == scan.passes == 2 * asked


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_scan_that_runs_out_of_time_still_ranks_every_group_and_choice(share: float) -> None:
    problem = Problem.build(gpt(4), even_space("hopper-fp8"))
    error2 = true_errors(problem)
    scan = SensitivityScan(problem, room=10_000)
    probes = scan.next_round()
    most = int(share * len(probes))
    scan.add(answer(problem, error2, probes[:most]))
    assert scan.unanswered == len(probes) - most
    assert scan.next_round() == []
    found = scan.table()
    assert found.parameters  # nothing else would tell these
    offered = np.isfinite(error2) & (error2 > 0)
    assert np.isfinite(found.error2[offered]).all()
    ranks = [np.argsort(np.argsort(table[offered])) for table in (error2, found.error2)]
    assert np.corrcoef(*ranks)[0, 1] > 0.8


def test_one_probe_is_enough_for_a_table() -> None:
    problem = Problem.build(gpt(2), even_space("hopper-fp8"))
    scan = SensitivityScan(problem)
    scan.add(answer(problem, true_errors(problem), scan.next_round()[:1]))
    assert np.isfinite(scan.table().error2).any()


def test_a_probe_that_fails_on_one_batch_has_failed() -> None:
    problem = Problem.build(gpt(2), even_space("hopper-fp8"))
    scan = SensitivityScan(problem, room=200, batches=2)
    probes = scan.next_round()
    good, bad = answer(problem, true_errors(problem), probes), answer(problem, true_errors(problem), probes)
    failed = replace(bad.probes[0], gradient_error=None, nonfinite=True)
    scan.add(good, replace(bad, probes=(failed, *bad.probes[1:])))
    group, _, choice = probes[0].id.partition("|")
    assert math.isinf(scan.table().error2[int(group), problem.choice_names.index(choice)])


def test_a_layer_has_no_gradient_yet_only_where_no_batch_gave_it_one() -> None:
    problem = Problem.build(gpt(2), even_space("hopper-fp8"))
    scan = SensitivityScan(problem, 60, batches=2)
    first = answer(problem, true_errors(problem), scan.next_round())
    scan.add(replace(first, hardly_moved=("a", "b")), replace(first, hardly_moved=("b", "c")))
    table = scan.table()
    assert table.hardly_moved == ("b",)
    assert SensitivityTable.from_json(table.to_json()).hardly_moved == ("b",)
