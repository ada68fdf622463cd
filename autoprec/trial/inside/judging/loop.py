"""What a script's loop does around forward and backward: updates, optimizer state, EMA, clipping, scaling, autocast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from autoprec.graph.census import Held, Observation
from autoprec.graph.report import Operator
from autoprec.graph.saved import address_of
from autoprec.graph.trace import bare_name
from autoprec.trial.inside.judging.by_hand import Decay, UpdateRecorder, lost_decays
from autoprec.trial.inside.judging.forward import LOW, Step
from autoprec.trial.inside.judging.held import BY_HAND, Update, lost_epsilon, moments
from autoprec.trial.inside.judging.lines.updating import lost_epsilons, updating

_NORMS = (
    "linalg_vector_norm",
    "_foreach_norm",
    "norm",
    "clamp",
    "clamp_min",
    "_foreach_clamp_min",
    "_foreach_clamp_max",
)
_UNSCALES = "_amp_foreach_non_finite_check_and_unscale"


@dataclass(frozen=True)
class Loop:
    """What was seen around a step.

    Attributes:
        optimizers: with the lines that made them.
        casts: ``file:line`` and dtype of casts of modules.
        update: the record of what ran between the gradients and the next forward; None where that was not seen.
        updates: what became of the weights' updates.
        trained: storages of weights and of their optimizers' state.
        weights: storages of weights alone.
        scaler: the line that scaled the loss with a GradScaler that is on; empty where none did.
        stale: the line of an update inside an autocast whose casts the next forward goes on to use; empty for none.
        bare: the line of an optimizer's own step after a loss that a GradScaler scaled; empty for none.
        stepping: first and last call of each optimizer's step in that record.
        reduced: tensors that ranks reduced in 16 bits: line or hook, and dtype.
        skipped: the loss scale of each update that a GradScaler skipped, in order.
        fixed: an update was taken, and the next forward began without ``GradScaler.update``.
        by_hand: the line that updates the weights where no optimizer does; empty where one does.
        assigned: what weights are after the update in its record, -1 for what was not seen.
    """

    optimizers: list[tuple[Optimizer, str]] = field(default_factory=list)
    casts: tuple[tuple[str, str], ...] = ()
    update: UpdateRecorder | None = None
    updates: list[Update] = field(default_factory=list)
    trained: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    scaler: str = ""
    stale: str = ""
    bare: str = ""
    stepping: tuple[tuple[int, int], ...] = ()
    reduced: tuple[tuple[str, str], ...] = ()
    skipped: tuple[float, ...] = ()
    fixed: bool = False
    by_hand: str = ""
    assigned: tuple[int, ...] = ()

    def updates_at(self, update: Update) -> tuple[str, str]:
        """Return what updates weights, and its line."""
        if update.optimizer == BY_HAND:
            return "the script", self.by_hand
        optimizer, where = self.optimizers[update.optimizer]
        return type(optimizer).__name__, where

    @cached_property
    def decays(self) -> list[Decay]:
        """The decays of weights by lines of the script's, or of an optimizer of its own."""
        return [] if self.update is None else list(lost_decays(self.update, self.written))

    @cached_property
    def written(self) -> set[int]:
        """The calls that what was written into the weights is made of, by index, and those that wrote."""
        if self.update is None:
            return set()
        trace, writes = self.update.trace, self.update.writes
        made = trace.made_of(value for call in writes for value in call.ins) | trace.made_of(self.assigned)
        return made | {call.index for call in writes}

    def cast(self, dtype: str) -> str:
        """Return the line that cast a module to a dtype last; empty where none did."""
        return next((where for where, to in reversed(self.casts) if to == dtype), "")


def seen(loop: Loop, step: Step, census: list[Held]) -> list[Observation]:
    """Return everything that the loop was seen to lose.

    Args:
        loop: what was seen around the step.
        step: its forward and backward.
        census: what the step holds.
    """
    found = [*_updates(loop), *_moments(loop), *_epsilons(loop), *_copies(loop)]
    if loop.update is not None and not loop.optimizers:
        found += updating(loop.update, loop.written)
    elif loop.update is not None and all(one.code != "eps-zero" for one in found):
        found += lost_epsilons(loop.update)
    scaled = list(_unscaled_step(loop, step))
    return [
        *found,
        *_clipping(step),
        *scaled,
        *_scaling(loop, step, fixed=loop.fixed and not scaled),
        *_stale(loop),
        *_reduced(loop),
        *_kept(loop, census),
    ]


