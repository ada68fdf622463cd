"""What to run from here on, by the gradient errors of now: the table, the knapsack, and when a change is worth it.

Pure arithmetic on ``[G, C]`` tables (groups of layers, choices), as in a search: squared errors of the groups add, and
the fastest assignment within the budget is a multiple-choice knapsack (:mod:`autoprec.policy.solver`). A scan during a
run asks few questions, so what it finds about a group under what it runs is taken to hold for its other choices as
well: an outlier that makes one 8-bit recipe worse makes all of them worse. Whatever is decided is measured as a whole
before it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoprec.policy import Follow, LayerRule, Policy, escape, first_match
from autoprec.policy.solver import FloatTable, IntVector, solve
from autoprec.policy.space import Choice
from autoprec.precision.recipes import Recipe

#: A new assignment must be predicted to stay within this share of the budget, so that the next scan does not undo it.
_MARGIN = 0.8
#: Over the budget by this factor counts at once; over it at all counts the second time in a row.
_CLEARLY = 1.25
#: A faster assignment must save this share of a step.
_WORTH = 0.02
#: Measured over predicted error within these bounds: the table still holds, and no layer is asked alone.
_AGREES = (0.67, 1.5)
#: Choices of a group that the script's own step is exact under, whatever the table has grown to.
_TINY = 1e-20


def segments_to_ask(predicted: Sequence[float], measured: Mapping[tuple[int, ...], float]) -> tuple[int, ...] | None:
    """Return the groups to ask about next, as one segment; None where every segment is one group or explained.

    Args:
        predicted: squared error of each lowered group by the table, in model order.
        measured: squared error of segments (ranges of the same groups) that are known.
    """
    worst, best = None, 0.0
    for segment, error2 in measured.items():
        expected = sum(predicted[g] for g in segment)
        if len(segment) > 1 and abs(error2 - expected) > best:
            worst, best = segment, abs(error2 - expected)
    return None if worst is None else worst[: len(worst) // 2]


@dataclass
class Desk:
    """Times and squared errors of what each group may run, the assignment in force, and what to change it to.

    Attributes:
        follow: what the search recorded.
        now: ``[G]`` columns of the assignment in force.
        time, error2: ``[G, C]``, infinite where a group does not offer a choice.
        over: scans in a row that found the error over the budget.
    """

    follow: Follow
    now: IntVector
    time: FloatTable
    error2: FloatTable
    over: int = 0
    _asked: dict[int, int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, follow: Follow, policy: Policy) -> Desk | None:
        """Return the desk of a policy; None where it runs something that was not recorded."""
        time, error = (
            np.array([[math.inf if v is None else v for v in values] for values in rows], dtype=np.float64)
            for rows in ([g.times for g in follow.groups], [g.errors for g in follow.groups])
        )
        now = [_column(follow, policy, g) for g in range(len(follow.groups))]
        known = all(c is not None and math.isfinite(time[g, c]) for g, c in enumerate(now))
        if not known:
            return None
        return cls(follow, np.array(now, dtype=np.int64), time, error**2)

    # ---------------------------------------------------------------- the table
    @property
    def lowered(self) -> tuple[int, ...]:
        """The groups that add an error as they run now."""
        return tuple(g for g, c in enumerate(self.now) if self.error2[g, c] > _TINY)

    @property
    def scaled(self) -> bool:
        """Whether any group runs in 8 bits or fewer."""
        plans = (Choice.parse(self.follow.choices[c]).plan(self.follow.recipes) for c in set(self.now.tolist()))
        return any(plan.scaled for plan in plans)

    def predicted2(self, index: IntVector) -> float:
        """Return the squared error of an assignment by the table."""
        return float(self.error2[np.arange(len(index)), index].sum()) + self.follow.other_error**2

    def agrees(self, measured2: float) -> bool:
        """Whether what was measured of the assignment in force is what the table says."""
        predicted2 = self.predicted2(self.now)
        return predicted2 > 0 and _AGREES[0] ** 2 <= measured2 / predicted2 <= _AGREES[1] ** 2

    def learn(self, segment: Sequence[int], measured2: float, index: IntVector | None = None) -> None:
        """Take in the squared error of some groups under what they run (or under ``index``)."""
        rows, columns = list(segment), (self.now if index is None else index)[list(segment)]
        expected = float(self.error2[rows, columns].sum())
        if expected > _TINY and math.isfinite(measured2):
            self.error2[rows] *= max(measured2, _TINY) / expected
        elif not math.isfinite(measured2):
            self.error2[rows, columns] = math.inf

    def to_ask_again(self, home: IntVector, most: int) -> list[int]:
        """Return up to ``most`` groups that no longer run what they began with, those not asked for longest first.

        What made them sensitive may have passed, and as they run now nothing shows it.
        """
        moved = sorted(np.flatnonzero(home != self.now).tolist(), key=lambda g: self._asked.get(g, 0))[: max(0, most)]
        turn = 1 + max(self._asked.values(), default=0)
        self._asked |= dict.fromkeys(moved, turn)
        return moved

    # ---------------------------------------------------------------- decisions
    def is_over(self, error: float, limit: float) -> bool:
        """Note an error of the assignment in force; say whether it has to step back."""
        self.over = self.over + 1 if not error <= limit else 0
        return self.over > 1 or not error <= _CLEARLY * limit

    def proposal(self, limit: float, *, must: bool) -> IntVector | None:
        """Return a better assignment than the one in force, or None.

        Args:
            limit: the largest relative gradient error.
            must: the one in force is over the limit; otherwise a change has to save :data:`_WORTH` of a step.
        """
        budget = max(0.0, (_MARGIN * limit) ** 2 - self.follow.other_error**2)
        found = solve(self.time, self.error2, budget)
        if found is None:
            found = self.safest() if must else None
        if found is None or (found == self.now).all():
            return None
        return found if must or self.saved_ms(found) >= _WORTH * self.follow.step_time_ms else None

    def safest(self) -> IntVector:
        """Return the assignment with the least error, the fastest of those."""
        return np.array([int(np.lexsort((t, e))[0]) for t, e in zip(self.time, self.error2, strict=True)])

    def saved_ms(self, index: IntVector) -> float:
        """Return what an assignment saves of a step, compared with the one in force."""
        rows = np.arange(len(index))
        return float((self.time[rows, self.now] - self.time[rows, index]).sum())

    # ---------------------------------------------------------------- policies
    def policy(self, base: Policy, index: IntVector) -> Policy:
        """Return a policy's stage with an assignment; layers of no group keep their rules."""
        rules, taken = [], dict(base.recipes)
        for group, column in zip(self.follow.groups, index, strict=True):
            choice = Choice.parse(self.follow.choices[int(column)])
            recipe, gemms = _name(self.follow, choice.recipe, taken), {}
            for gemm, name in choice.gemms.items():
                gemms[gemm] = _name(self.follow, name, taken)
            rules += [LayerRule(match=escape(n), recipe=recipe, gemms=gemms, optional=True) for n in group.layers]
        return base.model_copy(update={"recipes": taken, "layers": (*rules, *base.layers)})

    def told(self, index: IntVector) -> str:
        moves: dict[tuple[int, int], list[str]] = {}
        for g, (before, after) in enumerate(zip(self.now.tolist(), index.tolist(), strict=True)):
            if before != after:
                moves.setdefault((before, after), []).append(self.follow.groups[g].layers[0])
        names = self.follow.choices
        return "; ".join(
            f"{', '.join(layers[:3])}{f' and {len(layers) - 3} more' if len(layers) > 3 else ''}: "
            f"{names[before]} -> {names[after]}"
            for (before, after), layers in moves.items()
        )


def _column(follow: Follow, policy: Policy, g: int) -> int | None:
    """Return the choice that the layers of a group run under a policy; None where none is that."""
    plans = {policy.plan_of_rule(first_match(policy.layers, name)) for name in follow.groups[g].layers}
    for column, choice in enumerate(follow.choices):
        if plans == {Choice.parse(choice).plan(follow.recipes)}:
            return column
    return None


def _name(follow: Follow, name: str, recipes: dict[str, Recipe]) -> str:
    """Return the name under which a policy has one of the recorded recipes, after adding it where it has not."""
    wanted = follow.recipes.get(name)
    if wanted is None:
        return name  # keep
    while name in recipes and recipes[name] != wanted:
        name += "_followed"
    recipes[name] = wanted
    return name
