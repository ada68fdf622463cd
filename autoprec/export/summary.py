"""What coarse targets need of a policy: is it one recipe, which one, and which layers fall out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autoprec.export.base import Losses, Request, RulePlan
from autoprec.policy import LayerPlan, first_match
from autoprec.precision.recipes import GEMM_OPERANDS, GEMMS, Gemm, Recipe, Scaling


def main_plan(request: Request) -> LayerPlan | None:
    """Return the quantised plan that most layers run (most rules, when layers are not known); None without any."""
    scaled = [rule.plan for rule in request.rules() if rule.plan.scaled]
    counts = Counter(request.plans().values() if request.layers else scaled)
    return max(scaled, key=lambda plan: counts[plan], default=None)


def other_dtype(plan: LayerPlan, *dtypes: str) -> bool:
    """Say whether some product of a layer asks for a plain format beside these."""
    return any(recipe is not None and not recipe.scaled and recipe.format not in dtypes for recipe in plan.recipes)


def current_scaling(scaling: Scaling) -> Scaling:
    """Return the scaling with the scale of each tensor's own amax instead of a delayed one."""
    plain = {"scale": "current", "margin": 0, "amax_history_len": 16, "amax_compute_algo": "max"}
    return scaling.model_copy(update=plain)


def lose_rule(losses: Losses, rule: RulePlan, instead: str) -> None:
    """List a rule that a target runs differently."""
    losses.add(rule.plan.describe(), instead, rule.match)


def lose_layers(losses: Losses, request: Request, lost: Mapping[str, str]) -> None:
    """List what layers run instead of their plans (empty: the same): by rule, where all of its layers run the same."""
    plans = request.plans()
    decided: dict[str, dict[str, str]] = {}
    for name in plans:
        rule = first_match(request.policy.layers, name)
        decided.setdefault(rule.match if rule else "*", {})[name] = lost.get(name, "")
    for match, words in decided.items():
        one = len(set(words.values())) == 1
        for name, instead in list(words.items())[: 1 if one else None]:
            if instead:
                losses.add(plans[name].describe(), instead, match if one else name)


def fast_forward(recipe: Recipe) -> LayerPlan:
    """Return a recipe as torchao's named recipes and Transformer Engine's run it: only fprop accumulates fast.

    ``use_fast_accum`` of torchao's ``gemm_config_output`` is True by default, and ``use_split_accumulator`` of
    Transformer Engine's fprop is False; block scaling alone is always accumulated in full.
    """
    full = recipe.model_copy(update={"accumulation": "full"})
    block = recipe.scaling is not None and recipe.scaling.granularity == "block"
    fast = recipe.format == "fp8" and not block
    return LayerPlan(fprop=recipe.model_copy(update={"accumulation": "fast"}) if fast else full, dgrad=full, wgrad=full)


def changes(plan: LayerPlan, runs: LayerPlan) -> str:
    """Return in words what a layer that should run ``plan`` runs instead; empty where it is the same."""
    words: dict[str, list[str]] = {}
    for gemm, want, got in zip(GEMMS, plan.recipes, runs.recipes, strict=True):
        for word in _changes(want, got, gemm):
            words.setdefault(word, []).append(gemm)
    everywhere = [word for word, gemms in words.items() if len(gemms) == len(GEMMS)]
    some = [f"{word} in {' and '.join(gemms)}" for word, gemms in words.items() if len(gemms) < len(GEMMS)]
    return ", ".join(everywhere + some)


def distance(plan: LayerPlan, runs: LayerPlan) -> tuple[int, int]:
    """Return how far two plans are apart: GEMMs that are scaled in one of them alone, and differences in all."""
    pairs = list(zip(GEMMS, plan.recipes, runs.recipes, strict=True))
    alone = sum(bool(a and a.scaled) != bool(b and b.scaled) for _, a, b in pairs)
    return alone, sum(len(_changes(a, b, gemm)) for gemm, a, b in pairs)


#: What an NVFP4 recipe may have, its field, and the GEMMs that it is nothing to.
_FLAGS: tuple[tuple[str, str, tuple[Gemm, ...]], ...] = (
    ("Hadamard transform", "hadamard", ("fprop", "dgrad")),
    ("stochastic rounding", "stochastic_rounding", ("fprop",)),
    ("2-D scales", "weight_2d", ("wgrad",)),
)


def _changes(want: Recipe | None, got: Recipe | None, gemm: Gemm) -> list[str]:
    if want == got:
        return []
    if want is None or got is None or want.format != got.format:
        return ["the dtype of the activations" if got is None else got.describe().removesuffix(" fast")]
    a, b, words = want.canonical().scaling, got.canonical().scaling, []
    if a is not None and b is not None:
        if (a.granularity, a.scale) != (b.granularity, b.scale):
            words.append(f"{'one scale per ' + b.granularity if b.scale == 'current' else 'delayed scaling'}")
        if a.power_of_2 != b.power_of_2:
            words.append("scales that are powers of two" if b.power_of_2 else "scales that are not powers of two")
        if a.amax_epsilon != b.amax_epsilon:
            words.append(f"an amax_epsilon of {b.amax_epsilon:g}")
        histories = [(s.margin, s.amax_history_len, s.amax_compute_algo) for s in (a, b)]
        if b.scale == "delayed" and histories[0] != histories[1]:
            words.append(f"a margin of {b.margin} and the {b.amax_compute_algo} amax of {b.amax_history_len} steps")
    formats = [[recipe.operand_format(operand) for operand in GEMM_OPERANDS[gemm]] for recipe in (want, got)]
    if formats[0] != formats[1] and got.operands is not None:
        words.append("/".join(got.operands.model_dump().values()) + " operands")
    if want.accumulation != got.accumulation:
        words.append(f"{got.accumulation} accumulation")
    for word, field, without in _FLAGS:
        if gemm not in without and getattr(want, field) != getattr(got, field):
            words.append(word if getattr(got, field) else f"no {word}")
    return words
