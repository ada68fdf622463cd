"""Every reason of a decision as a sentence: reasons are codes with data, and words are made from them here.

The reasons of the cost model alone bring their own text (``cost/verdict.py``).

A :class:`Reason` says why a policy is rejected, why the loss could not judge it, or why the answer is what it is.
Programs read its code and data (``reasons`` in ``search --json``); ``str(reason)`` is what people read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autoprec.precision.recipes import AS_WRITTEN
from autoprec.support.plain import Document
from autoprec.support.units import gap_text, memory_text, speed_text
from autoprec.tuning.study.run import LEAST_NOISE, noise_text, over_what

#: A gain over the best preset below this is too small to matter to anybody.
ENOUGH = 0.005
#: Codes of reasons that name a gain over the reference, which their data names where it is not the script.
GAINS = frozenset(("adopted", "no_gain", "faster_not_taken", "only_blocks"))
_BEST = {
    "throughput": "fastest acceptable policy",
    "memory": "acceptable policy of the smallest memory",
    "balanced": "acceptable policy with the best balance of speed and memory",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something was decided.

    Attributes:
        code: a key of :data:`SENTENCES`.
        data: what the sentence is made of; fractions, ratios and bytes, and other reasons.
    """

    code: str
    data: Document = field(default_factory=dict)

    def __str__(self) -> str:
        return SENTENCES[self.code](**self.data)

    def to_json(self) -> Document:
        """Return the code beside its data."""
        plain = {name: value.to_json() if isinstance(value, Reason) else value for name, value in self.data.items()}
        return {"code": self.code} | plain

    @classmethod
    def from_json(cls, document: Document) -> Reason:
        """Rebuild from :meth:`to_json`."""
        data = {key: value for key, value in document.items() if key != "code"}
        coded = {key: value for key, value in data.items() if isinstance(value, dict) and "code" in value}
        nested = {key: cls.from_json(value) for key, value in coded.items()}
        return cls(str(document["code"]), data | nested)


def statements(reasons: Sequence[Reason]) -> list[str]:
    """Return the verdict of a decision in one line, then its caveats, a line each; at least one, maybe empty."""
    lines: list[str] = []
    for reason in reasons:
        cut = reason.data["what"] if reason.code == "cut_short" else []
        lines += [f"cut short: {what}" for what in cut] or [str(reason).strip(" .")]
    return lines or [""]


def sentence(reasons: Sequence[Reason]) -> str:
    """Return the reasons of a decision as one text, in their order."""
    first, *others = (str(reason).strip(" .") for reason in reasons) if reasons else [""]
    return first + "".join(f"{'. ' if text[:1].isupper() else '; '}{text}" for text in others)


def _apart(value: float, limit: float, unit: str = "") -> str:
    """Return ``value is beyond limit`` with as many digits as tell them apart."""
    digits = next((d for d in range(2, 6) if f"{value:.{d}g}" != f"{limit:.{d}g}"), 6)
    figures = (f"{float(f'{x:.{digits}g}'):g}{unit}" for x in (value, limit))  # 360, not 3.6e+02
    return " is beyond ".join(figures)


# --- the loss cannot judge -------------------------------------------------------------------------------------------
def _noise_beyond_budget(floor: float, noise_floor_upper: float, budget: float, runs: int = 1, metric: str = "") -> str:
    """Say how far benign rounding moves the loss, and in how many runs: a search says it before and after its seeds."""
    told = [f"{runs} runs"] * (runs > 1)
    told += [f"up to {noise_floor_upper:.3%} at 95 % confidence"] * (floor <= budget)
    up_to = f" ({'; '.join(told)})" if told else ""
    return (
        f"{metric or 'the loss'} cannot judge it, because rounding the weights once to bf16 already moves it by "
        f"{floor:.3%}{up_to}, beyond the budget of {budget:.3%}"
    )


