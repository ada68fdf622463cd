"""What a policy records of its search, so that a run can decide again: the knapsack's tables, thinned out."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from autoprec.policy import Follow, FollowGroup
from autoprec.policy.solver import FloatTable, solve
from autoprec.policy.space import Choice
from autoprec.precision.recipes import KEEP
from autoprec.tuning.decide.problem import Params, Problem, layer_key
from autoprec.tuning.decide.table import SensitivityTable

#: Choices that are recorded, at most, and numbers of both tables together: a policy is a file that people read.
_MOST_CHOICES, _MOST_NUMBERS = 8, 8000
#: Shares of the largest squared error that the knapsack is solved for, to see what it would take.
_SHARES = np.geomspace(1e-5, 1.0, 40)


def follow_section(
    problem: Problem,
    params: Params,
    times: FloatTable,
    table: SensitivityTable,
    *,
    max_gradient_error: float,
    limit: float | None,
    step_time_ms: float,
    reference: str = "script",
) -> Follow | None:
    """Return what deciding again needs to know, or None where nothing can be decided.

    Args:
        times: ``[G, C]`` milliseconds; differences within a row are meant.
        max_gradient_error: the budget, in units of the mini-batch noise.
        limit: the largest relative gradient error that the search allowed, None for none.
        reference: what errors were counted from.
    """
    if table.noise is None or limit is None or not problem.free_groups:
        return None
    # under autocast, a layer that is kept runs in its dtype
    meant = {g.name: problem.effective({**params, layer_key(g.name): KEEP}, g) for g in problem.groups}
    columns = {name: c for c, name in enumerate(problem.choice_names)}

    def at(g: int, choice: str) -> tuple[float, float]:
        c = columns[meant[problem.groups[g].name] if choice == KEEP else choice]
        return float(times[g, c]), float(table.error2[g, c])

    choices = _recorded(problem, params, times, table.error2)
    recipes = problem.space.recipes_with(problem.complete(params))
    groups = []
    for g, group in enumerate(problem.groups):
        found = [at(g, choice) if choice in group.choices else (math.inf, math.inf) for choice in choices]
        known = [math.isfinite(time) and math.isfinite(error2) for time, error2 in found]
        groups.append(
            FollowGroup(
                layers=group.layers,
                times=tuple(_short(t) if ok else None for (t, _), ok in zip(found, known, strict=True)),
                errors=tuple(
                    _short(math.sqrt(e) * table.misfit.ratio) if ok else None
                    for (_, e), ok in zip(found, known, strict=True)
                ),
            )
        )
    usual = max_gradient_error * table.noise
    if len(groups) * len(choices) * 2 > _MOST_NUMBERS or any(not any(t is not None for t in g.times) for g in groups):
        return None
    parsed = [Choice.parse(choice) for choice in choices]
    used = {name for choice in parsed for name in (choice.recipe, *choice.gemms.values())} - {KEEP}
    return Follow(
        reference="script" if reference not in ("fp32", "bf16") else reference,
        max_gradient_error=max_gradient_error,
        most_error=_short(limit) if limit < usual * (1 - 1e-9) else None,
        other_error=_short(math.sqrt(table.parameter_error2(problem, params)) * table.misfit.ratio),
        step_time_ms=_short(step_time_ms),
        recipes={name: recipes[name] for name in sorted(used)},
        choices=choices,
        groups=tuple(groups),
    )


def _recorded(problem: Problem, params: Params, times: FloatTable, error2: FloatTable) -> tuple[str, ...]:
    """Return the choices worth recording: what is in use, the exact ones, and what the knapsack would take."""
    count: Counter[str] = Counter()
    for g, group in enumerate(problem.groups):
        count[problem.choice_of(params, group)] += 1000
        order = np.lexsort((times[g], error2[g]))
        count[problem.choice_names[int(order[0])]] += 1000
        if KEEP in group.choices:
            count[KEEP] += 1000
    most = float(np.where(np.isfinite(error2), error2, 0.0).max(axis=1).sum())
    for budget in _SHARES * most:
        index = solve(times, error2, float(budget))
        count.update({problem.choice_names[int(c)] for c in index} if index is not None else ())
    return tuple(name for name, _ in count.most_common(_MOST_CHOICES))


def _short(value: float) -> float:
    return float(f"{value:.4g}")
