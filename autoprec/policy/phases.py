"""When the phases of a policy begin, in steps of a run, and plain bf16 under its own name.

A short trial sees the beginning of a run; its end has other needs. While the learning rate is high, the noise of small
batches hides what rounding does; when it has decayed, rounding is what is left. So a run may end in bf16 (NVIDIA's
NVFP4 recipe does so for its last part, arXiv 2509.25149), or begin in it, until the first large gradients are over.
"""

from __future__ import annotations

import itertools
from typing import TypeVar

from autoprec.errors import PolicyError, UsageError
from autoprec.policy.schema import Policy
from autoprec.precision.recipes import BUILTIN_RECIPES

P = TypeVar("P", bound=Policy)


def boundaries(policy: Policy, run_steps: int | None) -> tuple[int, ...]:
    """Return the optimizer steps before each of ``policy.stages``; the first is 0.

    Args:
        policy: a policy, with phases or without.
        run_steps: optimizer steps of the whole run; needed where a phase begins at a share of it.

    Raises:
        UsageError: it is needed and not known.
        PolicyError: counted in steps, a phase does not begin after the one before it.
    """
    if run_steps is not None and run_steps < 1:
        raise UsageError(f"a run of {run_steps} steps cannot be", fix="give the optimizer steps of the whole run")
    found = [0]
    for phase in policy.phases:
        if isinstance(phase.start, int):
            found.append(phase.start)
        elif run_steps is None:
            raise UsageError(
                f"a phase of the policy begins at {phase.label}, and how many steps the run has is not known",
                fix="say so: `autoprec run --run-steps N`, policy.apply(model, run_steps=N), or "
                "Session(..., run_steps=N); or write the phase's 'from' as a step",
            )
        else:
            found.append(max(1, round(phase.start * run_steps)))
    if any(later <= earlier for earlier, later in itertools.pairwise(found)):
        steps = "" if run_steps is None else f" of a run of {run_steps}"
        raise PolicyError(
            f"the phases begin at steps {', '.join(map(str, found[1:]))}{steps}: each must begin after the one before",
            where="phases",
            fix="write them in the order in which they begin",
        )
    return tuple(found)


def plain_recipe(policy: Policy) -> tuple[str, dict[str, object]]:
    """Return the name under which a policy has (or gets) plain bf16, and its recipes with it."""
    plain = BUILTIN_RECIPES["bf16"]
    for name, recipe in policy.recipes.items():
        if recipe == plain:
            return name, dict(policy.recipes)
    name = "bf16" if "bf16" not in policy.recipes else "plain_bf16"
    return name, {**policy.recipes, name: plain}