def _updates(loop: Loop) -> Iterator[Observation]:
    for one in loop.updates:
        name, where = loop.updates_at(one)
        figures: dict[str, Any] = {
            "unchanged": one.unchanged,
            "at_peak": one.at_peak,
            "arrives": one.arrives,
            "half_ulp": one.half_ulp,
            "update": one.update,
            "rate": one.rate,
            "elements": one.elements,
            "tensors": len(one.tensors),
            "optimizer": name,
            "to": one.dtype,
            "compensated": one.compensated,
            "rising": one.peak > one.rate * 1.01,
        }
        low = one.dtype in LOW
        cast = loop.cast(one.dtype)
        code = "updates-lost" if low else "rate-below-half-ulp"
        also = (where,) if low and cast and where else ()
        module = one.tensors[0] if len(one.tensors) == 1 else ""
        yield Observation(code, cast if low and cast else where, name, module, (one.dtype,), figures, also)
        yield from _decays_of_weights(loop, one, figures, tuple(filter(None, (cast,))))


def _decays_of_weights(
    loop: Loop, update: Update, figures: dict[str, Any], also: tuple[str, ...]
) -> Iterator[Observation]:
    """Products of weights with a factor just below 1 that return them as they were."""
    name, where = loop.updates_at(update)
    known = update.dtype in LOW and loop.update is not None
    rows = [one for one in loop.decays if one.dtype == update.dtype] if known else []
    for one in rows:
        words = {"factor": one.factor, "kept": one.kept, "elements": one.elements}
        yield Observation("decay-lost", one.call.where, one.call.op, "", (one.dtype,), figures | words, also)
    if known and not rows and update.decay != 1.0:
        words = {"factor": update.decay, "kept": update.kept}
        yield Observation(
            "decay-lost",
            *((also[0], name) if also else (where, name)),
            "",
            (update.dtype,),
            figures | words,
            (where,) if also else (),
        )


def _moments(loop: Loop) -> Iterator[Observation]:
    told = set[str]()
    for optimizer, where in loop.optimizers:
        for row in moments(optimizer):
            told.add(row["name"])
            figures = {**row, "optimizer": type(optimizer).__name__, "to": row["dtype"]}
            del figures["dtype"]
            yield Observation(
                "moment-16bit",
                where,
                type(optimizer).__name__,
                "",
                (row["dtype"],),
                figures,
                tuple(filter(None, (loop.cast(row["dtype"]),))),
            )
    yield from _decays(loop, told)


def _decays(loop: Loop, told: set[str]) -> Iterator[Observation]:
    """What an optimizer of the script's own multiplies by a factor just below 1, of any shape, in 16 bits."""
    recorder = loop.update
    names = {
        address_of(value): (name, type(optimizer).__name__)
        for optimizer, _ in loop.optimizers
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and name not in told
    }
    lines: dict[str, Observation] = {}
    if recorder is None:
        return
    for index, measure in recorder.measures.items() if names else ():
        call, kept = recorder.trace.calls[index], measure.figures.get("kept", 0.0)
        to = recorder.trace.values[call.ins[0]] if call.ins and call.op.endswith("_") else None
        known = lines[call.where].figures["kept"] if call.where in lines else 0.0
        if to is None or to.storage not in names or kept <= known:
            continue
        name, optimizer = names[to.storage]
        figures = {"name": name, "optimizer": optimizer, "beta": measure.figures["factor"], "kept": kept}
        lines[call.where] = Observation(
            "moment-16bit", call.where, optimizer, "", (to.dtype,), figures | {"to": to.dtype, "tensors": 1}
        )
    yield from lines.values()


def _epsilons(loop: Loop) -> Iterator[Observation]:
    for optimizer, where in loop.optimizers:
        eps, dtype = lost_epsilon(optimizer)
        if eps:
            what = type(optimizer).__name__
            yield Observation(
                "eps-zero",
                where,
                what,
                "",
                (dtype,),
                {"eps": eps, "to": dtype, "what": what},
                tuple(filter(None, (loop.cast(dtype),))),
            )


