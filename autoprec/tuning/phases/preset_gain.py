"""What a policy gains over the best preset: what people would run instead of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.tuning.decide.decision import Standing
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.sampler.expectation import Expectation
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.ledger import Ledger
from autoprec.tuning.phases.duels import Duels
from autoprec.tuning.setup import Setup
from autoprec.tuning.study.run import Run

#: Chance of being acceptable from which on a preset that was not run counts as what people would run instead.
_MAY_BE_FINE = 0.5


@dataclass(frozen=True, slots=True)
class BestPreset:
    """The fastest preset that is acceptable, or may be for all that is known; no ``standing`` where it was not run."""

    speedup: float
    name: str
    standing: Standing | None


def best_preset(
    setup: Setup,
    ledger: Ledger,
    expectation: Expectation,
    standings: Sequence[Standing],
    tried: Sequence[Run],
    chosen: Standing,
) -> BestPreset | None:
    """Return the best preset beside a chosen policy; None where there are none, or speed is not the objective.

    One that was measured, and is faster within what a tie leaves, counts as well.
    """
    problem = setup.problem
    measured = {problem.key(one.run.params): one for one in standings if one.run is not None}
    failed = {problem.key(record.params) for record in tried if not record.ok}
    script = float(expectation.goals.cost(ledger.reference.step_ms, 1.0))
    name = "the script as written"
    found = [BestPreset(1.0, name, Standing(name, 1.0, (0.0,), reference=True))]
    most = math.inf if ledger.cut_short or ledger.stopped.startswith("ran ") else chosen.speedup
    offered = [(name, params) for name, params in presets(problem) if not problem.is_script(params)]
    if expectation.goals.objective != "throughput" or not offered:
        return None
    outlook = expectation.outlook(expectation.points([params for _, params in offered]))
    for (name, params), cost, chance in zip(offered, outlook.cost, outlook.chance, strict=True):
        known = measured.get(problem.key(params))
        predicted = math.exp(script - float(cost))
        if known is None and chance >= _MAY_BE_FINE and problem.key(params) not in failed and predicted <= most:
            found.append(BestPreset(predicted, name, None))
        elif known and (known.name == chosen.name or not known.rejection):
            found.append(BestPreset(known.speedup, name, known))
    return max(found, key=lambda one: (one.speedup, one.name))


def over_preset(chosen: Standing, best: BestPreset | None, duels: Duels, noise: float) -> tuple[Reason, ...]:
    """Return what a chosen policy gains over the best preset: with an interval where both were timed in duels."""
    if best is None:
        return ()
    gain, preset = chosen.speedup / best.speedup - 1.0, best.standing
    data = {"name": best.name, "gain": max(0.0, gain) if preset else gain, "measured": preset is not None}
    both = duels.between(chosen, preset) if preset is not None and preset.name != chosen.name else None
    if both is not None:
        data |= {"gain": max(0.0, both[0] - 1.0), "low": both[1], "high": both[2]}
    return (Reason("over_preset", data | {"noise": noise}),)
