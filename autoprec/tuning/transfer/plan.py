"""From a policy of the proxy to a policy of the big model: map, drop what no longer pays, fill the room that leaves.

Errors come from the proxy's table, carried over by the law (:mod:`.forecast`); times come from the cost model at the
big model's shapes. The budget of squared error is the proxy policy's own, in units of the mini-batch gradient noise:
the search found that harmless, so it is what the big model may spend, and no more than ``--max-gradient-error``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autoprec.cost import CostModel, StepEstimate
from autoprec.cost.estimate import ratio_bounds
from autoprec.cost.kernels import LayerCost
from autoprec.cost.reasons import Rival, layer_reason
from autoprec.graph.report import GraphReport, Layer
from autoprec.graph.roles import places
from autoprec.policy import LayerPlan, Policy
from autoprec.policy.solver import IntVector, solve
from autoprec.policy.space import Choice, SearchSpace
from autoprec.precision.recipes import BUILTIN_RECIPES, KEEP, Recipe
from autoprec.support.arrays import np
from autoprec.tuning.decide.problem import GroupVariable, Problem
from autoprec.tuning.decide.rules import GlobTable, layer_rules, recipes_in
from autoprec.tuning.transfer.correction import Correction
from autoprec.tuning.transfer.counterparts import Counterparts, counterparts, refuse_unknown
from autoprec.tuning.transfer.forecast import Forecast, Prediction
from autoprec.tuning.transfer.law import Growth, growth
from autoprec.tuning.transfer.proxy import Proxy

#: What filling the room must gain of the step: less is not worth leaving the mapped policy for.
_LEAST_GAIN = 0.005
#: A share of the time by which a recipe must beat 16 bits: less is rounding of the model.
_SAME = 1e-3


@dataclass(frozen=True, slots=True)
class Lost:
    """Layers of the big model on which a recipe of the proxy is not used, and why."""

    layers: tuple[str, ...]
    choice: str
    reason: str


@dataclass(frozen=True)
class Transfer:
    """A transferred policy and how it came about.

    Attributes:
        policy: for the big model, without evidence.
        choices: layer -> what it runs.
        matched: counterparts in the proxy.
        rules: layer -> number of the proxy's rule that its counterpart obeys.
        lost, filled: what the proxy's policy had and the big model's has not; (layer, before, after) of the other way.
        growth: how many times as wide, as deep, and of as many tokens per step the big model is.
        predicted: gradient errors on the big model.
        baseline, step: modelled steps with every layer in the baseline, and under the policy; None without shapes.
        later: the same of each of the policy's phases, as far as it changes how the run began; the rest of this is of
            how it begins.
    """

    policy: Policy
    choices: dict[str, str]
    matched: Counterparts
    rules: dict[str, int]
    lost: tuple[Lost, ...]
    filled: tuple[tuple[str, str, str], ...]
    growth: Growth
    predicted: Prediction
    baseline: StepEstimate | None = None
    step: StepEstimate | None = None
    later: tuple[Transfer, ...] = ()

    @property
    def speedup(self) -> float:
        """Modelled speed-up over the baseline; 1 without shapes."""
        return self.baseline.time_ms / self.step.time_ms if self.baseline and self.step else 1.0

    @property
    def bounds(self) -> tuple[float, float] | tuple[()]:
        """The model's bounds of the speed-up; empty without shapes."""
        return ratio_bounds(self.speedup, self.step.spread) if self.step else ()


def transfer(
    policy: Policy,
    proxy: Proxy,
    report: GraphReport,
    cost: CostModel | None = None,
    *,
    hints: Sequence[tuple[str, str]] = (),
    max_gradient_error: float = 0.12,
    fill: bool = True,
    correction: Correction | None = None,
) -> Transfer:
    """Carry a policy over to a big model, every phase of the run by itself.

    Args:
        report: a step of the big model, recorded or written down; layers alone (no GEMMs) are mapped by name.
        cost: the big model's cost on the target; None drops and fills nothing.
        hints: ``(glob, role)`` where names do not tell.
        max_gradient_error: the most gradient error, as a share of the mini-batch gradient noise.
        fill: spend the room that dropped rules leave; off, a policy and its prediction are those of the mapping alone.
        correction: what a spot check of an earlier transfer found on the big model.

    Raises:
        PolicyMismatchError: too many layers have no known role, or none has a counterpart.
    """
    if policy.phases:
        asked: dict[str, Any] = {"hints": hints, "max_gradient_error": max_gradient_error, "fill": fill}
        first, *later = (
            transfer(stage, Proxy.of(stage, proxy.report, proxy.table), report, cost, correction=correction, **asked)
            for stage in policy.stages
        )
        whole = policy.with_stages([first.policy, *(found.policy for found in later)])
        return replace(first, policy=whole, later=tuple(later))
    matched = counterparts(places(report.tunable, hints), places(proxy.report.tunable, hints), proxy.choices)
    refuse_unknown(report, matched)
    job = _Job(policy, proxy, report, cost, matched, max_gradient_error, correction or Correction())
    index = job.dropped(job.mapped)
    return job.result(job.filled(index) if fill else index)


