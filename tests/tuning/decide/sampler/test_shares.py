"""What each decision did, by the fitted models: its interval holds the truth, shares add up, and nothing is made up."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from autoprec.policy.space import space_from_dict
from autoprec.tuning.decide.problem import FloatTable, Params, Problem, layer_key
from autoprec.tuning.decide.sampler.expectation import Expectation, Goals
from autoprec.tuning.decide.sampler.posterior import TIMED_NOISE
from autoprec.tuning.decide.sampler.prior import HEAD_WEIGHT, Prior
from autoprec.tuning.decide.sampler.shares import MOST_DECISIONS, decision_shares
from autoprec.tuning.study.run import Run
from tests.tuning.models import gpt
from tests.tuning.synthetic import run_of

SPACE = space_from_dict(
    {
        **{"schema": "autoprec.space/1", "name": "x", "baseline": "bf16"},
        "choices": [{"match": "*", "choices": ["bf16", "fp8_rowwise", "fp8_tensorwise"]}],
        "optimizer": {"exp_avg": ["fp32", "bf16"]},
        "activations": ["keep", "bf16"],
    }
)
MOMENTS, AROUND = "optimizer.exp_avg", "activations"


@dataclass
class Truth:
    """A study whose shares are known: what each entry takes and adds, and what parameters do."""

    problem: Problem
    prior: Prior
    time_ms: FloatTable
    error2: FloatTable
    saved_ms: Mapping[tuple[str, str], float]
    effect: Mapping[tuple[str, str], float]
    added2: Mapping[tuple[str, str], float]

    def _rows(self) -> np.ndarray:
        return np.arange(len(self.problem.groups))

    def step(self, params: Params) -> tuple[float, float]:
        """Return (milliseconds, divergence) of a policy, without noise."""
        index, rows = self.problem.indices(params), self._rows()
        used = [(name, self.problem.value(params, name)) for name in (MOMENTS, AROUND)]
        time = 10.0 + float(self.time_ms[rows, index].sum()) - sum(self.saved_ms.get(one, 0.0) for one in used)
        square = float(self.error2[rows, index].sum()) + sum(self.added2.get(one, 0.0) for one in used)
        return time, 0.05 * math.sqrt(square) * math.exp(sum(self.effect.get(one, 0.0) for one in used))

    def shares(self, params: Params) -> dict[tuple[str, str], tuple[float, float, float]]:
        """Return (milliseconds, share of the time, share of the squared divergence) of each decision, by its choice."""
        index, base = (self.problem.indices(p) for p in (params, self.problem.params_of("bf16")))
        rows, names = self._rows(), self.problem.choice_names
        saved = self.time_ms[rows, base] - self.time_ms[rows, index]
        used = [one for one in (*self.effect, *self.added2) if self.problem.value(params, one[0]) == one[1]]
        summed = sum(self.effect.get(one, 0.0) for one in used)
        left = math.exp(-2 * summed)
        total = float(self.error2[rows, index].sum()) + sum(self.added2.get(one, 0.0) for one in used)
        out: dict[tuple[str, str], tuple[float, float]] = {}
        for g, group in enumerate(self.problem.groups):
            key = (re.sub(r"\d+", "*", group.name), names[index[g]])
            before = out.get(key, (0.0, 0.0))
            out[key] = (before[0] + float(saved[g]), before[1] + float(self.error2[g, index[g]]) / total * left)
        for one in used:
            part = self.added2.get(one, 0.0) / total * left
            part += (1 - left) * self.effect.get(one, 0.0) / summed if summed else 0.0
            out[one] = (self.saved_ms.get(one, 0.0), part)
        gain = sum(time for time, _ in out.values())
        return {key: (time, time / gain, part) for key, (time, part) in out.items()}


def truth(seed: int, *, blocks: int = 1, timed: bool = True) -> Truth:
    """Return a study whose tables are as wrong as those of real ones are believed to be."""
    problem, rng = Problem.build(gpt(blocks), SPACE), np.random.default_rng(seed)
    groups, choices = problem.allowed.shape
    ratio = np.array([{"bf16": 1.0}.get(name, 0.6) for name in problem.choice_names])
    level = np.array([{"bf16": 2e-6}.get(name, 1e-3) for name in problem.choice_names])
    time_ms = rng.uniform(0.5, 1.5, (groups, 1)) * ratio * rng.uniform(0.9, 1.1, (groups, choices))
    error2 = rng.lognormal(0, 1, (groups, 1)) * level
    probed = float(rng.uniform(0.2, 1.0) * 1e-3)
    prior = Prior(
        time_ms=time_ms,
        error2=error2,
        base_time_ms=10.0,
        parameter_error2=lambda params: probed * (params.get(AROUND) == "bf16"),
        parameter_time_ms={(AROUND, "bf16"): -0.5},
        time_noise=TIMED_NOISE if timed else {1e-4: 1.0},
        time_trust=0.3 if timed else 0.001,
    )
    head = np.array([HEAD_WEIGHT if "head" in group.flags else 1.0 for group in problem.groups])
    wrong_time = rng.normal(0, 0.2, (1, choices)) + rng.normal(0, 0.045, (groups, choices))
    wrong_error = rng.normal(0, 0.06, (1, choices)) + rng.normal(0, 0.25, (groups, choices))
    return Truth(
        problem,
        prior,
        time_ms * (1 + wrong_time * timed),
        error2 * np.exp(2 * wrong_error) * head[:, None],
        {(AROUND, "bf16"): 0.5 + rng.normal(0, 0.2) * timed},
        {(MOMENTS, "bf16"): rng.normal(0, 0.25)},
        {(AROUND, "bf16"): probed},
    )


def fitted(found: Truth, seed: int, target: Params, *, timed: bool = True, runs: int = 12) -> Expectation:
    """Return models fitted to a dozen runs of a study, and two more seeds of the policy that is asked about."""
    problem, rng = found.problem, np.random.default_rng(1000 + seed)
    expectation = Expectation(problem, found.prior, Goals(timed=timed))
    tried: list[tuple[Params, int]] = [(target, 0), (target, 1), (target, 2)]
    tried += [(problem.params_of(choice), 0) for choice in problem.choice_names]
    while len(tried) < runs + 2:
        tried.append(({name: rng.choice(d.choices) for name, d in problem.distributions().items()}, 0))

    def run(params: Params, paired: int) -> Run:
        time, gap = found.step(params)
        return run_of(params, paired, gap * math.exp(rng.normal(0, 0.36)), time * (1 + rng.normal(0, 0.02) * timed))

    expectation.fit([run(params, paired) for params, paired in tried])
    return expectation


def asked(problem: Problem, **parameters: str) -> dict[str, Any]:
    """Return a policy in which attention is in FP8 by row, the MLPs by tensor, and the head as it was."""
    names = {"optimizer_exp_avg": MOMENTS, "activations": AROUND}
    params = problem.params_of("bf16", **{names[name]: value for name, value in parameters.items()})
    for group in problem.free_groups:
        if "attn" in group.name or "mlp" in group.name:
            params[layer_key(group.name)] = "fp8_rowwise" if "attn" in group.name else "fp8_tensorwise"
    return params


def key_of(row: Mapping[str, Any]) -> tuple[str, str]:
    return re.sub(r"\d+", "*", re.sub(r" \(\d+\)", "", row["decision"])), row["choice"]


@cache
def covered() -> dict[str, list[bool]]:
    """Return, of each quantity, whether the interval of every decision of 16 studies holds the truth."""
    out: dict[str, list[bool]] = {"saved_ms": [], "time_share": [], "divergence_share": [], "parameter": []}
    for seed in range(16):
        found = truth(seed)
        params = asked(found.problem, optimizer_exp_avg="bf16", activations="bf16")
        *rows, _ = decision_shares(found.problem, fitted(found, seed, params), params, 1.0)
        true = found.shares(params)
        for row in rows:
            for name, value in zip(("saved_ms", "time_share", "divergence_share"), true[key_of(row)], strict=True):
                if row[name] is not None:
                    holds = row[name]["low"] <= value <= row[name]["high"]
                    out[name].append(holds)
                    if not row["layers"] and name == "divergence_share":
                        out["parameter"].append(holds)
    return out


@pytest.mark.parametrize("name", ["saved_ms", "time_share", "divergence_share", "parameter"])
def test_nine_of_ten_intervals_hold_the_truth(name: str) -> None:
    holds = covered()[name]
    assert len(holds) >= 30
    assert sum(holds) >= 0.9 * len(holds), f"{sum(holds)} of {len(holds)}"


def test_an_interval_says_more_than_nothing() -> None:
    """Shares of known times are known, and more runs make the others narrower."""
    found = truth(3)
    params = asked(found.problem)
    few, many = (fitted(found, 3, params, runs=runs) for runs in (6, 60))
    widths: list[list[float]] = []
    for expectation in (few, many):
        *rows, _ = decision_shares(found.problem, expectation, params, 1.0)
        widths.append(
            [row["saved_ms"]["high"] - row["saved_ms"]["low"] for row in rows if row["choice"] != row["over"]]
        )
    assert sum(widths[1]) < 0.8 * sum(widths[0])
    assert all(row["divergence_share"]["high"] - row["divergence_share"]["low"] < 0.6 for row in rows)
    exact = truth(3, timed=False)
    *rows, together = decision_shares(exact.problem, fitted(exact, 3, params, timed=False), params, 1.0)
    assert {row["source"] for row in (*rows, together)} == {"modelled"}
    for row in rows:
        value = exact.shares(params)[key_of(row)][1]
        assert row["time_share"]["value"] == pytest.approx(value, abs=0.01)
        assert row["time_share"]["high"] - row["time_share"]["low"] < 0.02


@pytest.mark.parametrize("parameters", [{}, {"optimizer_exp_avg": "bf16"}, {"activations": "bf16"}])
def test_shares_are_of_one_whole(parameters: dict[str, str]) -> None:
    found = truth(5, timed=False)
    params = asked(found.problem, **parameters)
    *rows, together = decision_shares(found.problem, fitted(found, 5, params, timed=False), params, 1.0)
    assert {row["decision"] for row in rows if not row["layers"]} == {
        {"optimizer_exp_avg": MOMENTS, "activations": AROUND}[name] for name in parameters
    }
    assert sum(row["time_share"]["value"] for row in rows) == pytest.approx(1.0, abs=0.01)
    assert sum(row["divergence_share"]["value"] for row in rows) == pytest.approx(
        1.0, abs=0.005
    )  # up to what did nothing
    assert together["saved_ms"]["value"] == pytest.approx(sum(row["saved_ms"]["value"] for row in rows), rel=0.01)
    assert together["layers"] == sum(row["layers"] for row in rows)


def test_layers_at_the_baseline_save_nothing_and_may_still_diverge() -> None:
    found = truth(1)
    params = asked(found.problem)
    rows = {row["decision"]: row for row in decision_shares(found.problem, fitted(found, 1, params), params, 1.0)}
    head = rows.get("lm_head")
    if head is not None:  # in bf16, as it is in the baseline
        assert head["choice"] == head["over"] == "bf16"
        assert head["saved_ms"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert "together" in rows


def test_of_a_gain_that_may_be_none_no_shares_are_told() -> None:
    found = truth(2)
    same = replace(found.prior, time_ms=np.where(found.problem.allowed, 1.0, np.inf), parameter_time_ms={})
    study = replace(found, prior=same, time_ms=np.ones_like(found.time_ms))
    params = asked(study.problem)
    *rows, together = decision_shares(study.problem, fitted(study, 2, params), params, 1.0)
    assert together["saved_ms"]["low"] < 0 < together["saved_ms"]["high"]
    assert rows
    assert all(row["time_share"] is None for row in rows)
    assert all(row["divergence_share"] is not None for row in rows)


def test_a_policy_that_decides_nothing_has_no_decisions() -> None:
    found = truth(0)
    params = found.problem.params_of("bf16")
    assert decision_shares(found.problem, fitted(found, 0, params), params, 1.0) == []


def test_equal_layers_of_all_blocks_are_one_row_and_a_long_list_ends_with_the_others() -> None:
    found = truth(4, blocks=3)
    params = asked(found.problem)
    rows = decision_shares(found.problem, fitted(found, 4, params), params, 1.0)
    assert "h.*.mlp.c_fc (3)" in [row["decision"] for row in rows]
    assert rows[0]["saved_ms"]["value"] == max(row["saved_ms"]["value"] for row in rows[:-1])
    mixed = params | {layer_key(g.name): g.choices[(i * 7 // 2) % 3] for i, g in enumerate(found.problem.free_groups)}
    assert len(decision_shares(found.problem, fitted(found, 4, mixed), mixed, 1.0)) <= MOST_DECISIONS + 1


def test_the_same_study_is_told_the_same_way_and_is_plain_data() -> None:
    found = truth(6)
    params = asked(found.problem, optimizer_exp_avg="bf16")
    once, again = (decision_shares(found.problem, fitted(found, 6, params), params, 1.0) for _ in range(2))
    assert once == again
    assert json.loads(json.dumps(once, allow_nan=False)) == once
