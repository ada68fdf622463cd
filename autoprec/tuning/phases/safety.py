"""Safety that costs nothing: the lowerings of an adopted policy that save too little for their error are taken back.

The search runs the policy once without them, and adopts that under the rules for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.policy.solver import FloatTable, IntVector, solve
from autoprec.support.arrays import np
from autoprec.tuning.decide.decision import Decision, Standing
from autoprec.tuning.decide.sampler.expectation import Expectation
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.setup import Setup
from autoprec.tuning.state import SearchState
from autoprec.tuning.study.run import Run

#: Share of a step that cannot be distinguished from nothing, timed or modelled.
LEAST_SAVING = 0.005
#: What has to be taken back of a policy's squared error for a run of it, and what each group is part of that for.
_LEAST_ERROR, _LEAST_PART = 0.1, 0.02
#: Tag of a policy with lowerings taken back, and what its name ends with.
SAFER = "safer"
_NAMED = f", {SAFER}"


def taken_back(index: IntVector, time: FloatTable, errors: Sequence[FloatTable], room: float) -> IntVector | None:
    """Return the assignment of least error that is slower by no more than ``room``; None where it is hardly better.

    No group gets a choice of more error than it has, so nothing is lowered in exchange.

    Args:
        index: ``[G]`` columns of the policy.
        time: ``[G, C]`` of each group under each choice, in the unit of ``room``.
        errors: tables ``[G, C]`` of squared errors that may not grow; the first is what is made small.
        room: time that may be given up, all groups together.
    """
    rows = np.arange(len(index))
    now = [table[rows, index] for table in errors]
    safer = [table <= have[:, None] for table, have in zip(errors, now, strict=True)]
    offered = np.logical_and.reduce(safer) & np.isfinite(time)
    offered[rows, index] = True
    longer = np.where(offered, np.maximum(time - time[rows, index][:, None], 0.0), 0.0)
    found = solve(np.where(offered, errors[0], np.inf), longer, room) if room > 0 else None
    if found is None:
        return None
    less = (now[0] - errors[0][rows, found]) / max(float(now[0].sum()), 1e-300)
    found = np.where(less >= _LEAST_PART, found, index)
    return found if float(less[less >= _LEAST_PART].sum()) >= _LEAST_ERROR else None


def safer_policy(
    setup: Setup, state: SearchState, expectation: Expectation, decision: Decision, tried: Sequence[Run]
) -> Run | None:
    """Return what is adopted without the lowerings that can be taken back, as a run to make; None for none.

    Args:
        setup: what is searched.
        state: what the search has learnt so far.
        expectation: the models that are fitted to every run.
        decision: the answer as it stands.
        tried: first runs of all that was tried.
    """
    problem, first, chosen, table = setup.problem, decision.run, decision.chosen, state.table
    if first is None or chosen is None or table is None or SAFER in first.tags:
        return None
    fastest = max(one.speedup for one in decision.ranking if one.name not in decision.rejected)
    room = state.reference.step_ms * ((1.0 + LEAST_SAVING) / fastest - 1.0 / chosen.speedup)
    errors = [expectation.divergence.law()[0], table.error2]
    found = taken_back(problem.indices(first.params), expectation.time.mean()[0], errors, room)
    if found is None:
        return None
    params = problem.from_indices(found, {name: problem.value(first.params, name) for name in problem.parameters})
    if problem.key(params) in {problem.key(record.params) for record in tried}:
        return None
    policy = problem.policy(params).to_dict()
    return Run(0, "search", first.name + _NAMED, params, policy, status="", tags=(SAFER,))


def what_was_taken_back(
    setup: Setup, expectation: Expectation, chosen: Standing, tried: Sequence[Run]
) -> tuple[Reason, ...]:
    """Return the reason that names what a chosen policy has taken back; nothing for other policies.

    Args:
        setup: what is searched.
        expectation: the models that are fitted to every run.
        chosen: what is adopted.
        tried: first runs of all that was tried.
    """
    safer = chosen.run
    first = next((run for run in tried if safer is not None and run.name + _NAMED == safer.name), None)
    if safer is None or first is None:
        return ()
    problem, law = setup.problem, expectation.divergence.law()[0]
    old, new = problem.indices(first.params), problem.indices(safer.params)
    rows = range(len(problem.groups))
    changed = [group.name for group, a, b in zip(problem.groups, old, new, strict=True) if a != b]
    error = 1.0 - float(law[rows, new].sum() / law[rows, old].sum())
    return (Reason("taken_back", {"groups": changed, "error": error, "saving": LEAST_SAVING}),)