def rendered(policy: Policy, names: Sequence[str], choices: Mapping[str, str], recipes: Mapping[str, Recipe]) -> Policy:
    """Return a policy with other layer rules: as few globs as say ``choices`` exactly, ``keep`` for every other layer.

    Args:
        policy: what is said beside the layers stays.
        names: every layer of the model, tunable or not.
        choices: layer -> choice name.
        recipes: by the names that the choices use.
    """
    used = recipes_in(choices.values())
    document = policy.model_dump(by_alias=True) | {
        "layers": tuple(layer_rules(GlobTable(names), choices, names)),
        "recipes": {name: recipes[name] for name in recipes if name in used},
        "default": KEEP,
        "phases": (),
        "evidence": {},
    }
    return Policy.model_validate(document)


@dataclass(frozen=True)
class _Job:
    """One transfer while it is worked out; groups and choices are those of :attr:`problem`, as ``[G, C]`` tables."""

    policy: Policy
    proxy: Proxy
    report: GraphReport
    cost: CostModel | None
    matched: Counterparts
    max_gradient_error: float
    correction: Correction

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        return {**BUILTIN_RECIPES, **self.policy.recipes}

    @cached_property
    def problem(self) -> Problem:
        """The groups of the big model, and of the choices the proxy knows those that it can run."""
        table = self.proxy.table
        names = dict.fromkeys([*(table.choices if table is not None else ()), *self.proxy.choices.values(), KEEP])
        known = [name for name in names if recipes_in([name]) <= {*self.recipes}]
        baseline = "bf16" if "bf16" in known else KEEP
        space = SearchSpace.model_validate(
            {
                "name": "transfer",
                "baseline": baseline,
                "recipes": dict(self.policy.recipes),
                "choices": [{"match": "*", "choices": known}],
                "activations": [self.policy.activations],
                "attention": [self.policy.operators.attention],
            }
        )
        return Problem.build(self.report, space, self.cost.can_run if self.cost is not None else None)

    @cached_property
    def layers(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.report.tunable}

    @cached_property
    def grown(self) -> Growth:
        small = {layer.name: layer for layer in self.proxy.report.tunable}
        pairs = [(self.layers[name], small[other]) for name, other in self.matched.of.items()]
        both = [self.matched.pair(name) for name in self.matched.of]
        return growth(pairs, {f"{here.stack}|{here.role}": (here.count, there.count) for here, there in both})

    @cached_property
    def forecast(self) -> Forecast | None:
        """Predicted errors; None without the proxy's table."""
        if (errors := self.proxy.table) is None:
            return None
        return Forecast(self.policy, self.proxy, errors, self.problem, self.matched, self.grown, self.correction)

    @cached_property
    def budget(self) -> float:
        """The most predicted gradient error that is allowed; NaN where nothing is predicted."""
        return self.forecast.budget(self.mapped, self.max_gradient_error) if self.forecast is not None else math.nan

    def _majority(self, group: GroupVariable) -> str:
        """Return what most FLOPs of a group's counterparts run; ``keep`` where it has none."""
        counted: Counter[str] = Counter()
        for name in group.layers:
            if name in self.matched.of:
                counted[self.proxy.choices[self.matched.of[name]]] += 1 + self.layers[name].total_flops
        return max(counted, key=lambda choice: counted[choice]) if counted else KEEP

    @cached_property
    def mapped(self) -> list[str]:
        """What each group would run by its counterpart, whether or not it can."""
        return [self._majority(group) for group in self.problem.groups]

    def dropped(self, mapped: Sequence[str]) -> IntVector:
        """Return the mapped columns, the baseline where a choice cannot run or does not pay."""
        problem, columns = self.problem, {name: c for c, name in enumerate(self.problem.choice_names)}
        out = np.zeros(len(mapped), dtype=np.int64)
        for g, (group, choice) in enumerate(zip(problem.groups, mapped, strict=True)):
            out[g] = columns[choice if self._why_not(group, choice) == "" else self._plain(group)]
        return out

    def _plain(self, group: GroupVariable) -> str:
        return self.problem.baseline if self.problem.baseline in group.choices else KEEP

    @cached_property
    def _refused(self) -> dict[tuple[str, str], str]:
        return {(group, choice): why for group, choice, why in self.problem.refused}

    def _why_not(self, group: GroupVariable, choice: str) -> str:
        """Return why a group of the big model does not run its counterpart's choice; empty when it does."""
        if choice not in group.choices:
            return self._refused.get((group.name, choice), "not every layer of its group can run it")
        plain = self._plain(group)
        if self.cost is None or not self._plan(choice).scaled:
            return ""
        base, rival = self._cost(group, plain), self._cost(group, choice)
        if rival.seconds < base.seconds * (1.0 - _SAME):
            return ""
        return layer_reason(base, [Rival(choice, rival, quantised=True)], cpu=self.cost.target.is_cpu)

    def _plan(self, choice: str) -> LayerPlan:
        return Choice.parse(choice).plan(self.recipes)

    def _cost(self, group: GroupVariable, choice: str) -> LayerCost:
        assert self.cost is not None
        plan = self._plan(choice)
        parts = [self.cost.layer_cost(name, plan, self.policy.activations) for name in group.layers]
        gemm, cast, kernels = (sum(getattr(part, name) for part in parts) for name in ("gemm", "cast", "kernels"))
        return LayerCost(gemm=gemm, cast=cast, kernels=kernels, error=0.0)

    def filled(self, index: IntVector) -> IntVector:
        """Return the fastest columns within the budget, if they gain enough over ``index`` or that is beyond it."""
        if self.forecast is None or self.cost is None:
            return index
        time = self.problem.table(lambda group, choice: self._cost(group, choice).seconds)
        if KEEP in self.problem.choice_names:  # it may be faster nowhere, and would read as if nobody had decided
            decided = [
                self._plain(g) != KEEP and m != KEEP for g, m in zip(self.problem.groups, self.mapped, strict=True)
            ]
            time[decided, self.problem.choice_names.index(KEEP)] = math.inf
        found = solve(time, self.forecast.table, self.forecast.room(self.budget))
        rows = np.arange(len(index))
        beyond = self.forecast.error(index) > self.budget * (1 + 1e-9)
        if found is None:
            return self.dropped([self._plain(group) for group in self.problem.groups]) if beyond else index
        gained = float(time[rows, index].sum() - time[rows, found].sum())
        step = self._estimate(self._choices(index))
        return found if beyond or step is None or gained > _LEAST_GAIN * step.time_ms / 1e3 else index

    def _choices(self, index: IntVector) -> dict[str, str]:
        names = self.problem.choice_names
        return {
            name: names[int(column)]
            for group, column in zip(self.problem.groups, index, strict=True)
            for name in group.layers
        }

    def _estimate(self, choices: Mapping[str, str]) -> StepEstimate | None:
        if self.cost is None:
            return None
        plans = {choice: self._plan(choice) for choice in set(choices.values())}
        return self.cost.under(self.policy, {name: plans[choice] for name, choice in choices.items()})

    def result(self, index: IntVector) -> Transfer:
        choices, names = self._choices(index), self.problem.choice_names
        lost: dict[tuple[str, str], list[str]] = {}
        filled: list[tuple[str, str, str]] = []
        for group, wanted, column in zip(self.problem.groups, self.mapped, index, strict=True):
            now, why = names[int(column)], self._why_not(group, wanted)
            if why:
                lost.setdefault((wanted, why), []).extend(group.layers)
            if now != (self._plain(group) if why else wanted):
                filled += [(name, wanted, now) for name in group.layers]
        rules = {name: self.proxy.rules[other] for name, other in self.matched.of.items()}
        every = [layer.name for layer in self.report.layers]
        plain = {name: self._plain(group) for group in self.problem.groups for name in group.layers}
        return Transfer(
            policy=rendered(self.policy, every, choices, self.recipes),
            choices=choices,
            matched=self.matched,
            rules=rules,
            lost=tuple(Lost(tuple(layers), choice, why) for (choice, why), layers in lost.items()),
            filled=tuple(filled),
            growth=self.grown,
            predicted=self.forecast.prediction(index, self.budget) if self.forecast is not None else Prediction(),
            baseline=self._estimate(plain),
            step=self._estimate(choices),
        )
