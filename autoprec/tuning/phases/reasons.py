"""What is said beside a verdict: why nothing is acceptable, and why what came out faster was not taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoprec.tuning.decide.decision import Decision, Rules, Standing, faster_ones, merit_of
from autoprec.tuning.decide.sampler.expectation import MODEL_RESOLUTION, TIMES_SD
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.state import SearchState
from autoprec.tuning.study.run import Run


def why_nothing(
    state: SearchState, standings: Sequence[Standing], rules: Rules, fewest: int, failed: Sequence[Run] = ()
) -> Reason:
    """Return why nothing is acceptable where no policy was measured under enough seeds.

    Args:
        standings: policies that were measured.
        fewest: paired seeds that it takes to be accepted.
        failed: first trials that could not be measured.
    """
    if not standings:
        told = [f"{run.name}: {run.status}: {run.reason}" for run in failed]
        return Reason("none_measured", {"first": told[0], "more": len(told) - 1} if told else {})
    script, objective = state.reference, state.options.objective
    fine = [one for one in standings if not rules.breaks(one)]
    # speeds as they are told, over the reference of their own seed: step times of other minutes are not comparable
    merits = {one.name: merit_of(one, objective, script.memory_bytes) for one in standings}
    first = max(fine or standings, key=lambda one: merits[one.name])
    merit, timed = merits[first.name], first.timed and objective == "throughput"
    # so little that no further seed was worth its time
    slight = 0.0 if objective != "throughput" else MODEL_RESOLUTION if first.modelled else TIMES_SD
    if fine and (merit <= 1.0 + slight or (timed and not first.is_surely_above(1.0))):
        bounds = {"low": first.low, "high": first.high} if timed else {}
        noise = 0.0 if first.modelled else slight
        return Reason("no_gain", {"name": first.name, "merit": merit, "noise": noise} | bounds)
    why = Reason("few_seeds", {"seeds": first.seeds, "needed": fewest}) if fine else first.rejection
    return Reason("none_acceptable", {"first": first.name, "why": why, "more": len(standings) - 1})


def with_faster(
    state: SearchState, decision: Decision, chosen: Standing, tried: Sequence[Standing], rules: Rules, fewest: int
) -> Decision:
    """Return the decision with why policies that were measured to be faster are not adopted.

    Args:
        chosen: the policy that is adopted.
        tried: everything that was measured, judged.
        fewest: paired seeds that it takes to be accepted.
    """
    if state.options.objective != "throughput":
        return decision
    noise = decision.timing_noise
    found = faster_ones(chosen, tried, rules, decision.rejected, fewest=fewest, timing_noise=noise)
    others = {name: why for name, why in found.items() if name not in decision.rejected}
    for name, why in others.items():
        state.note(f"{name} came out faster, but was not taken: {why}")
    for name, why in list(found.items())[:1]:
        speedup = next(one.speedup for one in tried if one.name == name)
        first = Reason("faster_not_taken", {"name": name, "speedup": speedup, "why": why, "more": len(found) - 1})
        decision = decision.with_reasons(first)
    return replace(decision, not_taken=others)


def with_unsure(decision: Decision, tried: Sequence[Standing], rules: Rules, fewest: int) -> Decision:
    """Return a decision that nothing gains, with what came out faster under too few seeds to be accepted.

    Args:
        decision: it adopts nothing.
        tried: everything that was measured, judged.
        fewest: paired seeds that it takes to be accepted.
    """
    best = decision.reasons[0]
    if best.code != "no_gain":
        return decision
    level = max(1.0 + best.data["noise"], best.data["merit"])
    faster = [
        one
        for one in tried
        if one.seeds < fewest and one.speedup > level and not rules.breaks(one)
        if not one.timed or one.is_surely_above(1.0)
    ]
    if not faster:
        return decision
    first = max(faster, key=lambda one: one.speedup)
    why = Reason("few_seeds", {"seeds": first.seeds, "needed": fewest})
    data = {"name": first.name, "speedup": first.speedup, "why": why, "more": len(faster) - 1}
    return decision.with_reasons(Reason("faster_not_taken", data))
