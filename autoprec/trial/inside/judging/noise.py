"""Noise that is made of uniform numbers in 16 bits: Gumbel, logistic, exponential, Box and Muller's.

Such a number near 1 is one of few, and 1 itself becomes 0: the logarithm of what it, or one minus it, comes to is
infinite or cut off, a thousand times as often as in FP32. So each is given a twin within its rounding, and the
twin goes through what the script makes of it. What both come to is compared as distributions are: by what is infinite,
and by the tail.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoprec.graph.census import Observation
from autoprec.graph.trace import Call, bare_name
from autoprec.trial.inside.judging.forward import JUMPS, LOW, Step, low_of, observed
from autoprec.trial.inside.judging.lines.draws import LOOKS_UP, Draw, draws, moved
from autoprec.trial.inside.judging.samples import half_ulp
from autoprec.trial.inside.judging.shadow import ShadowRecorder

#: Operators that draw numbers between 0 and 1.
_UNIFORM = frozenset(("rand", "rand_like", "uniform"))
#: Classes of operators through which the twins go.
_CARRIES = frozenset(("pointwise", "transcendental", "cast", "view"))
#: Share of the numbers whose tail is looked at, and its error, in standard deviations, from which on it is cut off.
_TAIL, _CUT_OFF = 1e-3, 0.5
#: Fewest numbers of which something is said, and most that are drawn again.
_FEWEST, _MOST = 1024, 1 << 24


@dataclass(frozen=True, slots=True)
class Noise:
    """What random numbers came to at one call.

    Attributes:
        source: the call that drew them.
        infinite: share that is not finite, and is where they are drawn in more bits.
        tail: the error of one in a thousand, in standard deviations.
    """

    source: int
    infinite: float
    tail: float


class NoiseRecorder(ShadowRecorder):  # type: ignore[no-untyped-call]
    """A :class:`ShadowRecorder` that follows random numbers as well.

    Args:
        model, optimizers: as of :class:`ShadowRecorder`.

    Attributes:
        noises: what they came to, by the index of the call.
        draws: outcomes that are looked up with them, likewise.
    """

    def __init__(self, model: nn.Module, *, optimizers: tuple[Optimizer, ...] | list[Optimizer] = ()) -> None:
        super().__init__(model, optimizers=optimizers)
        self.noises: dict[int, Noise] = {}
        self.draws: dict[int, Draw] = {}
        self._drawn: dict[int, tuple[Tensor, int]] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self._wide: tuple[Tensor, int] | None = None

    def drop_before(self, first: int) -> None:
        """Forget the calls before one, and what was drawn by them."""
        super().drop_before(first)
        moved = {i - first: replace(one, source=one.source - first) for i, one in self.noises.items()}
        drawn = ((i, one) for i, one in self.draws.items() if min(one.sum, one.source) >= first)
        self.noises = {i: one for i, one in moved.items() if min(i, one.source) >= 0}
        self.draws = {i - first: replace(d, sum=d.sum - first, source=d.source - first) for i, d in drawn}
        self._drawn = {v: (t, i - first) for v, (t, i) in self._drawn.items() if i >= first}

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._wide = None
        drawn = self._looked_up(func, args)
        if drawn is not None:
            self.draws[len(self.trace.calls)] = drawn
        if self._drawn:
            try:
                with torch.no_grad():
                    self._wide = self._exact(func, args, kwargs)
            except Exception:  # an operator that has no FP32 form: nothing more is known of them
                self._wide = None
        return super()._run(func, args, kwargs)

    def _after(self, func: Any, before: tuple[Any, ...], out: Any) -> None:
        wide, self._wide = self._wide, None
        super()._after(func, before, out)
        if not isinstance(out, Tensor) or torch._C._current_graph_task_id() != -1:
            return
        index, call = len(self.trace.calls) - 1, self.trace.calls[-1]
        if call.name in _UNIFORM and out.dtype in self.low and _FEWEST <= out.numel() <= _MOST:
            if not any(isinstance(one, float) and one not in (0.0, 1.0) for one in call.args):
                self._drawn[self.value_of(out)] = self._again(out), index
        elif wide is not None and wide[0].shape == out.shape and wide[0].is_floating_point():
            self._drawn[self.value_of(out)] = wide
            if call.name not in ("detach", "clone") and not getattr(func, "is_view", False):
                self.noises[index] = self._compared(out, *wide)

    def _looked_up(self, func: Any, args: tuple[Any, ...]) -> Draw | None:
        """Return what a comparison of a uniform number with a cumulative sum draws; None for any other operator."""
        if not hasattr(func, "_schema") or bare_name(func._schema.name) not in LOOKS_UP or len(args) < 2:
            return None
        for table, number in (args[:2], args[1::-1]):
            if not isinstance(table, Tensor) or not isinstance(number, Tensor):
                return None
            summed, source = self._made_by(table, ("cumsum",)), self._made_by(number, _UNIFORM)
            if summed is None or source is None:
                continue
            dtypes = [self.trace.outputs(one)[0].dtype for one in (summed, source)]
            exact = self.twin_of(table)
            if set(dtypes) & set(LOW) and (exact is not None or dtypes[0] not in LOW):
                share = moved(table, table if exact is None else exact, dtypes[1])
                return Draw(summed.index, source.index, dtypes[0], dtypes[1], share)
        return None

    def _made_by(self, tensor: Tensor, names: Collection[str]) -> Call | None:
        value = self.value_of(tensor)
        above = self.trace.above(value, self._is_carrying) if value >= 0 else ()
        return next((call for call in above if call.name in names), None)

    def _is_carrying(self, call: Call) -> bool:
        return (self._rules.class_of(call.op) or "") in _CARRIES

    def _again(self, drawn: Tensor) -> Tensor:
        """Return numbers that are rounded to those that were drawn, FP32 of the same shape."""
        device = drawn.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        more = torch.rand(drawn.shape, generator=self._generators[device], device=device)
        exact = (drawn.double() + half_ulp(drawn) * (2 * more - 1)).float()
        top = 1 - more * (torch.finfo(drawn.dtype).eps / 4)  # what rounds to 1 is drawn as 0
        return torch.where(drawn == 0, top, exact).clamp(2.0**-24, 1 - 2.0**-24)

    def _exact(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int] | None:
        """Return what an operator makes of twins, and the call that drew them; None where it reads other tensors."""
        name = func._schema.name if hasattr(func, "_schema") else ""
        sources = set[int]()

        def lift(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return torch.float32 if value in self.low else value
            if not isinstance(value, Tensor):
                return value
            held = self._drawn.get(self.value_of(value))
            if held is not None:
                sources.add(held[1])
                return held[0].clone() if func._schema.is_mutable else held[0]
            if value.dim():
                raise ValueError("it is no noise any more")
            return value.float() if value.is_floating_point() else value

        if (self._rules.class_of(name) or "") not in _CARRIES or bare_name(name) in JUMPS:
            return None
        wide_args, wide_kwargs = [lift(one) for one in args], {key: lift(one) for key, one in kwargs.items()}
        made = func(*wide_args, **wide_kwargs) if sources else None
        return (made, min(sources)) if isinstance(made, Tensor) else None

    def _compared(self, out: Tensor, exact: Tensor, source: int) -> Noise:
        real, wide = out.detach().double().flatten(), exact.double().flatten()
        lost = wide.isfinite() & ~real.isfinite()
        real, wide = real[wide.isfinite()], wide[wide.isfinite()]
        off = (real.sort().values - wide.sort().values).nan_to_num(0.0, 0.0, 0.0).abs()
        size, count = float(wide.std()), max(1, int(_TAIL * real.numel()))
        tail = float(off.topk(count).values[-1]) / size if off.numel() > _FEWEST // 2 and size > 0 else 0.0
        return Noise(source, float(lost.double().mean()), tail)


def noise(step: Step) -> Iterator[Observation]:
    """Yield, of each line that draws random numbers in 16 bits, the first line that makes infinite noise of them.

    Where there is none, the first whose tail is cut off. Before these, what is drawn with such numbers or sums.
    """
    recorder, told = step.recorder, set[str]()
    if not isinstance(recorder, NoiseRecorder):
        return
    yield from draws(step, recorder.draws)
    operators = step.report.operators
    rows = [(i, one) for i, one in recorder.noises.items() if i in step.trained and i < len(operators)]
    for bad in ([row for row in rows if row[1].infinite], [row for row in rows if row[1].tail >= _CUT_OFF]):
        for index, one in bad:
            drawn = operators[one.source].where
            if drawn in told:
                continue
            told.add(drawn)
            operator = operators[index]
            dtype = low_of(operators[one.source]) or recorder.trace.outputs(step.calls[one.source])[0].dtype
            also = (drawn,) if drawn != operator.where else ()
            yield observed("noise-16bit", operator, also=also, infinite=one.infinite, tail=one.tail, to=dtype)
