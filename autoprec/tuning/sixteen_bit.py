"""What people would run instead: the script in 16 bit, which every gain on a GPU is told against.

On a GPU nobody who cares about speed trains in fp32: a policy that is nine times as fast as an fp32 script may gain a
fifth over what its author would do anyway, which is to wrap the model in bf16 autocast. That run (or the script, where
it is in 16 bit already) is measured before anything else. On a CPU the script as written is what people run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoprec.cost import Verdict
from autoprec.cost.scale import short_dtype
from autoprec.graph.report import GraphReport
from autoprec.policy.library import PREFIX, published
from autoprec.policy.space import Choice, ChoiceRule, SearchSpace
from autoprec.precision.hardware import cpu_bf16_units
from autoprec.precision.recipes import GEMMS, KEEP
from autoprec.support.plain import Document
from autoprec.trial.command import ScriptCommand
from autoprec.trial.losses import MISMATCH
from autoprec.tuning.decide.presets import COMPILED, ONE_SIDE, WIDE_HEAD, widest
from autoprec.tuning.decide.published import LIBRARIES
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.phases.soundness import MENDED, Soundness, soundness_of
from autoprec.tuning.setup import Setup
from autoprec.tuning.study.run import Params, Run, pooled

#: Below this modelled gain over 16 bit no quantised policy is worth a trial (the threshold of the verdict).
WORTH_SEARCHING = 1.03
#: The presets that are the script in 16 bit, the one people know first.
NAMES = ("bf16 autocast", "all bf16")
SLOW_SIXTEEN_BIT = (
    "the script runs in {written}, and this CPU has no bf16 instructions: its products are slower than in fp32. "
    "Speed-ups are over that; the script in fp32 would be faster than it is, and was not timed"
)
#: Recipe -> the library's default that is made of it; without that, the recipe in most layers is what people run.
_DEFAULTS = {"fp8_tensorwise": "torchao-tensorwise", "fp8_delayed": "te-delayed", "mxfp8": "te-mxfp8"}
#: Published policies that a preset's name says it is.
_PUBLISHED = re.compile(re.escape(PREFIX) + r"([a-z0-9.-]+)")


def gemm_dtype(graph: GraphReport) -> str:
    """Return the dtype in which most of the tunable GEMMs' FLOPs run as the script is written; empty without any."""
    flops: dict[str, int] = {}
    for layer in graph.tunable:
        flops[short_dtype(layer.dtype)] = flops.get(short_dtype(layer.dtype), 0) + layer.total_flops
    return max(flops, key=lambda dtype: flops[dtype], default="")


def runs_in_sixteen_bit(graph: GraphReport) -> bool:
    """Say whether most of the tunable GEMMs' FLOPs run in bf16 or fp16 as the script is written."""
    return gemm_dtype(graph) in ("bf16", "fp16")


def written_in(graph: GraphReport) -> str:
    """Return what the script's products run in: a dtype, ``bf16 autocast`` where its parameters are wider than that."""
    dtype, parameters = gemm_dtype(graph), graph.model.get("parameters", 0) * graph.held
    wide = graph.memory.get("parameters", 0) > 3 * parameters > 0
    return f"{dtype} autocast" if wide and dtype in ("bf16", "fp16") else dtype


def slow_sixteen_bit(graph: GraphReport) -> str:
    """Return a note where the script's 16-bit products are what makes it slow on this CPU, or nothing."""
    slow = runs_in_sixteen_bit(graph) and cpu_bf16_units() == ()
    return SLOW_SIXTEEN_BIT.format(written=written_in(graph)) if slow else ""


def is_worth_searching(verdict: Verdict, options: SearchOptions) -> bool:
    """Say whether anything beyond 16 bit is tried."""
    return verdict.bound_speedup >= WORTH_SEARCHING or options.force


def only_sixteen_bit(setup: Setup, verdict: Verdict) -> Setup | None:
    """Return the search of 16-bit policies alone, where nothing beats 16 bit but the script is not there yet.

    A GPU that is here runs what people write by hand in eight bits all the same: a model's word is not a measurement.
    """
    modelled = not (setup.measured or setup.target.is_cpu)
    if not modelled or is_worth_searching(verdict, setup.options) or runs_in_sixteen_bit(setup.graph):
        return None
    return setup.restricted(sixteen_bit_space(setup.space))


@dataclass(frozen=True, slots=True)
class Bound:
    """What could be gained at most.

    Attributes:
        setup: what is searched; where ``narrow`` of 16-bit policies alone.
        soundness: what in the reference itself makes its training doubtful.
        beyond: the bound is worth a search of the whole space.
        ends: it is the answer: nothing is run.
    """

    setup: Setup
    verdict: Verdict
    soundness: Soundness
    beyond: bool
    narrow: bool
    ends: bool