def _divergence_beyond(
    mean: float, upper: float, limit: float, least: float = 0.0, most: float = 0.0, seeds: int = 1, metric: str = ""
) -> str:
    """Say how far a divergence is beyond the budget: no bound is given that a seed of its own lies beyond."""
    spread = (
        f", up to {upper:.3%} at 95 % confidence,"
        if upper >= most
        else f" ({least:.3%} to {most:.3%} of {seeds} seeds)" + ("," if metric else "")
    )
    return f"{gap_text(mean, metric)}{spread} {'which ' if metric else ''}is beyond {limit:.3%}"


def _loss_flat(cause: str = "", metric: str = "") -> str:
    known = f": {cause}" if cause else " (a learning-rate warm-up, or too few steps: raise --steps)"
    if metric:
        return f"{metric} proves nothing, because over these steps it hardly tells training from none{known}"
    return f"the loss proves nothing, because the script's own does not fall over the steps that were compared{known}"


def _judged_by_gradient(loss: Reason, error: float, limit: float, ratio: float | None = None) -> str:
    text = f"{loss}; its gradient error of {100 * error:.3g} % is within {100 * limit:.3g} %"
    return text + (f", and its gaps are {ratio:.1f} times those of such benign changes" if ratio is not None else "")


# --- a policy is not acceptable --------------------------------------------------------------------------------------
def _gradient_beyond(error: float, limit: float, noise: float | None = None) -> str:
    text = f"gradient error {_apart(100 * error, 100 * limit, ' %')} of the gradient"
    return f"{text} ({_apart(error / noise, limit / noise)} of its noise)" if noise else text


def _tied(noise: float, also: Reason | None = None, timed: bool = False) -> str:
    text = f"it is faster by no more than {noise_text(noise)}"
    if timed:
        text = "timed beside the script it is not surely faster"
    return f"{also}; {text}" if also is not None else f"{text}, and adds no smaller error"


def _under_variant(chosen: Document, adopted: Document) -> str:
    """Say with which arguments the answer was found, and what gains are over; both are rows of variants, or empty."""
    give = f"give the script {adopted['arguments']}" if adopted else "give the script no further arguments"
    if not chosen:
        return f"{give}: what is adopted was fastest under this variant ({adopted['name']})"
    over = f"{speed_text(chosen['speedup'], chosen['low'], chosen['high'])} over the script as it was given"
    if adopted == chosen:
        what = f"the search was of the script under this variant ({chosen['name']}), which is {over}"
        return f"{give}: {what}; gains are over the script under it"
    return f"{give}: what is adopted was fastest so; gains are over the script under {chosen['name']}, which is {over}"


# --- the verdict -----------------------------------------------------------------------------------------------------
def _none_acceptable(first: str = "", why: Reason | None = None, more: int = 0) -> str:
    # under too few seeds is not "not acceptable": nobody knows yet
    early = why is not None and why.code == "few_seeds"
    text = "no policy has been measured enough to be accepted" if early else "no policy that was measured is acceptable"
    text += f": {first}: {why}" if first else ""
    return text + (f"; nor {'the other' if more == 1 else f'any of the {more} others'}" if more else "")


def _compiled_apart(
    compiled: Sequence[float | None], precision: float, low: float | None = None, high: float | None = None
) -> str:
    alone, least, most = (*compiled, None, None)[:3]
    more = speed_text(precision, low, high)
    return f"compiling the blocks gives {speed_text(alone or 1.0, least, most)}, the precision {more} over that"


def _by_parts(parts: Sequence[tuple[str, float, float, float]]) -> str:
    told = (f"{speed_text(*speed)} by {name.replace('_', ' ')}" for name, *speed in parts)
    return f"each part beside the policy without it: {', '.join(told)}"


def _only_blocks(
    name: str, speedup: float, low: float | None = None, high: float | None = None, reference: str = "script"
) -> str:
    speed, over = speed_text(speedup, low, high), over_what(reference)
    return f"{name} is {speed} over {over} by the times of compiled blocks; the whole model was not timed under it"


