"""What coarse targets need of a policy: is it one recipe, which one, and which layers fall out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from autoprec.export.base import Losses, Request
from autoprec.policy import LayerPlan, first_match
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS, KEEP, Gemm, Recipe, Scaling


def main_plan(request: Request) -> LayerPlan | None:
    """Return the quantised plan that most layers run (most rules, when layers are not known); None without any."""
    scaled = [rule.plan for rule in request.rules() if rule.plan.scaled]
    counts = Counter(request.plans().values() if request.layers else scaled)
    return max(scaled, key=lambda plan: counts[plan], default=None)


def current_scaling(scaling: Scaling) -> Scaling:
    """Return the scaling with the scale of each tensor's own amax instead of a delayed one."""
    plain = {"scale": "current", "margin": 0, "amax_history_len": 16, "amax_compute_algo": "max"}
    return scaling.model_copy(update=plain)


def lose(losses: Losses, request: Request, lost: Callable[[LayerPlan, str], str], why: str = "") -> None:
    """List what layers run instead of their plans: by rule what most of its layers run, the others by name.

    Args:
        lost: (a plan, the name of its layer or "") -> what runs instead, in words; empty where it is the same.
        why: the reason, behind the words.
    """
    plans = request.plans()
    decided: dict[str, dict[str, str]] = {rule.match: {} for rule in request.rules()}
    for name in plans:
        rule = first_match(request.policy.layers, name)
        decided[rule.match if rule else "*"][name] = lost(plans[name], name)
    found = [] if plans else [(rule.plan, lost(rule.plan, ""), rule.match) for rule in request.rules()]
    for match, words in decided.items():
        most = Counter(words.values()).most_common(1)
        found += [(plans[name], said, match if said == most[0][0] else name) for name, said in words.items()]
    for plan, instead, match in found:
        if instead:
            losses.add(plan.describe(), f"{instead}: {why}" if why else instead, match)


def fitted(plan: LayerPlan, near: Callable[[Recipe], Recipe], activations: str) -> LayerPlan:
    """Return the nearest plan of a stack that has a recipe for each product of a layer, or one dtype for all of them.

    Args:
        near: a scaled recipe -> the nearest that the stack runs.
        activations: the dtype of products in high precision, in a layer that has others.
    """
    recipes = [near(r) if r is not None and r.scaled else r for r in plan.recipes]
    recipes = [BUILTIN_RECIPES["fp32"] if r is not None and r.format == "tf32" else r for r in recipes]
    if any(r is not None and r.scaled for r in recipes):
        recipes = [r if r is not None and r.scaled else None for r in recipes]
    elif len({r.format if r else activations for r in recipes}) > 1:
        recipes = [recipes[0]] * len(GEMMS)
    return LayerPlan(**dict(zip(GEMMS, recipes, strict=True)))


def fast_forward(recipe: Recipe) -> LayerPlan:
    """Return a recipe as torchao's named recipes and Transformer Engine's run it: only fprop accumulates fast.

    ``use_fast_accum`` of torchao's ``gemm_config_output`` is True by default, and ``use_split_accumulator`` of
    Transformer Engine's fprop is False; block scaling alone is always accumulated in full.
    """
    full = recipe.model_copy(update={"accumulation": "full"})
    block = recipe.scaling is not None and recipe.scaling.granularity == "block"
    fast = recipe.format == "fp8" and not block
    return LayerPlan(fprop=recipe.model_copy(update={"accumulation": "fast"}) if fast else full, dgrad=full, wgrad=full)


def changes(plan: LayerPlan, runs: LayerPlan, dtype: str, asked: str = "") -> str:
    """Return in words what a layer runs instead of its plan; empty where it is the same.

    Args:
        runs: what it runs; a product without a recipe is in high precision.
        dtype: what high precision is there.
        asked: the policy's activations, where the target has others and that is listed already.
    """
    words: dict[str, list[str]] = {}
    for gemm, want, got in zip(GEMMS, plan.recipes, runs.recipes, strict=True):
        plain = want is not None and want.format in (dtype, asked) and (gemm == "fprop" or want.output == "keep")
        for word in _changes(None if got is None and plain else want, got, gemm):
            words.setdefault(word or ("as the script wrote it" if dtype == KEEP else dtype), []).append(gemm)
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
    """Return what differs, in words; the empty one is high precision."""
    if want == got:
        return []
    if want is None or got is None or want.format != got.format:
        return ["" if got is None else got.describe().removesuffix(" fast")]
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
