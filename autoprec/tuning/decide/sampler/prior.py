"""The sampler's prior from a cost model and a sensitivity table, for any cost model that can be called.

Time is split into what the groups' choices account for (a table) and the rest. A parameter such as autocast changes
both: its own effect is what the whole step gains beyond the groups' tables, so that nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from autoprec.policy import LayerPlan
from autoprec.policy.space import Choice
from autoprec.tuning.decide.problem import GroupVariable, Problem, layer_key
from autoprec.tuning.decide.sampler.ours import Prior
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.decide.tables import FloatTable

__all__ = ["build_prior", "memory_table"]

#: (layer name, plan, activations) -> milliseconds of its GEMMs and casts
LayerTime = Callable[[str, LayerPlan, str], float]
#: params -> (milliseconds, bytes) of a whole step
StepCost = Callable[[Mapping[str, Any]], tuple[float, float]]


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
        problem: the search problem.
        table: its sensitivity table.
        layer_time: additive part of the cost model.
        step_cost: whole steps.
        measured: trials will be timed (the model is then only roughly right), not modelled by this same model.
        with_memory: also build the table of bytes per group (one whole-step estimate per group and choice).
    """
    baseline = problem.params_of(problem.baseline)
    activations = str(problem.value(baseline, "activations"))
    recipes = problem.space.recipes_with(baseline)

    def milliseconds(group: GroupVariable, choice: str) -> float:
        plan = Choice.parse(choice).plan(recipes)
        return sum(layer_time(layer, plan, activations) for layer in group.layers)

    times = problem.table(milliseconds)
    rows = np.arange(len(problem.groups))

    def beyond_groups(params: Mapping[str, Any]) -> float:
        return step_cost(params)[0] - float(times[rows, problem.indices(params)].sum())

    base = beyond_groups(baseline)
    effects = {
        (name, value): beyond_groups(problem.params_of(problem.baseline, **{name: value})) - base
        for name, values in problem.parameters.items()
        for value in values[1:]
    }
    memory, held = memory_table(problem, step_cost) if with_memory else (None, 0.0)
    return Prior(
        time_ms=times,
        error2=table.error2,
        base_time_ms=base,
        memory=memory,
        base_memory=held,
        parameter_error2=partial(table.parameter_error2, problem),
        parameter_time_ms=effects,
        time_noise=0.03 if measured else 1e-4,
        time_trust=0.3 if measured else 0.02,
    )


def memory_table(problem: Problem, step_cost: StepCost) -> tuple[FloatTable, float]:
    """Return (``[G, C]`` bytes of each group against the baseline, bytes of the baseline point)."""
    baseline = problem.params_of(problem.baseline)
    whole = step_cost(baseline)[1]

    def bytes_of(group: GroupVariable, choice: str) -> float:
        if problem.choice_of(baseline, group) == choice:
            return 0.0
        return step_cost({**baseline, layer_key(group.name): choice})[1] - whole

    return problem.table(bytes_of), whole
