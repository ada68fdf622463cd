"""What is known before the first trial: tables of time, squared error and memory, and the models that start from them.

Time is split into what the groups' choices account for (a table) and the rest. A parameter such as autocast changes
both: its own effect is what the whole step gains beyond the groups' tables, so that nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from autoprec.policy import LayerPlan
from autoprec.policy.solver import FloatTable
from autoprec.policy.space import Choice
from autoprec.precision.recipes import KEEP
from autoprec.support.arrays import np
from autoprec.tuning.decide.problem import GroupVariable, Params, Problem, layer_key
from autoprec.tuning.decide.sampler.posterior import TIMED_NOISE, DivergenceModel, Points
from autoprec.tuning.decide.table import SensitivityTable

#: An error in the output layer moves the loss itself, not only the weights: its squared gradient error counts this many
#: times, on a small GPT and a small ViT alike (benchmarks/search/quality.py); the fit to the trials corrects it.
HEAD_WEIGHT = 3.0
#: The noise of times that are modelled.
EXACT = {1e-4: 1.0}
#: (layer name, plan, activations) -> milliseconds of its GEMMs and casts
LayerTime = Callable[[str, LayerPlan, str], float]
#: params -> (milliseconds, bytes) of a whole step
StepCost = Callable[[Params], tuple[float, float]]


@dataclass(frozen=True)
class Prior:
    """What is known before the first trial.

    Attributes:
        time_ms: ``[G, C]`` time of each group's layers under each choice.
        error2: ``[G, C]`` squared relative gradient error (``SensitivityTable.error2``).
        base_time_ms: time of a step outside the groups.
        memory: ``[G, C]`` bytes against the baseline's, or None when memory is neither limited nor an objective.
        with_memory: makes this prior with the table of bytes, where it has none: of a search that ran out of memory.
        base_memory: bytes of the baseline.
        parameter_time_ms, parameter_memory: (name, value) -> milliseconds and bytes against the parameter's default.
        time_noise: possible relative noises of one measured step time, with weights; a tiny one for modelled times.
        time_trust: relative uncertainty of ``time_ms``.
    """

    time_ms: FloatTable
    error2: FloatTable
    base_time_ms: float = 0.0
    memory: FloatTable | None = None
    base_memory: float = 0.0
    parameter_error2: Callable[[Params], float] = field(default=lambda _params: 0.0)
    parameter_time_ms: Mapping[tuple[str, Any], float] = field(default_factory=dict)
    parameter_memory: Mapping[tuple[str, Any], float] = field(default_factory=dict)
    time_noise: Mapping[float, float] = field(default_factory=lambda: EXACT)
    time_trust: float = 0.2
    with_memory: Callable[[], Prior] | None = None


def build_prior(
    problem: Problem,
    table: SensitivityTable,
    layer_time: LayerTime,
    step_cost: StepCost,
    *,
    measured: bool,
    with_memory: bool = False,
) -> Prior:
    """Return the prior.

    Args:
        layer_time: additive part of the cost model.
        measured: trials will be timed (the model is then only roughly right), not modelled by this same model.
        with_memory: also build the table of bytes per group (one whole-step estimate per group and choice).
    """
    baseline = problem.params_of(problem.baseline)
    activations, recipes = str(problem.value(baseline, "activations")), problem.space.recipes_with(baseline)

    def milliseconds(group: GroupVariable, choice: str) -> float:
        plan = Choice.parse(choice).plan(recipes)
        return sum(layer_time(layer, plan, activations) for layer in group.layers)

    times = problem.table(milliseconds)

    def beyond_groups(params: Params) -> float:
        return step_cost(params)[0] - float(times[np.arange(len(times)), problem.indices(params)].sum())

    def held(params: Params) -> float:
        return step_cost(params)[1]

    def more(group: GroupVariable, choice: str) -> float:
        is_baseline = problem.choice_of(baseline, group) == choice
        return 0.0 if is_baseline else held({**baseline, layer_key(group.name): choice}) - whole

    def effects(measure: Callable[[Params], float], base: float) -> dict[tuple[str, Any], float]:
        found, low = {}, [value for value in problem.parameters.get("activations", ()) if value != KEEP]
        for name, value in features_of(problem):
            around: Params = {}
            if low and problem.in_effect(problem.params_of(problem.baseline, **{name: value}), name) != value:
                around = {"activations": low[0]}  # it changes what runs in 16 bits alone
            before = measure(problem.params_of(problem.baseline, **around)) if around else base
            found[name, value] = measure(problem.params_of(problem.baseline, **around, **{name: value})) - before
        return found

    base, whole = beyond_groups(baseline), held(baseline) if with_memory else 0.0
    return Prior(
        time_ms=times,
        error2=table.error2,
        base_time_ms=base,
        memory=problem.table(more) if with_memory else None,
        base_memory=whole,
        parameter_error2=partial(table.parameter_error2, problem),
        parameter_time_ms=effects(beyond_groups, base),
        parameter_memory=effects(held, whole) if with_memory else {},
        time_noise=TIMED_NOISE if measured else EXACT,
        time_trust=0.3 if measured else 0.001,
        with_memory=None
        if with_memory
        else partial(build_prior, problem, table, layer_time, step_cost, measured=measured, with_memory=True),
    )


def features_of(problem: Problem) -> list[tuple[str, Any]]:
    """Return the features (parameter, value) of a problem: every value but the default."""
    return [(name, value) for name, values in problem.parameters.items() for value in values[1:]]


def points_of(problem: Problem, many: Sequence[Params], error2: Callable[[Params], float]) -> Points:
    """Return the points of params; ``error2`` gives the squared error of their parameters.

    Args:
        problem: groups, choices and parameters.
        many: params of N points.
        error2: squared gradient error of a point's parameters.
    """
    features = features_of(problem)
    index = np.array([problem.indices(params) for params in many], dtype=np.int64)
    has = [[problem.in_effect(params, name) == value for name, value in features] for params in many]
    return Points(
        index.reshape(len(many), len(problem.groups)),
        np.array(has, dtype=np.float64).reshape(len(many), len(features)),
        np.array([error2(params) for params in many], dtype=np.float64),
    )


def divergence_model(problem: Problem, error2: FloatTable) -> DivergenceModel:
    """Return the divergence model that starts from a table of squared errors.

    Args:
        error2: ``[G, C]``, see :class:`autoprec.tuning.decide.table.SensitivityTable`.
    """
    weight = np.array([HEAD_WEIGHT if "head" in group.flags else 1.0 for group in problem.groups])
    return DivergenceModel(error2 * weight[:, None], len(features_of(problem)))
