"""From a policy of a small model to a policy of a big one, by role: map, drop what no longer pays there, say so.

Every layer of the big model runs what its counterpart in the small model runs (:mod:`.counterparts`). A recipe that the
target cannot run at the big model's shapes, or that takes no less time there than 16 bits, is dropped with its reason.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autoprec._version import __version__
from autoprec.cost import CostModel, StepEstimate
from autoprec.cost.estimate import ratio_bounds
from autoprec.cost.kernels import LayerCost
from autoprec.cost.reasons import Rival, layer_reason
from autoprec.errors import UnsupportedError
from autoprec.graph.report import GraphReport, Layer
from autoprec.graph.roles import places
from autoprec.policy import LayerPlan, ModelInfo, Policy
from autoprec.policy.space import Choice
from autoprec.precision.recipes import BUILTIN_RECIPES, KEEP, Recipe
from autoprec.tuning.decide.rules import glob_table, layer_rules, recipes_in
from autoprec.tuning.transfer.counterparts import Counterparts, counterparts, refuse_unknown
from autoprec.tuning.transfer.proxy import Proxy

#: A share of the time by which a recipe must beat 16 bits: less is rounding of the cost model.
_SAME = 1e-3
#: What is repeated of the small model's own evidence.
_REPEATED = (
    "target",
    "source",
    "speedup",
    "speedup_over_16bit",
    "divergence",
    "gradient_error",
    "seeds",
    "steps",
    "date",
)


@dataclass(frozen=True, slots=True)
class Lost:
    """Layers of the big model on which a recipe of the small one is not used, and why."""

    layers: tuple[str, ...]
    choice: str
    reason: str


@dataclass(frozen=True)
class Transfer:
    """A transferred policy and how it came about.

    Attributes:
        policy: for the big model, without evidence.
        choices: layer -> what it runs, as the name of a choice.
        matched: counterparts in the small model.
        rules: layer -> number of the small model's rule that its counterpart obeys.
        lost: what the policy asks of the counterparts and the big model does not run.
        baseline, step: modelled steps with every layer in 16 bits, and under the policy; None without shapes.
        later: the same of each of the policy's phases; the other fields are of how the run begins.
    """

    policy: Policy
    choices: dict[str, str]
    matched: Counterparts
    rules: dict[str, int]
    lost: tuple[Lost, ...]
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
) -> Transfer:
    """Carry a policy over to a big model, every phase of the run by itself.

    Args:
        policy: the small model's policy.
        proxy: the small model.
        report: a step of the big model, recorded or written down; layers alone (no GEMMs) are mapped by name.
        cost: the big model's cost on the target; None drops nothing.
        hints: ``(glob, role)`` where names do not tell.

    Raises:
        PolicyMismatchError: too many layers have no known role, or none has a counterpart.
        UnsupportedError: it has a section for the copy that generates.
    """
    if policy.rollout is not None:
        raise UnsupportedError(
            "the policy has a section for the copy of the model that generates, which is not carried over",
            where="rollout",
            fix="take the section out of the file, and write it for the big model by hand",
        )
    if policy.phases:
        first, *later = (
            transfer(stage, Proxy.of(stage, proxy.report), report, cost, hints=hints) for stage in policy.stages
        )
        whole = policy.with_stages([first.policy, *(found.policy for found in later)])
        return replace(first, policy=whole, later=tuple(later))
    matched = counterparts(places(report.tunable, hints), places(proxy.report.tunable, hints), proxy.choices)
    refuse_unknown(report, matched)
    return _Job(policy, proxy, report, cost, matched).result()


def rendered(policy: Policy, names: Sequence[str], choices: Mapping[str, str], recipes: Mapping[str, Recipe]) -> Policy:
    """Return a policy with other layer rules: as few globs as say ``choices`` exactly, ``keep`` for every other layer.

    Args:
        policy: what is said beside the layers stays.
        names: every layer of the model, tunable or not.
        choices: layer -> choice name.
        recipes: recipes by the names that the choices use.
    """
    used = recipes_in(choices.values())
    document = policy.model_dump(by_alias=True) | {
        "layers": tuple(layer_rules(glob_table(tuple(names)), choices, names)),
        "recipes": {name: recipes[name] for name in recipes if name in used} | _of_rollout(policy),
        "default": KEEP,
        "phases": (),
        "evidence": {},
    }
    return Policy.model_validate(document)


def _of_rollout(policy: Policy) -> dict[str, Recipe]:
    """Return the recipes that a policy's copy that generates runs, which stays as it is."""
    side = policy.rollout
    used = {side.default, *(rule.recipe for rule in side.layers)} if side is not None else set[str]()
    return {name: recipe for name, recipe in policy.recipes.items() if name in used}