def _adopted(
    name: str,
    objective: str,
    speedup: float,
    divergence: float,
    budget: float,
    sixteen_bit: float | None,
    caveat: Reason | None,
    merit: float,
    tied: int,
    low: float | None = None,
    high: float | None = None,
    so_far: bool = False,
    over_16bit: Sequence[float] | None = None,
    untimed: bool = False,
    unproved: bool = False,
    reference: str = "script",
    metric: str = "",
    excess: float | None = None,
) -> str:
    gain, base = speed_text(speedup, low, high), over_what(reference, AS_WRITTEN)
    if sixteen_bit:
        over = speed_text(speedup / sixteen_bit, *(over_16bit or ()))
        gain = f"{over} over 16-bit ({gain} over {base})"
        if f"{speedup / sixteen_bit:.2f}" == "1.00":  # bf16 for a script in fp32: a gain of 1.00x is not why to adopt
            gain = f"{speed_text(speedup, low, high)} over {base}, and as fast as the best 16-bit run"
    elif reference != "script":
        gain += f" over {base}"
    gain += f" by its own trials, not timed beside {over_what(reference)}" if untimed else ""
    text = f"{name} {'would be' if unproved else 'is'} the {_BEST[objective]}{' so far' if so_far else ''}: {gain}, "
    fell = excess is not None and excess < 0
    text += f"{metric} fell by {-excess:.1%}" if fell and excess else gap_text(divergence, metric)
    text += f"; {caveat}" if caveat is not None else "" if fell else f" within {budget:.3%}"
    text += f", merit {merit:.2f}" if objective != "throughput" else ""
    least = "gradient error" if excess is None else metric
    return text + (f"; of {tied} that cannot be told apart in speed it has the smallest {least}" if tied > 1 else "")


def _no_gain(
    name: str,
    merit: float,
    noise: float,
    low: float | None = None,
    high: float | None = None,
    slowest: float | None = None,
    reference: str = "script",
) -> str:
    """Say how little a policy gains: timed beside the script, or as far as the noise of its own runs allows."""
    best, base = f"the best acceptable policy ({name})", over_what(reference, AS_WRITTEN)
    if low is not None and high is not None:
        sure = "" if high < 1.01 else "surely "
        return f"{best} is not {sure}faster than {base}, timed beside it: {speed_text(merit, low, high)}"
    if slowest is not None:
        over = over_what(reference)
        return f"{best} gains {merit - 1.0:+.1%}, but one of its runs is not faster than {over}: {slowest:.2f}x"
    if merit < 1.0 - noise:
        return f"{best} is not better than {base}: {merit:.2f}x"
    if noise < LEAST_NOISE:
        return f"{best} changes nothing that counts: {merit - 1.0:+.2%} modelled"
    if merit < 1.0:
        return f"{best} is not better than {base}: {merit:.2f}x, which is within {noise_text(noise)}"
    return f"{best} gains {merit - 1.0:+.1%}, which is within {noise_text(noise)}"


def _faster_not_taken(name: str, speedup: float, why: Reason, more: int, reference: str = "script") -> str:
    others = f" (nor is {'another one' if more == 1 else f'any of {more} others'}: see the notes)" if more else ""
    over = f"{speed_text(speedup)} over {over_what(reference)}"
    return f"{name} came out faster ({over}), but is not taken: {why}{others}"


def _over_preset(
    name: str,
    gain: float,
    measured: bool,
    noise: float = 0.0,
    low: float | None = None,
    high: float | None = None,
    itself: bool = False,
    by_trials: bool = False,
) -> str:
    if itself:
        return f"a preset is enough here: {name}"
    doubt = ", by its trials" if by_trials else "" if measured else ", which was not run: predicted"
    text = f"{f'about {gain:.0%}' if by_trials else f'{gain:.1%}'} over the best preset ({name}{doubt})"
    enough = measured and gain < ENOUGH
    if low is not None and high is not None:
        text, enough = f"{text}, timed beside it: {speed_text(1 + gain, low, high)}", low <= 1.0
    elif measured and ENOUGH <= gain <= noise:
        text, enough = f"{text}, within {noise_text(noise)}", True
    return f"{text}: a preset is enough here" if enough else text


