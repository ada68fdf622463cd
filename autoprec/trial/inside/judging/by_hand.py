"""What a script's own code does to its weights between backward and the next forward, without an optimizer of torch's.

Weights that are updated by hand have no learning rate that could be asked for: what reaches them is what their twins,
to which the same lines were applied in FP32, moved by. A part of an update may be lost where the whole arrives: a decay
``p.mul_(1 - lr * wd)`` returns each 16-bit weight as it was. And a script may keep what its weights lose (Kahan's
compensation): that is known by its value, whatever it is called.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.graph.saved import address_of
from autoprec.graph.trace import Call, bare_name, dtype_name
from autoprec.trial.inside.judging.samples import sampled
from autoprec.trial.inside.judging.shadow import ShadowRecorder
from autoprec.trial.inside.observe.loose import UPDATE_CALLS

#: Operators by which a weight is decayed: their result is the weight times a factor just below 1.
_DECAYS = ("mul", "sub", "add", "lerp", "addcmul")
#: Relative error up to which what a weight loses is the same share of each: a decay, and no gradient.
_ALIKE = 0.02
#: Least share by which a weight decays: below that FP32 has no digits to tell one share from another.
LEAST_DECAY = 1e-6
#: What may remain of a lost update that the script is to hold, relative to it.
HOLDS = 0.3
#: Results of one shape that are looked at for what a weight of that shape has lost.
_RECENT = 6


@dataclass(frozen=True, slots=True)
class Decay:
    """A product of weights with a factor just below 1, of which nothing reaches them.

    Attributes:
        call: that computed it.
        dtype: of the weights.
        factor: by which they were to be multiplied.
        kept: share of the weights that are bit for bit what they were.
        elements: of these weights.
    """

    call: Call
    dtype: str
    factor: float
    kept: float
    elements: int


class UpdateRecorder(ShadowRecorder):  # type: ignore[no-untyped-call]
    """Records what runs between the gradients and the next forward.

    Args:
        model: whose weights are updated.

    Attributes:
        writes: calls that wrote into a weight in 16 bits.
        decays: of weights, as they ran.
        weights: storages of the weights before.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._after_backward = True
        self.writes: list[Call] = []
        self.decays: list[Decay] = []
        self._written_to = False
        self.weights = {address_of(p) for p in self.names.parameters.values()}
        self._weights = {address_of(p): p for p in self.names.parameters.values() if p.dtype in self.low}
        self._shapes = {p.shape for p in self._weights.values()}
        self._decaying: list[tuple[Tensor, Tensor]] = []
        self._results: dict[torch.Size, list[tuple[int, Tensor]]] = {}
        self._losses: dict[torch.Size, list[tuple[Tensor, int, Tensor]]] = {}
        self._compensated: set[int] = set()

    @property
    def has_updated(self) -> bool:
        """True where a weight was written into, or is another tensor than before."""
        return self._written_to or any(address_of(p) not in self.weights for p in self.names.root.parameters())

    def end_at(self, first: int) -> None:
        """Forget the calls from one on: they are the next forward's."""
        del self.trace.calls[first:]
        for value in self.trace.values:
            if value.producer >= first:
                value.producer = -1
        self.measures = {index: one for index, one in self.measures.items() if index < first}
        self.writes = [call for call in self.writes if call.index < first]
        self.decays = [one for one in self.decays if one.call.index < first]

    def is_compensated(self, weight: Tensor) -> bool:
        """Say whether the script computed what a weight, of any shape, lost of its update: it means to add it later."""
        return address_of(weight) in self._compensated

    def line_of(self, weights: Collection[Tensor]) -> str:
        """Return the line that updated weights, of any shapes, last; empty where none did."""
        storages = {address_of(weight) for weight in weights}
        for call in reversed(self.writes):
            if call.where and any(self.trace.values[one].storage in storages for one in call.ins):
                return call.where
        made = (self.trace.created(storage) for storage in storages)
        return next((call.where for call in made if call is not None and call.where), "")

    # ---------------------------------------------------------------- as it runs
    def _beside(self, table: dict[int, tuple[Tensor, int]], func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        cast = bare_name(func._schema.name) == "_to_copy" and kwargs.get("dtype") in self.low
        exact = cast and args[0].dtype is torch.float32 and self.twin_of(args[0]) is None
        if exact and not self._is_of_weights(args[0]):
            return None  # master weights that live on lose nothing where they are rounded
        return super()._beside(table, func, args, kwargs)

    def _is_of_weights(self, tensor: Tensor) -> bool:
        """Say whether the script computed a tensor of its 16-bit weights: no FP32 copy of them is behind it."""
        low = self._weights.keys()
        return any(
            self.trace.values[value].storage in low
            for call in self.trace.above(self.value_of(tensor), lambda _: True, UPDATE_CALLS)
            for value in call.ins
        )

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._decaying = []
        name = bare_name(func._schema.name).removeprefix("_foreach_") if hasattr(func, "_schema") else ""
        if name in _DECAYS and args and self._weights:
            for one in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                if isinstance(one, Tensor) and address_of(one) in self._weights and one.numel() > 1:
                    twin = self.twin_of(one)
                    self._decaying.append(
                        (sampled(one).clone(), sampled(one if twin is None else twin).to(torch.float32, copy=True))
                    )
        return super()._run(func, args, kwargs)

    def _after(self, func: Any, before: tuple[Any, ...], out: Any) -> None:
        # of a tensor that is read and written there are two twins, the first of which is written
        twins: dict[int, tuple[Tensor, Tensor]] = {}
        for real, twin, table, _ in self._made:
            if table is self._twins:
                twins.setdefault(id(real), (real, twin))
        made, decaying = list(twins.values()), self._decaying
        super()._after(func, before, out)
        self._decaying = []
        call = self.trace.calls[-1]
        if call.op.endswith("_"):
            self._written_to = self._written_to or any(
                self.trace.values[one].storage in self.weights for one in call.ins
            )
        if not self._weights:
            return
        if decaying and len(made) == len(decaying):
            self._decayed(call, made, decaying)
        for real, twin in made:
            if call.op.endswith("_") and address_of(real) in self._weights:
                self.writes.append(call)
                self._lost(real, twin)
            elif not call.op.endswith("_") and real.dtype in self.low and real.shape in self._shapes:
                self._lost(real, twin)  # it may become a weight
        for one in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(one, Tensor) and one.is_floating_point() and one.shape in self._shapes:
                self._resulted(one)

    def _decayed(self, call: Call, made: list[tuple[Tensor, Tensor]], decaying: list[tuple[Tensor, Tensor]]) -> None:
        same = count = elements = 0
        factors = []
        for (real, twin), (was, exact) in zip(made, decaying, strict=True):
            after = sampled(twin).float()
            there = (exact != 0) & exact.isfinite()
            share = float(((exact - after)[there] / exact[there]).median()) if bool(there.any()) else 0.0
            rest = (exact * (1 - share) - after).abs()
            alike = rest <= (_ALIKE * share + torch.finfo(torch.float32).eps) * exact.abs()
            if not LEAST_DECAY <= share < 0.5 or not bool(alike.all()):
                return
            factors.append(1 - share)
            same += int((there & (sampled(real) == was)).sum())
            count += int(there.sum())
            elements += real.numel()
        if count:
            dtype = dtype_name(made[0][0].dtype)
            self.decays.append(Decay(call, dtype, sum(factors) / len(factors), same / count, elements))

    def _lost(self, weight: Tensor, twin: Tensor) -> None:
        lost = sampled(twin).float() - sampled(weight).float()
        rows = self._losses.setdefault(weight.shape, [])
        rows[:] = [*rows, (weight, len(self.trace.calls) - 1, lost)][-_RECENT:]
        for value, held in self._results.get(weight.shape, ()):
            if _holds(held, lost) and self._is_rest(value, weight, 0):
                self._compensated.add(address_of(weight))

    def _resulted(self, result: Tensor) -> None:
        held, value = sampled(result).float().clone(), self.value_of(result)
        rows = self._results.setdefault(result.shape, [])
        rows[:] = [*rows, (value, held)][-_RECENT:]
        for weight, since, lost in self._losses.get(result.shape, ()):
            known = address_of(weight) in self._compensated
            if not known and _holds(held, lost) and self._is_rest(value, weight, since + 1):
                self._compensated.add(address_of(weight))

    def _is_rest(self, value: int, weight: Tensor, since: int) -> bool:
        """Say whether a value is what is left of a difference with a weight: an update that is lost is none."""
        storage, differs = address_of(weight), False
        for call in self.trace.above(value, lambda call: call.index >= since):
            differs = differs or call.name in ("sub", "rsub", "_foreach_sub")
            if call.index >= since and differs and any(self.trace.values[one].storage == storage for one in call.ins):
                return True
        return False


def _holds(held: Tensor, lost: Tensor) -> bool:
    size = float(lost.norm())
    return size > 0 and min(float((lost - held).norm()), float((lost + held).norm())) <= HOLDS * size


def lost_decays(recorder: UpdateRecorder, made: frozenset[int] | set[int]) -> Iterator[Decay]:
    """Yield, of each line, the decay of weights of which the least arrives.

    Args:
        recorder: of the update.
        made: calls that what was written into the weights is made of, by index.
    """
    lines: dict[str, list[Decay]] = {}
    for one in recorder.decays:
        if one.call.where and one.call.index in made:
            lines.setdefault(one.call.where, []).append(one)
    for several in lines.values():
        elements = sum(one.elements for one in several)
        kept = sum(one.kept * one.elements for one in several) / elements
        first = several[0]
        yield Decay(first.call, first.dtype, first.factor, kept, elements)
