"""Whether what was seen of a script's own precision is a fault: thresholds, and figures as people read them.

An ``error`` is training that is not what the script says: updates that do not arrive, positions that are one, a
sum that is a hundredth off. Where a figure is that of ordinary 16-bit rounding nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from autoprec.graph.census import Observation
from autoprec.support.units import counted

#: A severity, empty for no finding, and the words that figures are told in.
Assessed = tuple[str, dict[str, Any]]

#: Share of an update that has to arrive, and of weights that may stay.
_ARRIVES, _STAYS = 0.5, 0.25
#: Relative errors of a sum and of a loss from which on they are wrong, and from which on they are worth a word.
_SUM, _SUM_SEEN, _LOSS, _LOSS_SEEN, _GRADIENT = 0.01, 0.003, 0.005, 0.001, 0.02
#: What one or two roundings to bfloat16 cost the gradient behind a loss that is itself computed in FP32.
_ROUNDED = 0.005
#: Relative errors from which on a norm or softmax by hand, and a sum without one, is an error and not a warning.
_HAND, _REDUCTION = 0.05, 0.5
#: Share of the weights that a decay leaves as they are, from which on there is no decay.
_KEPT = 0.9
#: Share of tokens that go elsewhere.
_ROUTED, _ROUTED_SEEN, _FEWEST_TOKENS = 0.05, 0.0, 16


def assess(seen: Observation) -> Assessed:
    """Return how bad an observation is, and the words of its figures; an empty severity where it is not a fault."""
    judge = _JUDGES.get(seen.code)
    if judge is None:
        return "", {}
    severity = judge(seen.figures)
    words = {name: _word(name, value) for name, value in seen.figures.items()}
    words |= {
        "operator": bare(seen.operator),
        "module": seen.module or "the script",
        "table": seen.figures.get("table", ""),
    }
    return severity, words | _more(seen)


def bare(operator: str) -> str:
    """Return an operator's name as a script says it: ``log_softmax`` of ``aten::_log_softmax``."""
    return operator.rpartition("::")[2].strip("_").removesuffix("_forward")


def _word(name: str, value: Any) -> Any:
    if value is None:
        return "an unknown part"
    if name in _SHARES and isinstance(value, (int, float)):
        return _percent(float(value))
    if isinstance(value, float):
        if name == "scale":
            return f"{value:.12g}"
        if name == "factor":
            return f"{value:.7g}"
        return f"{value:g}" if name in ("beta", "rate", "eps") else f"{value:.2g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value


_SHARES = frozenset(
    ("unchanged", "arrives", "kept", "error", "gradient", "changed", "ties", "flushed", "share", "wave_error")
)


def _percent(value: float) -> str:
    if not math.isfinite(value):
        return "an unknown part"
    if value >= 10:
        return "more than 1,000 %"
    return f"{value:.0%}" if value >= 0.9995 or value == 0 else f"{100 * value:.3g} %"


#: The number from which on adding 1 changes nothing, by dtype.
_COUNTS = {"bf16": 256, "fp16": 2048}
#: What is written out by hand, by the pattern it is recognised by, as people call it.
_BY_HAND = {"rms norm": "an RMSNorm", "layer norm": "a LayerNorm", "l2 norm": "an L2 norm"}


def _more(seen: Observation) -> dict[str, Any]:
    figures = seen.figures
    if seen.code == "positions-16bit":
        error = figures.get("wave_error", 0.0)
        wave = f"; the sines made of them are {_percent(error)} off" if error > 0.01 else ""
        lines, more = figures.get("derived", 0), figures.get("tables", 1) - 1
        alike = f"; {counted(more, 'more table')} alike" if more else ""
        return {"wave": wave + (f"; {_follow(lines)}" if lines else "") + alike}
    if seen.code == "updates-lost":
        by = seen.figures["rate"] > 0
        mended = "; or a policy's `optimizer: {weights: bf16_stochastic}` or `bf16_kahan`" if by else ""
        return {"at": f"at a learning rate of {figures['rate']:g} " if by else "", "policy": mended}
    if seen.code == "noise-16bit":
        if figures.get("moved"):
            part = f"{_percent(figures['moved'])} of the probability goes to other outcomes than in fp32"
            return {"made": f"a random number is looked up in a cumulative sum, one of them in {figures['to']}: {part}"}
        endless = f"{_percent(figures['infinite'])} of what is made of them is infinite, and would not be in fp32"
        short = f"{figures['tail']:.2g} standard deviations"
        cut = f"the tail of what is made of them is cut off, in one of a thousand by {short}"
        drawn = f"uniform random numbers are drawn in {figures['to']}"
        return {"made": f"{drawn}: {endless if figures['infinite'] else cut}"}
    if seen.code == "angles-16bit":
        source = (
            f"the frequencies ({figures['table']}) are {figures['to']}"
            if figures.get("table")
            else "they are computed in 16 bits"
        )
        return {"source": source}
    if seen.code == "loss-16bit":
        return {"over": f" over {figures['classes']:,} classes" if figures.get("classes", 1) > 1 else ""}
    if seen.code == "statistics-16bit":
        stay = figures["unchanged"]
        moved = f"; {_percent(stay)} of them stay as they are where they should have moved"
        early = f", which rounds each of their moves; a count stands still at {_COUNTS[figures['to']]:,}"
        return {"stay": moved if stay >= 0.005 else early}
    if seen.code == "reduction-16bit":
        return {"behind": ", in the backward of this line," if figures.get("backward") else ""}
    if seen.code in ("norm-16bit", "softmax-16bit"):
        return {"what": _BY_HAND.get(figures["what"], f"a {figures['what']}")}
    if seen.code == "scaler-fixed":
        skipped = figures["skipped"]
        return {"why": f"{skipped} updates in a row were skipped at it" if skipped else "no `update()` adapts it"}
    if seen.code == "fp16-unscaled":
        flushed = figures.get("flushed", 0.0)
        return {"measured": f" (up to {_percent(flushed)} of a gradient here)" if flushed else ""}
    return {}