def bound_of(whole: Setup, command: ScriptCommand, record: Callable[[Document | None], GraphReport]) -> Bound:
    """Return what the cost model says could be gained at most, and in which part of the space it is searched.

    On a device that can be timed, the cost model never ends the search; hand-written baselines run first.

    Args:
        whole: the search of the whole space.
        command: the script's.
        record: records and judges a step of the script under a policy document, None for as it is written.

    Raises:
        ScriptError: the step of another reference than the script could not be recorded.
    """
    soundness = soundness_of(whole, command, record)
    verdict, options = whole.verdict(), whole.options
    beyond, narrow = is_worth_searching(verdict, options), only_sixteen_bit(whole, verdict)
    # what brings both sides of reinforcement learning together need not gain any time
    ends = verdict.kind == "stay" and not (whole.measured or options.force or narrow or options.metric in MISMATCH)
    setup = soundness.mended(narrow or whole)
    return Bound(setup, verdict, soundness, beyond=beyond, narrow=narrow is not None, ends=ends)


def first_presets(found: Sequence[tuple[str, Params]]) -> list[tuple[str, Params]]:
    """Return presets with the 16-bit run before all others: what is cut short can then still be judged."""
    return sorted(found, key=lambda preset: [not _is_named(preset[0], name) for name in NAMES])


def by_hand(known: Sequence[tuple[str, Params]]) -> list[tuple[str, Params]]:
    """Return the presets that a person writes without a search, in the order in which they are run.

    ``torch.autocast`` in bf16, every layer in bf16, and what libraries run by default: torchao's three float8 recipes
    in the layers that its filter takes, Transformer Engine's delayed and current scaling, and MXFP8 on GPUs that
    multiply it. Where a default cannot be run, its recipe in most layers stands for it. What was published for the
    family of the model. And for a script that compiles nothing ``torch.compile`` of its blocks, where 16 bit is the
    baseline, beside that. Before all others the script with its faults
    mended, where a policy can mend them.
    """
    names = [name for name, _ in known]
    public = {short: name for name in names for short in _PUBLISHED.findall(name)}
    both = ("fp16 autocast", f"fp16 autocast, {WIDE_HEAD}", f"bf16 autocast, {ONE_SIDE}")  # where there are two sides
    order = [
        MENDED,
        *NAMES,
        *(both if both[-1] in names else ()),
        *(widest(recipe, names) for recipe, default in _DEFAULTS.items() if default not in public),
    ]
    order += [public[short] for short in LIBRARIES if short in public]
    order += [name for short, name in public.items() if published(short).families]
    order += [COMPILED, *(f"{name}, compiled" for name in NAMES)]
    return [preset for name in dict.fromkeys(order) for preset in known if _is_named(preset[0], name)]


def is_plain(name: str) -> bool:
    """Say whether a preset of this name is the script in 16 bit."""
    return any(_is_named(name, plain) for plain in NAMES)


def _is_named(name: str, plain: str) -> bool:
    """Compare a preset's name; one that a space names as well is called ``its name (all bf16)``, as the mended is."""
    mended = plain == MENDED and name.startswith(f"{MENDED} (")
    return name == plain or name.endswith(f" ({plain})") or mended


def sixteen_bit_speedup(setup: Setup, records: Iterable[Run]) -> float | None:
    """Return the best 16-bit run's speed-up over the reference; None on a CPU, or before it was measured."""
    if setup.target.is_cpu:
        return None
    plain = fastest_plain(records)
    speeds = [] if plain is None else [plain["speedup"]]
    if setup.options.reference == "bf16" or (setup.options.reference == "script" and runs_in_sixteen_bit(setup.graph)):
        speeds.append(1.0)
    return max(speeds, default=None)


def fastest_plain(records: Iterable[Run]) -> Run | None:
    """Return the better of the 16-bit presets that were measured, with the figures of all its runs; or None."""
    known = pooled(record for record in records if is_plain(record.name)).values()
    return max((r for r in known if "speedup" in r.metrics), key=lambda r: r["speedup"], default=None)


def over_sixteen_bit(metrics: Mapping[str, float], sixteen_bit: float | None) -> dict[str, float]:
    """Return ``speedup_over_16bit`` of a run, as a mapping; empty where there is nothing to compare with."""
    if not sixteen_bit or "speedup" not in metrics:
        return {}
    return {"speedup_over_16bit": metrics["speedup"] / sixteen_bit}


def sixteen_bit_space(space: SearchSpace) -> SearchSpace:
    """Return a space without quantised choices: what is left to try where the model says that none of them gains."""
    recipes = space.all_recipes

    narrow = space.baseline in recipes and recipes[space.baseline].format in ("bf16", "fp16")

    def left_out(choice: Choice) -> bool:
        named = [recipes[name] for name in map(choice.recipe_of, GEMMS) if name != KEEP]
        # where 16 bit is the baseline, a wider choice is for the loss, which 16 bit alone does not strain
        return any(recipe.scaled or (narrow and recipe.wide_output) for recipe in named)

    def plain(rule: ChoiceRule) -> ChoiceRule:
        kept = tuple(choice for choice in rule.choices if not left_out(choice))
        return rule.model_copy(update={"choices": kept}) if kept else rule

    changes: dict[str, object] = {"parameters": {}, "presets": ()}
    return space.model_copy(update=changes | {"choices": tuple(map(plain, space.choices))})