def with_evidence(
    found: Transfer, policy: Policy, proxy: Proxy, report: GraphReport, target: str, *, study: str, date: str
) -> Policy:
    """Return the policy of a transfer with its evidence: where it comes from, and that nothing was measured.

    Args:
        found: the transfer.
        policy: what was transferred.
        proxy: the model that it was found on.
        report: a step of the big model.
        target: the device whose times decided.
        study: name of the study that found the policy; empty where it is not known.
        date: today's date, ISO 8601.
    """
    origin: dict[str, Any] = {
        "model": dict(proxy.report.model),
        **({"study": study} if study else {}),
        "evidence": {name: policy.evidence[name] for name in _REPEATED if name in policy.evidence},
    }
    evidence: dict[str, Any] = {"target": target, "source": "modelled", "transferred_from": origin}
    if found.step is not None:
        bounds = zip(("speedup_over_16bit_low", "speedup_over_16bit_high"), found.bounds, strict=False)
        figures = {"speedup_over_16bit": found.speedup, **dict(bounds), "memory_bytes": float(found.step.memory_bytes)}
        evidence |= {name: float(f"{value:.4g}") for name, value in figures.items()} | {"cost": found.step.label}
    evidence |= {
        "date": date,
        "versions": {"autoprec": __version__, "python": platform.python_version()},
        "limit": "transferred: nothing was measured on this model; autoprec check --sensitivity 8 asks it",
    }
    model = ModelInfo.model_validate(dict(report.model)) if report.model.get("parameters") else None
    return found.policy.model_copy(update={"evidence": evidence, "model": model})


@dataclass(frozen=True)
class _Job:
    """One transfer while it is worked out."""

    policy: Policy
    proxy: Proxy
    report: GraphReport
    cost: CostModel | None
    matched: Counterparts

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        return {**BUILTIN_RECIPES, **self.policy.recipes}

    @cached_property
    def layers(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.report.tunable}

    @cached_property
    def groups(self) -> list[tuple[str, ...]]:
        """Layers that move together, in model order."""
        found: dict[str, list[str]] = {}
        for layer in self.report.tunable:
            found.setdefault(layer.group, []).append(layer.name)
        return [tuple(names) for names in found.values()]

    @property
    def plain(self) -> str:
        """What a layer runs in the place of a recipe that does not pay: 16 bits."""
        return "bf16" if "bf16" in self.policy.recipes else KEEP

    def asked(self, group: Sequence[str]) -> str:
        """Return what most FLOPs of a group's counterparts run; ``keep`` where it has none."""
        counted: Counter[str] = Counter()
        for name in group:
            if name in self.matched.of:
                counted[self.proxy.choices[self.matched.of[name]]] += 1 + self.layers[name].total_flops
        return max(counted, key=lambda choice: counted[choice]) if counted else KEEP

    def why_not(self, group: Sequence[str], choice: str) -> str:
        """Return why a group does not run a choice; empty when it does."""
        plan = self._plan(choice)
        if self.cost is None or not plan.scaled:
            return ""
        for recipe in dict.fromkeys(plan.recipes):
            refused = [why for name in group for ok, why in [self.cost.can_run(name, recipe)] if not ok]
            if refused:
                return refused[0]
        base, rival = self._cost(group, self.plain), self._cost(group, choice)
        if rival.seconds < base.seconds * (1.0 - _SAME):
            return ""
        return layer_reason(base, [Rival(choice, rival, quantised=True)], cpu=self.cost.target.is_cpu)

    def _plan(self, choice: str) -> LayerPlan:
        return Choice.parse(choice).plan(self.recipes)

    def _cost(self, group: Sequence[str], choice: str) -> LayerCost:
        assert self.cost is not None
        plan = self._plan(choice)
        parts = [self.cost.layer_cost(name, plan, self.policy.activations) for name in group]
        gemm, cast, kernels = (sum(getattr(part, name) for part in parts) for name in ("gemm", "cast", "kernels"))
        return LayerCost(gemm=gemm, cast=cast, kernels=kernels, error=0.0)

    def _estimate(self, choices: Mapping[str, str]) -> StepEstimate | None:
        if self.cost is None:
            return None
        plans = {choice: self._plan(choice) for choice in set(choices.values())}
        return self.cost.under(self.policy, {name: plans[choice] for name, choice in choices.items()})

    def result(self) -> Transfer:
        choices: dict[str, str] = {}
        lost: dict[tuple[str, str], list[str]] = {}
        for group in self.groups:
            wanted = self.asked(group)
            if why := self.why_not(group, wanted):
                lost.setdefault((wanted, why), []).extend(group)
            choices |= dict.fromkeys(group, self.plain if why else wanted)
        every = [layer.name for layer in self.report.layers]
        return Transfer(
            policy=rendered(self.policy, every, choices, self.recipes),
            choices=choices,
            matched=self.matched,
            rules={name: self.proxy.rules[other] for name, other in self.matched.of.items()},
            lost=tuple(Lost(tuple(layers), choice, why) for (choice, why), layers in lost.items()),
            baseline=self._estimate(dict.fromkeys(choices, self.plain)),
            step=self._estimate(choices),
        )