def _follow(lines: int) -> str:
    return f"what {lines} other lines make of them follows" if lines > 1 else "what another line makes of them follows"


def _updates(figures: Mapping[str, Any]) -> str:
    arrives = figures.get("arrives")
    if figures.get("compensated") or arrives is None or not math.isfinite(arrives):
        return ""
    stays = float(figures["at_peak"] if _is_early(figures) else figures["unchanged"])
    if stays > 0.5 and (arrives < _ARRIVES or _is_early(figures)):
        return "error"
    return "warning" if stays > _STAYS else ""


def _decay(figures: Mapping[str, Any]) -> str:
    arrives = figures.get("arrives")
    if _updates(figures) or figures.get("compensated") or arrives is None or not arrives >= _ARRIVES:
        return ""
    return "error" if figures["kept"] >= _KEPT else ""


def _is_early(figures: Mapping[str, Any]) -> bool:
    """Say whether the schedule will raise the learning rate: then what it loses at its largest counts."""
    return bool(figures.get("rising"))


def _rate(figures: Mapping[str, Any]) -> str:
    if figures.get("rising"):
        return ""
    return "error" if figures["unchanged"] > 0.95 else "warning" if figures["unchanged"] > 0.5 else ""


def _sum(figures: Mapping[str, Any]) -> str:
    if figures["error"] >= _SUM and not figures.get("logged"):
        return "error"
    return "warning" if figures["error"] >= _SUM_SEEN else ""


def _loss(figures: Mapping[str, Any]) -> str:
    least = _ROUNDED if figures["to"] == "rounded fp32" else _LOSS_SEEN
    if figures["error"] < _LOSS_SEEN and figures["gradient"] < least:
        return ""
    wrong = figures["error"] >= _LOSS or figures["gradient"] >= _GRADIENT
    return "error" if wrong and not figures.get("autocast") else "warning"


def _router(figures: Mapping[str, Any]) -> str:
    if figures["changed"] >= _ROUTED and figures["tokens"] >= _FEWEST_TOKENS and not figures.get("autocast"):
        return "error"
    return "warning" if figures["changed"] > _ROUTED_SEEN else ""


def _by(name: str, error: float, warning: float) -> Callable[[Mapping[str, Any]], str]:
    return lambda figures: "error" if figures[name] >= error else "warning" if figures[name] >= warning else ""


def _always(severity: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda _: severity


def _kept_module(figures: Mapping[str, Any]) -> str:
    """transformers keeps ``_keep_in_fp32_modules`` in FP32 under fp16 alone, the strict ones always."""
    return "error" if figures["to"] == "fp16" or figures["asked"].endswith("_strict") else "note"


#: Share of the probability that goes to other outcomes, from which on what is drawn is another distribution.
_DRAWS = 0.1
#: How bad each observation is: of a figure, an error from the first share on and a warning from the second.
_JUDGES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "updates-lost": _updates,
    "decay-lost": _decay,
    "rate-below-half-ulp": _rate,
    "moment-16bit": _by("kept", 0.5, 0.1),
    "ema-16bit": _by("unchanged", 0.5, 0.05),
    "accumulator-16bit": _sum,
    "statistics-16bit": _by("unchanged", 0.5, 0.0),
    "positions-16bit": _always("error"),
    # a table whose frequencies were cast with the model is off at its last positions alone: models are shipped so
    "angles-16bit": lambda seen: (
        "error" if not seen["table"] and seen["angle"] >= 0.5 and seen["error"] >= 0.1 else "warning"
    ),
    "loss-16bit": _loss,
    "router-16bit": _router,
    "norm-16bit": _by("error", _HAND, 0.0),
    "softmax-16bit": _by("error", _HAND, 0.0),
    "reduction-16bit": lambda figures: "error" if figures["error"] >= _REDUCTION and figures["trained"] else "warning",
    "noise-16bit": lambda figures: "error" if figures["infinite"] or figures.get("moved", 0.0) >= _DRAWS else "warning",
    "eps-zero": _always("error"),
    "overflow-16bit": lambda figures: "warning" if figures.get("logged") else "error",
    "fp16-unscaled": _always("error"),
    "clip-before-unscale": _always("error"),
    "step-before-unscale": _always("error"),
    "scaler-bf16": _always("warning"),
    "scaler-fixed": lambda figures: "error" if figures["skipped"] else "warning",
    "stale-casts": _always("error"),
    "function-backward": _always("error"),
    "recurrent-fp32": _always("note"),
    "wide-part": _always("note"),
    "gradients-reduced-16bit": _always("warning"),
    "kept-module-cast": _kept_module,
}
#: Codes of what a step shows of the script's own precision.
CODES = tuple(_JUDGES)