def _copies(loop: Loop) -> Iterator[Observation]:
    """Moving averages of the weights, and other sums that are kept between steps, in 16 bits."""
    recorder = loop.update
    if recorder is None:
        return
    lines: dict[str, list[tuple[str, float, float, str]]] = {}
    for index, measure in recorder.measures.items():
        call = recorder.trace.calls[index]
        values = [recorder.trace.values[one] for one in call.ins]
        low = next((value.dtype for value in values if value.dtype in LOW), "")
        mine = bool(values) and values[0].storage in loop.trained
        kept = measure.figures.get("kept", 0.0)
        kept_there = bool(values) and values[0].storage in recorder.outside
        inside = any(first <= index < last for first, last in loop.stepping)
        if not low or mine or inside or not kept_there or not call.where or (measure.unchanged is None and not kept):
            continue
        lines.setdefault(call.where, []).append((call.op, max(measure.unchanged or 0.0, kept), measure.error, low))
    for where, several in lines.items():
        op, unchanged, _, low = max(several, key=lambda row: row[1])
        error = max(row[2] for row in several)
        yield Observation("ema-16bit", where, op, "", (low,), {"unchanged": unchanged, "error": error, "to": low})


def _clipping(step: Step) -> Iterator[Observation]:
    """Gradients that are measured or clipped while they are still multiplied by the loss scale."""
    calls = step.calls
    unscaled = next((call.index for call in calls if bare_name(call.op) == _UNSCALES), None)
    if unscaled is None or not step.scaled:
        return
    for call in calls[:unscaled]:
        if call.phase == "update" and call.name in _NORMS:
            operator: Operator = step.report.operators[call.index]
            yield Observation(
                "clip-before-unscale", call.where, operator.op, "", operator.dtypes[:1], {"scale": step.scale}
            )
            return


def _unscaled_step(loop: Loop, step: Step) -> Iterator[Observation]:
    """An optimizer that the script steps itself, with gradients that nobody has divided by the loss scale."""
    if not loop.bare or step.scale == 1.0:
        return
    trace, clips = step.recorder.trace, False
    for call in step.calls:
        if call.phase != "update":
            continue
        clips = clips or call.name in _NORMS  # the coefficient of clipping is no loss scale
        numbers = any(isinstance(one, (int, float)) for one in call.args)
        divides = call.name.removeprefix("_foreach_") in ("mul", "div") and (numbers or not clips)
        if bare_name(call.op) == _UNSCALES or (divides and any(trace.values[one].shape for one in call.ins)):
            return
    dtypes = tuple({"fp16", "bf16"} & {d for o in step.report.operators for d in o.dtypes})
    yield Observation("step-before-unscale", loop.bare, "GradScaler", "", dtypes, {"scale": step.scale}, (loop.scaler,))


def _scaling(loop: Loop, step: Step, *, fixed: bool) -> Iterator[Observation]:
    if not loop.scaler:
        return
    dtypes = {d for o in step.report.operators if o.cls in ("gemm", "conv", "attention") for d in o.dtypes}
    if "bf16" in dtypes and "fp16" not in dtypes:
        yield Observation("scaler-bf16", loop.scaler, "GradScaler", "", ("bf16",), {"scale": step.scale})
        return
    stays = len(loop.skipped) > 1 and loop.skipped[-1] >= loop.skipped[0]
    if stays or fixed:
        figures = {"scale": step.scale, "skipped": len(loop.skipped) if stays else 0}
        yield Observation("scaler-fixed", loop.scaler, "GradScaler", "", tuple(sorted({"fp16"} & dtypes)), figures)


def _stale(loop: Loop) -> Iterator[Observation]:
    if loop.stale:
        yield Observation("stale-casts", loop.stale, "autocast", "", ("fp32",), {})


def _reduced(loop: Loop) -> Iterator[Observation]:
    for where, dtype in dict.fromkeys(loop.reduced):
        yield Observation("gradients-reduced-16bit", where if ":" in where else "", where, "", (dtype,), {"to": dtype})


def _kept(loop: Loop, census: list[Held]) -> Iterator[Observation]:
    rows = [row for row in census if row.kind == "parameter" and row.dtype in LOW and row.asked.startswith("fp32 by")]
    if rows:
        figures = {
            "tensors": len(rows),
            "to": rows[0].dtype,
            "asked": rows[0].asked.removeprefix("fp32 by "),
            "first": rows[0].name,
        }
        yield Observation("kept-module-cast", loop.cast(rows[0].dtype), "", rows[0].name, (rows[0].dtype,), figures)
