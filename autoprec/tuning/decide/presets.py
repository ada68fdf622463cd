"""Presets: policies that people run today, which an answer is compared with.

They are the script as written, bf16 everywhere, one FP8 recipe everywhere, and that recipe with the usual exceptions
(first and last block, attention or the output layer in bf16, the MLPs only), what libraries run by default, and what
was published for the family of the model. What a person writes without a search is always measured, and first
(:func:`autoprec.tuning.sixteen_bit.by_hand`); the sampler asks for the others where a run of them pays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from autoprec.graph.roles import Place, places
from autoprec.policy.rollout import ROLLOUT
from autoprec.policy.space import WIDE_OPERATORS, Choice
from autoprec.precision.recipes import KEEP
from autoprec.tuning.decide.problem import GroupVariable, Params, Problem, layer_key
from autoprec.tuning.decide.published import in_blocks, published_presets

#: First words of roles (:data:`autoprec.graph.roles.ROLES`): of layers that do attention, and of MLPs.
_ATTENTION, _MLP = {"attention", "cross_attention"}, {"mlp", "expert", "shared_expert"}

#: The preset that changes no precision, and compiles the blocks of a script that compiles nothing.
COMPILED = "script, blocks compiled"
#: How a policy's ``execution`` is called in a preset's name.
#: Ends the name of a preset that changes training alone, where others change the copy that generates as well.
ONE_SIDE = "rollout as written"
#: Ends the name of one whose head returns its FP32 sums on both sides.
WIDE_HEAD = "head output fp32"
_EXECUTED = {"compile": "compiled", "compile_whole": "compiled as a whole", "eager": "not compiled"}


def presets(problem: Problem) -> list[tuple[str, Params]]:
    """Return (name, params) of the presets that this problem can express, each numerically different from the others.

    The script as written, all bf16, each uniform choice (``head X`` where only the head offers it), each of them with
    the first and last block in the baseline, with attention in the baseline, in the MLPs only, and with the head out;
    the presets of the space, and published ones. Names are unique.
    """
    found: list[tuple[str, Params]] = []
    seen: dict[tuple[Any, ...], int] = {}
    # FP8 casts that are not fused seldom pay: where a policy may compile the model, its exceptions are tried compiled
    fuses = problem.baseline != KEEP and "compile" in problem.parameters.get("execution", ())
    execution = "compile" if fuses else ""
    public = published_presets(problem, execution=execution)
    own = {preset.name for preset in problem.space.presets} | {name for name, _ in public}
    for name, params in (*_candidates(problem, execution), *public):
        key = problem.key(params)
        if key in seen and name in own:  # known by the space's name as well
            found[seen[key]] = (f"{name} ({found[seen[key]][0]})", found[seen[key]][1])
        elif key not in seen and name not in {n for n, _ in found}:
            seen[key] = len(found)
            found.append((name, params))
    return found


def widest(recipe: str, names: Collection[str]) -> str:
    """Return which of the presets ``names`` runs a recipe in most layers; empty where none of them runs it."""
    return next((n for n in (f"all {recipe}", f"{recipe}, head in bf16", f"{recipe}, head kept") if n in names), "")


def _candidates(problem: Problem, execution: str) -> Iterator[tuple[str, Params]]:
    script, offered = problem.params_of(KEEP), problem.parameters
    if problem.is_script(script):
        yield "script", script
    for name in (name for name in ("bf16", "fp16") if name in offered.get("activations", ())):
        yield f"{name} autocast", problem.params_of(name, activations=name)
        if ROLLOUT in offered:
            yield from _of_two_sides(problem, name)
        wide = {kind: "fp32" for kind in WIDE_OPERATORS if "fp32" in offered.get(kind, ())}
        if wide:
            yield f"{name} autocast, {' and '.join(wide)} fp32", problem.params_of(name, activations=name, **wide)
        if "fp32" in offered.get("attention", ()):
            exact = problem.params_of(name, activations=name, attention="fp32")
            yield f"{name} autocast, attention fp32", exact
    uniform = [c for c in problem.choice_names if c != KEEP]
    for choice in uniform:
        yield _name(problem, choice), problem.params_of(choice)
    for executed in problem.parameters.get("execution", ()):
        if executed != KEEP:
            alone = executed == "compile" and problem.baseline == KEEP
            name = COMPILED if alone else f"all {_label(problem.baseline)}, {_EXECUTED[executed]}"
            yield name, problem.params_of(problem.baseline, execution=executed)
    quantised = [c for c in uniform if c != problem.baseline and "/" not in c]
    yield from _from_space(problem)
    for choice in quantised if execution else ():
        yield f"{_name(problem, choice)}, compiled", problem.params_of(choice, execution=execution)
    found = places(problem.report.layers) if quantised else {}
    for choice in quantised:
        yield from _partial(problem, found, choice, execution)


def _of_two_sides(problem: Problem, dtype: str) -> Iterator[tuple[str, Params]]:
    """Yield presets of a search by what lies between both sides: of that, most is the rounding of the logits."""
    params = problem.params_of(dtype, activations=dtype)
    wide = f"{dtype}_fp32_output"
    heads = {layer_key(g.name): wide for g in problem.free_groups if "head" in g.flags and wide in g.choices}
    if heads:
        yield f"{dtype} autocast, {WIDE_HEAD}", params | heads
    if KEEP in problem.parameters[ROLLOUT]:
        yield f"{dtype} autocast, {ONE_SIDE}", params | {ROLLOUT: KEEP}


def _partial(problem: Problem, found: Mapping[str, Place], choice: str, execution: str) -> Iterator[tuple[str, Params]]:
    label, groups, other = _label(choice), problem.groups, _without(problem)

    def roles(group: GroupVariable) -> set[str]:
        return {found[name].role.partition(".")[0] for name in group.layers}

    def at_an_edge(group: GroupVariable) -> bool:
        here = [found[name] for name in group.layers]
        outside = any(flag in group.flags for flag in ("first", "head"))
        return outside or any(place.blocks > 2 and place.block in (0, place.blocks - 1) for place in here)

    parts = {
        f"head {other}": [g for g in groups if "head" not in g.flags],
        f"first and last block {other}": [g for g in groups if not at_an_edge(g)],
        f"attention {other}": [g for g in groups if not roles(g) & _ATTENTION],
        "MLP only": [g for g in groups if roles(g) & _MLP],
    }
    parameters, free = {"execution": execution} if execution else {}, problem.free_groups
    for what, inside in parts.items():
        name = f"{label}, {what}" + (", compiled" if execution else "")
        params = problem.params_of(problem.baseline, **parameters)
        yield name, params | {layer_key(g.name): choice for g in inside if g in free and choice in g.choices}


def _name(problem: Problem, choice: str) -> str:
    """Return the name of a choice wherever it is offered, which need not be at the head, or may be there alone."""
    offered = {"head" in group.flags for group in problem.groups if choice in group.choices}
    heads = any("head" in group.flags for group in problem.groups)
    if offered == {False} and heads:
        return f"{_label(choice)}, head {_without(problem)}"
    return f"{'head' if offered == {True} else 'all'} {_label(choice)}"


def _without(problem: Problem) -> str:
    """Say how a layer runs that has no choice of the preset: ``kept`` is as the script wrote it."""
    return "kept" if problem.baseline == KEEP else f"in {_label(problem.baseline)}"


def _from_space(problem: Problem) -> Iterator[tuple[str, Params]]:
    """Yield the presets of the space; one that would keep every block has nothing to say about this model."""
    found = places(problem.report.layers) if any(preset.kept for preset in problem.space.presets) else {}
    for preset in problem.space.presets:
        values = {k: v for k, v in preset.parameters.items() if k in problem.parameters}
        params = problem.params_of(preset.choice or problem.baseline, preset.layers, **values)
        if preset.kept is not None:
            inside = [place.name for place in found.values() if place.blocks and not in_blocks(preset.kept, place)]
            groups = [group for group in problem.free_groups if not set(group.layers) <= set(inside)]
            if len(groups) == len(problem.free_groups):
                continue
            usual = problem.params_of(problem.baseline, **values)
            params |= {layer_key(group.name): usual[layer_key(group.name)] for group in groups}
        yield preset.name, params


def _label(choice: str) -> str:
    parsed = Choice.parse(choice)
    return parsed.recipe + "".join(f", {gemm} {recipe}" for gemm, recipe in parsed.gemms.items())