def _holds(
    divergence: float, limit: float, caveat: Reason | None, speedup: float | None = None, metric: str = ""
) -> str:
    text = gap_text(divergence, metric) + (f"; {caveat}" if caveat is not None else f" within {limit:.3%}")
    if speedup is None:
        return f"{text}; speed not judged: step times here say nothing of the policy's target"
    return f"{speedup:.2f}x at {text}"


def _unsound_reference(
    faults: Sequence[dict[str, str]],
    still: bool,
    reference: str,
    fp32: bool = False,
    short: bool = False,
    unmended: bool = False,
) -> str:
    """Say that what everything was compared with is at fault: first of all that, then how to go on."""
    what = [*map(fault_text, faults), *(["its loss is the same number at every step"] if still else [])]
    name = over_what(reference, AS_WRITTEN)
    if short:
        where = "; ".join(_places(faults) or what)
        return f"The reference is at fault, so no policy can be adopted by comparison with {name}: {where}"
    mend = "" if not faults else f"; to mend it: {faults[0]['fix']}"
    mend += "; nothing that a policy changes was found to mend it" if unmended else ""
    out = "; --reference fp32 compares with a run in fp32, whose own step shows no such fault" if fp32 else ""
    return (
        f'The reference is at fault, so no comparison with {name} is evidence, neither "stay" nor a divergence of 0: '
        f"{_first_two(what, _places(faults))}{mend}{out}"
    )


def _doubtful_reference(faults: Sequence[dict[str, str]]) -> str:
    return f"The script's own precision is in doubt: {_first_two([*map(fault_text, faults)], _places(faults))}"


def _mended(
    settings: Mapping[str, str],
    cures: Sequence[str],
    left: Sequence[str],
    name: str,
    reference: str,
    step_ms: float,
    reference_ms: float,
    memory: float,
    source: str,
    divergence: float | None = None,
    metric: str = "",
) -> str:
    """Say what a policy mends, and at which price; a gap to a faulty reference is not held against it."""
    rest = f"; it leaves {' and '.join(left)}" if left else ""
    more = memory_text(abs(memory)) + (" more" if memory >= 0 else " less")
    other = "as written" if reference == "script" else f"in {over_what(reference, AS_WRITTEN)}"
    text = (
        f"A policy with {_policy_text(settings)} ('{name}') mends {' and '.join(cures)}, as a step judged under it "
        f"shows{rest}. A step then takes {step_ms:.3g} ms, {reference_ms:.3g} ms {other} ({source}), and {more} memory "
        "(modelled)"
    )
    if divergence is None:
        return text
    whose = "the script" if reference == "script" else over_what(reference, AS_WRITTEN)
    what = f"its {metric} is {divergence:.3%} from that" if metric else f"its losses are {divergence:.3%} from those"
    gap = f"that {what} of {whose}, which is at fault, says nothing against it"
    return f"{text}; {gap}"


def _policy_text(settings: Mapping[str, str]) -> str:
    """Return parameters of a study as a policy has them."""
    stored = [f"{name.partition('.')[2]}: {value}" for name, value in settings.items() if "." in name]
    wide = [f"{name}: {value}" for name, value in settings.items() if "." not in name and name != "activations"]
    lines = [f"optimizer: {{{', '.join(stored)}}}"] if stored else []
    if activations := settings.get("activations"):
        lines += [f"activations: {activations}", *([f"operators: {{{', '.join(wide)}}}"] if wide else [])]
        lines += ["loss_scaling: dynamic"] if activations == "fp16" else []
    return ", ".join(f"`{line}`" for line in lines)


def fault_text(row: Mapping[str, str]) -> str:
    """Return what a fault of the script's own precision is, and where."""
    return f"{row['place']}: {row['message']} [{row['code']}]".removeprefix(": ")


def _places(faults: Sequence[Mapping[str, str]]) -> list[str]:
    return [f"{row['place']} [{row['code']}]".strip() for row in faults]


