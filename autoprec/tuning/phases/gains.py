"""What a policy gains over what people would run instead, and by which of its parts.

Instead of it they would run the best preset, or compile the blocks of an eager script and change nothing else. What
each part of a policy does (its layers' recipes, autocast, the optimizer's update, ...) is what the policy loses
without it, timed beside it: the parts need not multiply to the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoprec.policy import compiles
from autoprec.trial.intervals import ratio_interval
from autoprec.tuning.decide.decision import Decision, Standing
from autoprec.tuning.decide.presets import COMPILED, presets
from autoprec.tuning.decide.problem import VARIANT, Params, Problem, layer_key
from autoprec.tuning.decide.sampler.expectation import Expectation
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.phases.duels import Duels
from autoprec.tuning.setup import Setup
from autoprec.tuning.sixteen_bit import NAMES
from autoprec.tuning.state import SearchState
from autoprec.tuning.study.run import Run

#: A preset that was not run counts as what people would run instead where its chance of being acceptable is so large,
#: and where it is predicted to be faster by so much than all presets that were.
_MAY_BE_FINE, _OFF = 0.5, 0.1


def best_preset(
    setup: Setup,
    state: SearchState,
    expectation: Expectation,
    standings: Sequence[Standing],
    tried: Sequence[Run],
    chosen: Standing,
) -> Standing | None:
    """Return the fastest preset that is acceptable, or may be for all that is known: under no seed if it was not run.

    A preset that was not run is predicted to be no faster than the chosen policy, or a run of it would have paid. It
    takes the place of those that were run only where it is faster by more than a tenth. A chosen preset is the best.
    None where there are no presets, or speed is not the objective.

    Args:
        setup: what is searched.
        state: what the search has learnt so far.
        expectation: the models that are fitted to every run.
        standings: every policy that was tried, judged.
        tried: their first runs, in the same order.
        chosen: what would be adopted.
    """
    problem = setup.problem
    offered = [(name, params) for name, params in presets(problem) if not problem.is_script(params)]
    if expectation.goals.objective != "throughput" or not offered:
        return None
    measured = {problem.key(one.run.params): one for one in standings if one.run is not None}
    failed = {problem.key(record.params) for record in tried if not record.ok}
    script = float(expectation.goals.cost(state.reference.step_ms, 1.0))
    found = [Standing("the script as written", 1.0, (0.0,), reference=True)]
    outlook = expectation.outlook(expectation.points([params for _, params in offered]))
    for (name, params), cost, chance in zip(offered, outlook.cost, outlook.chance, strict=True):
        key = problem.key(params)
        known = measured.get(key)
        if known is None and chance >= _MAY_BE_FINE and key not in failed:
            found.append(Standing(name, min(chosen.speedup, math.exp(script - float(cost))), ()))
        elif known and known.name == chosen.name:
            return known
        elif known and not known.rejection:
            found.append(known)
    return max(found, key=lambda one: (one.speedup * (1.0 + _OFF * (one.run is not None)), one.name))


def over_preset(chosen: Standing, best: Standing | None, duels: Duels, noise: float) -> tuple[Reason, ...]:
    """Return what a chosen policy gains over the best preset: with an interval where both were timed in duels.

    Args:
        chosen: what is adopted.
        best: the best preset; None for none.
        duels: the search's duels.
        noise: relative difference that two speed-ups have through timing noise alone.
    """
    if best is None:
        return ()
    data = {"name": best.name, "gain": max(0.0, chosen.speedup / best.speedup - 1.0), "measured": best.seeds > 0}
    if best.name == chosen.name:
        return (Reason("over_preset", data | {"itself": True}),)
    both = duels.between(chosen, best) if best.seeds else None
    if both is not None:
        data |= {"gain": max(0.0, both[0] - 1.0), "low": both[1], "high": both[2]}
    elif chosen.timed and best.reference:
        data |= {"low": chosen.low, "high": chosen.high}
    elif chosen.timed and best.seeds:
        data["by_trials"] = True
    return (Reason("over_preset", data | {"noise": noise}),)


#: The part of a policy that is its layers' recipes.
_LAYERS = "layers"


def by_parts(setup: Setup, decision: Decision, duels: Duels) -> tuple[Reason, ...]:
    """Return how many times as fast an adopted policy is as without each of its parts; nothing where it has one.

    Args:
        setup: what is searched.
        decision: the answer.
        duels: of the search.
    """
    run = decision.run
    if run is None or decision.verdict != "adopt" or not setup.measured:
        return ()
    parts = {} if setup.host.compiled or compiles(run.policy) else parts_of(setup.problem, run.params)
    if len(parts) < 2:
        return ()
    problem = setup.problem
    documents = {name: problem.policy({**run.params, **changed}).to_dict() for name, changed in parts.items()}
    rounds = duels.without(run, documents)
    rows = [(name, ratio_interval(rounds, name, run.name)) for name in documents]
    known = sorted(((name, found) for name, found in rows if found is not None), key=lambda row: -row[1][0])
    return (Reason("by_parts", {"parts": [[name, *found] for name, found in known]}),) if known else ()


def parts_of(problem: Problem, params: Params) -> dict[str, Params]:
    """Return the parts of a point: name -> the params that take it back to what the script has.

    Args:
        problem: groups and parameters.
        params: of the point.
    """
    baseline = problem.params_of(problem.baseline)
    layers = {layer_key(group.name): baseline.get(layer_key(group.name)) for group in problem.free_groups}
    found = {_LAYERS: {name: value for name, value in layers.items() if value is not None}}
    for name, values in problem.parameters.items():
        if name not in problem.space.parameters and name != VARIANT and problem.value(params, name) != values[0]:
            found[name] = {name: values[0]}
    key = problem.key(params)
    return {name: changed for name, changed in found.items() if problem.key({**params, **changed}) != key}


#: Presets of an eager script that compile its blocks and do nothing else, or nothing beyond 16 bits.
_BLOCKS_ALONE = (COMPILED, *(f"{name}, compiled" for name in NAMES))


def beside_compiled(setup: Setup, run: Run | None, rests: Sequence[Run], tried: Sequence[Run]) -> list[Run]:
    """Return what is timed for an answer, with the blocks compiled alone where a policy compiles an eager script.

    Args:
        setup: what is searched.
        run: of the policy that would be adopted; None for none.
        rests: what the answer rests on, the policy first.
        tried: all that ran.
    """
    alone = [one for one in tried if one.name in _BLOCKS_ALONE] if _compiles_eager(setup, run) else []
    return list({one.name: one for one in (*rests[:1], *alone[:1], *rests[1:])}.values())


def over_compiled(setup: Setup, chosen: Standing, standings: Sequence[Standing], duels: Duels) -> tuple[Reason, ...]:
    """Return what of a policy's gain is that of compiling an eager script's blocks, and what its precision adds to it.

    Nothing for a policy that compiles nothing, or does nothing else.

    Args:
        setup: what is searched.
        chosen: what is adopted.
        standings: of all that was tried.
        duels: of the search.
    """
    alone = next((one for name in _BLOCKS_ALONE for one in standings if one.name == name), None)
    if not _compiles_eager(setup, chosen.run) or alone is None or alone.name == chosen.name:
        return ()
    bounds = [alone.low, alone.high] if alone.timed else []
    data = {"compiled": [alone.speedup, *bounds], "precision": chosen.speedup / alone.speedup}
    both = duels.between(chosen, alone)
    if both is not None:
        data |= dict(zip(("precision", "low", "high"), both, strict=True))
    return (Reason("compiled_apart", data),)


def _compiles_eager(setup: Setup, run: Run | None) -> bool:
    return run is not None and compiles(run.policy) and not setup.host.compiled


def with_fastest(decision: Decision, *, alone: bool) -> list[Run]:
    """Return what a decision adopts, and unless ``alone`` the fastest of what is tied, where its safety has decided."""
    tied = [] if alone else [decision.ranking[i] for i in decision.rests_on]
    runs = [decision.run, *(one.run for one in sorted(tied, key=lambda one: -one.speedup)[:1])]
    return list({run.name: run for run in runs if run is not None}.values())
