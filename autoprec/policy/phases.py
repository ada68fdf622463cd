"""When the phases of a policy begin, in steps of a run, and the two that most people want.

A short trial sees the beginning of a run; its end has other needs. While the learning rate is high, the noise of small
batches hides what rounding does; when it has decayed, rounding is what is left. So a run may end in bf16 (NVIDIA's
NVFP4 recipe does so for its last part, arXiv 2509.25149), or begin in it, until the first large gradients are over.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from autoprec.errors import PolicyError, UnknownNameError, UsageError
from autoprec.policy.schema import LayerRule, Phase, Policy
from autoprec.precision.recipes import BUILTIN_RECIPES

P = TypeVar("P", bound=Policy)

#: Share of the run that ends, and steps that begin, in bf16 under the presets.
LAST_SHARE, FIRST_STEPS = 0.15, 200


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


def last_in_bf16(policy: P) -> P:
    """Return the policy with every layer in bf16 for the last :data:`LAST_SHARE` of the run."""
    name, recipes = plain_recipe(policy)
    last = Phase.model_validate({"from": 1.0 - LAST_SHARE, "layers": (_everything(name),)})
    return policy.model_copy(update={"recipes": recipes, "phases": (*policy.phases, last)})


def first_in_bf16(policy: P) -> P:
    """Return the policy with every layer in bf16 for the first :data:`FIRST_STEPS` optimizer steps.

    Raises:
        PolicyError: a phase of the policy begins before that.
    """
    if any(isinstance(phase.start, int) and phase.start <= FIRST_STEPS for phase in policy.phases):
        raise PolicyError(f"a phase of the policy begins within its first {FIRST_STEPS} steps", where="phases")
    name, recipes = plain_recipe(policy)
    then = Phase.model_validate({"from": FIRST_STEPS, "layers": policy.layers})
    update = {"recipes": recipes, "layers": (_everything(name),), "phases": (then, *policy.phases)}
    return policy.model_copy(update=update)


#: The common phases by the names that ``autoprec search --phases`` takes.
PHASE_PRESETS = ("first-bf16", "last-bf16")


def with_presets(policy: P, names: Sequence[str]) -> P:
    """Return the policy with phases of :data:`PHASE_PRESETS`.

    Raises:
        UnknownNameError: no such preset.
    """
    for name in names:
        if name not in PHASE_PRESETS:
            raise UnknownNameError("phase preset", name, PHASE_PRESETS)
    policy = last_in_bf16(policy) if "last-bf16" in names else policy
    return first_in_bf16(policy) if "first-bf16" in names else policy


def speedup_of_run(policy: Policy, run_steps: int, speedup: float, plain: float) -> tuple[float, float]:
    """Return the speed-up of a whole run, and the share of it that is not in plain bf16.

    Args:
        policy: with phases of :data:`PHASE_PRESETS`.
        run_steps: optimizer steps of the run.
        speedup: of the policy where it is not in plain bf16.
        plain: of bf16 everywhere.
    """
    ends = [*boundaries(policy, run_steps)[1:], run_steps]
    share = sum(
        end - start
        for start, end, stage in zip(boundaries(policy, run_steps), ends, policy.stages, strict=True)
        if any(stage.plan_of_rule(rule).scaled for rule in _reached(stage))
    )
    share_of_run = share / run_steps
    return 1.0 / (share_of_run / speedup + (1.0 - share_of_run) / plain), share_of_run


def _reached(policy: Policy) -> list[LayerRule | None]:
    """Return the rules that a layer can come to, the default (None) among them; none behind one that matches all."""
    everything = next((index for index, rule in enumerate(policy.layers) if rule.match == "*"), None)
    return [*policy.layers, None] if everything is None else [*policy.layers[: everything + 1]]


def _everything(recipe: str) -> LayerRule:
    return LayerRule(match="*", recipe=recipe, gemms={}, optional=True)