def _first_two(what: Sequence[str], places: Sequence[str]) -> str:
    """Return the first two as they are, and of the others that are faults the places and codes."""
    others = [*places[2:], *what[max(2, len(places)) :]]
    return "; ".join(what[:2]) + (f" (and {'; '.join(others)}: `autoprec check` says more)" if others else "")


def unmoved(layers: Sequence[str]) -> str:
    """Return what it means that these layers' weights have hardly any gradient yet."""
    first = layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more"
    return (
        f"{first}: hardly any gradient reaches the weights yet, as behind projections that begin at zero, so what "
        "precision costs there later is not known"
    )


#: Codes of reasons, and the sentence of each from its data.
SENTENCES: dict[str, Callable[..., str]] = {
    # why the loss cannot judge, and what did
    "noise_beyond_budget": _noise_beyond_budget,
    "loss_flat": _loss_flat,
    "judged_by_gradient": _judged_by_gradient,
    # why a policy is not acceptable, or not taken
    "incomplete": lambda: "it was not measured to the end in every seed",
    "divergence": _divergence_beyond,
    "beyond_rounding": lambda mean, ratio, metric="": (
        f"{gap_text(mean, metric)}{', which' if metric else ''} is {ratio:.1f} times that of rounding the weights once "
        "to bf16"
    ),
    "worse_loss": lambda excess, limit, metric="": (
        f"its {metric or 'loss'} is {excess:.3%} {'worse' if metric else 'higher'} than under benign changes, surely "
        f"more than {limit:.3%}"
    ),
    "gradient_unknown": lambda loss: f"{loss}, and its gradient error is unknown",
    "gradient_error": _gradient_beyond,
    "memory_bytes": lambda memory, limit: f"memory {memory_text(memory)} is beyond {memory_text(limit)}",
    "few_seeds": lambda seeds, needed: f"it was measured under {seeds} of the {needed} paired seeds that it takes",
    "tied": _tied,
    # why the answer is what it is
    "none_acceptable": _none_acceptable,
    "no_gain": _no_gain,
    "adopted": _adopted,
    "compiled_apart": _compiled_apart,
    "by_parts": _by_parts,
    "only_blocks": _only_blocks,
    "faster_not_taken": _faster_not_taken,
    "under_variant": _under_variant,
    "over_preset": _over_preset,
    "taken_back": lambda groups, error, saving: (
        f"{', '.join(groups[:3])}{f' and {len(groups) - 3} more' if len(groups) > 3 else ''} kept in more precision, "
        f"which costs less than {saving:.1%} of a step and takes away {error:.0%} of the error"
    ),
    # what a verification found
    "holds": _holds,
    "failed": lambda runs, first: f"the policy failed in {runs} runs, first: {first}",
    "too_few_seeds": lambda why: f"{why}; so few seeds cannot tell that from chance: more --seeds can",
    "slower_than_script": lambda speedup: (
        f"it is slower than the script as written: {speedup:.2f}x, and saves no memory"
    ),
    "preset_faster": lambda name, speedup, own: f"preset '{name}' is faster ({speedup:.2f}x against {own:.2f}x)",
    # why a search has no answer, or a narrower one
    "none_measured": lambda first="", more=0: (
        "no policy that was tried could be measured"
        + (f": {first}" if first else "")
        + (f"; nor {'the other' if more == 1 else f'any of the {more} others'}" if more else "")
    ),
    "cost_model": lambda text: text,
    "unsound_reference": _unsound_reference,
    "doubtful_reference": _doubtful_reference,
    "mended": _mended,
    "interrupted": lambda: "interrupted before the search had ended",
    "cut_short": lambda what: f"cut short: {'; '.join(what)}",
    "only_sixteen_bit": lambda bound, cause: (
        f"Only 16 bit was tried: by the cost model nothing else gains more than {bound:.2f}x over that: {cause}"
    ),
    "does_not_fit": lambda text: text,
}
