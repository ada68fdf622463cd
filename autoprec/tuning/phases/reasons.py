"""What is said beside a verdict: why nothing is acceptable, and why what came out faster was not taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoprec.tuning.decide.decision import Decision, Rules, Standing, faster_ones
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.state import SearchState, objective_cost


def why_nothing(
    state: SearchState, standings: Sequence[Standing], ranks: Mapping[str, float], rules: Rules, fewest: int
) -> Reason:
    """Return why nothing is acceptable where no policy was measured under enough seeds.

    Args:
        standings: policies that were measured.
        ranks: what the objective minimises, by their names.
        fewest: paired seeds that it takes to be accepted.
    """
    if not standings:
        return Reason("none_measured")
    script, objective = state.reference, state.options.objective
    fine = [one for one in standings if not rules.breaks(one)]
    first = min(fine or standings, key=lambda one: ranks[one.name])
    figures = {"step_time_ms": script.step_ms, "memory_bytes": script.memory_bytes}
    merit, timed = objective_cost(figures, objective) / ranks[first.name], first.timed and objective == "throughput"
    if fine and (merit <= 1.0 or (timed and not first.is_surely_above(1.0))):
        bounds = {"low": first.low, "high": first.high} if timed else {}
        return Reason("no_gain", {"name": first.name, "merit": merit, "noise": 0.0} | bounds)
    why = Reason("few_seeds", {"seeds": first.seeds, "needed": fewest}) if fine else first.rejection
    return Reason("none_acceptable", {"first": first.name, "why": why, "more": len(standings) - 1})


def with_faster(
    state: SearchState, decision: Decision, chosen: Standing, tried: Sequence[Standing], rules: Rules, fewest: int
) -> Decision:
    """Return the decision with why policies that were measured to be faster are not adopted.

    Args:
        chosen: the policy that is.
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
