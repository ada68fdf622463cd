"""Safety that costs nothing: the lowerings of an adopted policy that save too little for their error are taken back.

What is asked is :func:`autoprec.tuning.decide.taking_back.taken_back`; the search runs the policy once without them.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.tuning.decide.decision import Decision, Standing
from autoprec.tuning.decide.sampler.expectation import Expectation
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.decide.taking_back import LEAST_SAVING, taken_back
from autoprec.tuning.ledger import Ledger
from autoprec.tuning.setup import Setup
from autoprec.tuning.study.run import Run

#: Tag of a policy with lowerings taken back, and what its name ends with.
SAFER = "safer"
_NAMED = f", {SAFER}"


def safer_policy(
    setup: Setup, ledger: Ledger, expectation: Expectation, decision: Decision, tried: Sequence[Run]
) -> Run | None:
    """Return what is adopted without the lowerings that can be taken back, as a run to make; None for none."""
    problem, first, chosen, table = setup.problem, decision.run, decision.chosen, ledger.table
    if first is None or chosen is None or table is None or SAFER in first.tags:
        return None
    fastest = max(one.speedup for one in decision.ranking if one.name not in decision.rejected)
    room = ledger.reference.step_ms * ((1.0 + LEAST_SAVING) / fastest - 1.0 / chosen.speedup)
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
    """Return the reason that names what a chosen policy has taken back; nothing for other policies."""
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
