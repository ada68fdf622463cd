"""A recorded step beside itself in more bits: what each operator would have given, had nothing been rounded to 16 bits.

Every tensor that an operator rounds to 16 bits is given a *twin* in FP32, computed from the twins of its inputs. A
twin ends where Tensor Cores would begin: a matrix product, a convolution or attention takes 16-bit operands and
accumulates in FP32, which is how mixed precision is meant to run. So the relative error of an operator against its twin
is what the rounding since the last product has cost there: one rounding in a chain that is computed in FP32 and stored
in 16 bits, ten times that where positions, sums or losses are computed in 16 bits. The tensors of the script are not
touched, and an FP32 step has no twins.

A router's scores have a second twin that goes through the product: which experts would FP32 have chosen?
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.graph.analysis.rules import builtin_rules
from autoprec.graph.places import caller
from autoprec.graph.recorder import StepRecorder
from autoprec.graph.trace import bare_name, dtype_name
from autoprec.numerics.rounding import SIXTEEN_BIT
from autoprec.trial.inside.judging.samples import relative_error, sampled

#: Classes of operators that end a twin: their products are exact in 16-bit operands, or they draw, or nobody knows.
_ENDS = frozenset({"gemm", "conv", "attention", "random", "collective", "opaque", "scalar", "router"})
#: Operators that make or reinterpret memory, of which a twin says nothing.
_PLAIN = ("empty", "zeros", "ones", "new_", "full", "set", "resize", "view_dtype", "lift", "zero", "_sparse", "fill")
#: Most elements of tensors that have twins, and outputs of a product that may be scores.
_MOST, _MOST_EXPERTS = 1 << 26, 512
#: Calls after which twins of tensors that are gone are dropped.
_PRUNED = 256
#: Elements up to which a product in fp16 is multiplied once more, to see what became zero.
_FLUSHED = 1 << 22
#: Relative error of a sum from which on it may be that its terms cancel.
_CANCELS = 0.01
_CHOOSES = ("topk", "argmax", "max", "sort")
_SCALED_EPS = ("add", "clamp_min", "clamp", "maximum")


@dataclass(slots=True)
class Measure:
    """What was measured at one call.

    Attributes:
        error: relative error of its outputs against their twins; ``before``: the largest of its inputs'.
        unchanged: share of the elements that it writes in place, and that stay as they are where the twin moves.
        overflowed: elements that are not finite where the twin is.
        figures: more, by name.
    """

    error: float = 0.0
    before: float = 0.0
    unchanged: float | None = None
    overflowed: int = 0
    figures: dict[str, Any] = field(default_factory=dict)


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an operator writes into."""
    schema = getattr(func, "_schema", None)
    arguments = () if schema is None else schema.arguments
    # batch norms write into their running statistics without saying so
    norm = schema is not None and "batch_norm" in schema.name and "backward" not in schema.name
    hidden = ("running_mean", "running_var") if norm else ()
    return tuple(
        (i, a.name)
        for i, a in enumerate(arguments)
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in hidden
    )


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among an operator's arguments, which nest no deeper than in lists."""
    out: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            out.append(value)
        elif isinstance(value, (list, tuple)):
            out += (one for one in value if isinstance(one, Tensor))
    return out


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return arguments with each changed."""
    if isinstance(value, (list, tuple)):
        made = [_mapped(change, one) for one in value]
        return made if isinstance(value, list) else tuple(made)
    return change(value)


class ShadowRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """A :class:`StepRecorder` that computes twins, and measures by the index of each call.

    Args:
        model, optimizers: as of :class:`StepRecorder`.

    Attributes:
        measures: what was measured, by the index of the call.
        outside: storages that were there before the recording.
        failures: operators that have no FP32 form.
        low, wide: dtypes of which there are twins, and the twins' own.
        leaves_are_given: a leaf of autograd's has no twin: what the update before a forward lost is not lost there.
        recurrent: recurrent modules that ran under autocast: their class, the line that called them, its dtype, and
            that of what they returned.
    """

    def __init__(self, model: nn.Module, *, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        super().__init__(model, optimizers=optimizers)
        self.measures: dict[int, Measure] = {}
        self._twins: dict[int, tuple[Tensor, int]] = {}
        self._scores: dict[int, tuple[Tensor, int]] = {}
        self._errors: dict[int, float] = {}
        self._made: list[tuple[Tensor, Tensor, dict[int, tuple[Tensor, int]], float]] = []
        self._measure: Measure | None = None
        self.outside: set[int] = {value.storage for value in self.trace.values}
        self._rules = builtin_rules()
        self.failures = 0
        self.low: tuple[torch.dtype, ...] = SIXTEEN_BIT
        self.wide = torch.float32
        self.leaves_are_given = False
        self.recurrent: dict[str, tuple[str, str, str, str]] = {}

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._leave_module(module, args, output)
        name = self.names.name_of(module)
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and name not in self.recurrent:
            device = next((p.device.type for p in module.parameters()), "cpu")
            given = output[0] if isinstance(output, tuple) else output
            if torch.is_autocast_enabled(device):  # a packed sequence has its data as well
                dtypes = dtype_name(torch.get_autocast_dtype(device)), dtype_name(given.data.dtype)
                self.recurrent[name] = type(module).__name__, caller(), *dtypes

    # ---------------------------------------------------------------- twins
    def twin_of(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's twin, of the same shape and in FP32; None where it has none."""
        return self._twin(self._twins, tensor)

    def _twin(self, table: dict[int, tuple[Tensor, int]], tensor: Tensor) -> Tensor | None:
        held = table.get(self.value_of(tensor))
        if held is None:
            return None
        twin, version = held
        return twin if twin._version == version and twin.shape == tensor.shape else None

    def drop_before(self, first: int) -> None:
        """Forget the calls before one, and what was measured at them."""
        self.trace.drop_before(first)
        self.measures = {index - first: one for index, one in self.measures.items() if index >= first}

    def _lookup(self, tensor: Tensor) -> int:
        seen, before = len(self.trace.values), self.value_of(tensor)
        value = super()._lookup(tensor)
        if value == seen:
            if before >= 0:  # a parameter that was written into is the parameter still
                for table in (self._twins, self._scores):
                    if before in table:
                        table[value] = table[before]
                self._errors[value] = self._errors.get(before, 0.0)
            else:
                self.outside.add(self.trace.values[value].storage)
        if self.leaves_are_given and tensor.is_leaf and tensor.requires_grad:
            self._forget((tensor,))
            self._errors.pop(value, None)
        return value

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._made, self._measure = [], None
        name = bare_name(func._schema.name) if hasattr(func, "_schema") else ""
        floats = [t for t in _tensors(args, kwargs) if t.is_floating_point()]
        asked = kwargs.get("dtype")
        low = any(t.dtype in self.low for t in floats) or asked in self.low
        twinned = any(self.value_of(t) in self._twins or self.value_of(t) in self._scores for t in floats)
        looked = name in ("sin", "cos")
        exact = not twinned and ((name == "_to_copy" and asked not in self.low) or getattr(func, "is_view", False))
        if not name or not (low or twinned or looked) or exact or sum(t.numel() for t in floats) > _MOST:
            if twinned:
                self._forget(self._arguments(func, args, kwargs))
            return super()._run(func, args, kwargs)
        return self._both(func, name, args, kwargs, low)

    def _both(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], low: bool) -> Any:
        """Run an operator, and beside it its twins."""
        cls = self._rules.class_of(func._schema.name) or ""
        measure = self._measure = Measure()
        written = list(self._arguments(func, args, kwargs))
        before = [(t, sampled(t).clone()) for t in written if t.dtype in self.low]
        wide = scores = None
        try:
            with torch.no_grad(), _without_autocast(args, kwargs):
                if self._is_carried(func, name, cls):
                    wide = self._beside(self._twins, func, args, kwargs)
                elif cls == "gemm":
                    scores = self._product(func, args, kwargs)
                if self._scores and cls not in _ENDS and not written:
                    scores = self._beside(self._scores, func, args, kwargs)
        except Exception:  # an operator that has no FP32 form: its twin ends here
            self.failures += 1
        if not self._made:
            self._forget(written)  # what is written now is not what their twins hold
        self._note_scalars(name, args, kwargs, measure)
        out = super()._run(func, args, kwargs)
        try:
            with torch.no_grad():
                self._compare(func, name, cls, args, kwargs, out, wide, scores, before, low)
        except Exception:
            self.failures += 1
        return out

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for table in (self._twins, self._scores):
                table.pop(self.value_of(tensor), None)

    def _is_carried(self, func: Any, name: str, cls: str) -> bool:
        reinterprets = name == "view" and any(a.name == "dtype" for a in func._schema.arguments)
        return cls not in _ENDS and not reinterprets and not name.startswith(_PLAIN)

    def _arguments(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """Yield the floating tensors that an operator writes into."""
        for position, name in _written(func):
            given = args[position] if position < len(args) else kwargs.get(name)
            for one in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(one, Tensor) and one.is_floating_point():
                    yield one

    def _beside(
        self, table: dict[int, tuple[Tensor, int]], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return an operator's outputs from the twins of its inputs; None where that says nothing."""
        name = bare_name(func._schema.name)
        view = getattr(func, "is_view", False)
        known = [t for t in _tensors(args, kwargs) if self._twin(table, t) is not None]
        scores = table is self._scores
        if (view or scores) and not known:
            return None
        if name == "copy" and len(args) > 1 and not known:
            # master weights in FP32 that live on lose nothing where they are rounded
            kept = self.trace.values[self.value_of(args[1])].storage in self.outside
            if kept or args[1].dtype == args[0].dtype or args[0].dtype not in self.low:
                return None
        written = {id(t) for t in self._arguments(func, args, kwargs)}

        def lift(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return self.wide if isinstance(value, torch.dtype) and value in self.low else value
            if not value.is_floating_point():
                return value.clone() if id(value) in written else value
            twin = self._twin(table, value)
            if twin is None:
                wide = value.detach().to(self.wide if value.dtype in self.low else value.dtype)
                twin = wide.clone() if id(value) in written and wide.dtype == value.dtype else wide
            if id(value) in written:
                self._made.append((value, twin, table, 0.0))
            return twin

        wide_args, wide_kwargs = _mapped(lift, args), {key: _mapped(lift, value) for key, value in kwargs.items()}
        whole = name == "_to_copy" and args[0].is_floating_point() and kwargs.get("dtype") in self.low
        if whole and args[0].dtype is wide_args[0].dtype:
            return wide_args[0]  # a cast of FP32 itself
        return func(*wide_args, **wide_kwargs)

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the FP32 result of a product whose few outputs may be a router's scores; None for any other."""
        tensors = [t for t in args if isinstance(t, Tensor)]
        width = tensors[-1].shape[-1] if tensors and tensors[-1].dim() == 2 else 0
        if func._schema.name not in ("aten::mm", "aten::addmm") or torch._C._current_graph_task_id() != -1:
            return None
        if not 2 <= width <= _MOST_EXPERTS or tensors[-1].dtype not in self.low:
            return None

        def lift(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            twin = self.twin_of(value)
            return (value if twin is None else twin).float()

        return func(*_mapped(lift, args), **kwargs)

    # ---------------------------------------------------------------- what is measured
    def _compare(
        self,
        func: Any,
        name: str,
        cls: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        wide: Any,
        scores: Any,
        before: list[tuple[Tensor, Tensor]],
        low: bool,
    ) -> None:
        measure = self._measure or Measure()
        tensors = _tensors(args, kwargs)
        measure.before = max((self._errors.get(self.value_of(t), 0.0) for t in tensors), default=0.0)
        outs = self._pair(out, wide)
        if isinstance(scores, Tensor) and outs and scores.shape == outs[0].shape:
            self._made.append((outs[0], scores, self._scores, 0.0))
        view = getattr(func, "is_view", False)
        for index, (real, twin, table, _) in enumerate(self._made):
            if table is not self._twins:
                continue
            error = measure.before if view else relative_error(real, twin)
            self._made[index] = (real, twin, table, error)
            measure.error = max(measure.error, error)
            # bfloat16 has the range of FP32
            if not view and real.dtype is torch.float16 and not bool(real.isfinite().all()):
                measure.overflowed += int((~real.isfinite() & twin.isfinite()).sum())
        if name in ("sum", "mean") and measure.error > _CANCELS and self._made:
            measure.figures["whole"], measure.error = measure.error, self._of_terms(func, args, kwargs)
        if before:
            self._unchanged(measure, before)
        self._positions(measure, name)
        if name in _CHOOSES and outs:
            self._chosen(measure, name, args, outs)
        if name in ("sin", "cos") and tensors and tensors[0].numel():
            measure.figures["amax"] = float(tensors[0].detach().abs().amax())
        if low and cls in ("gemm", "conv") and outs and outs[0].dtype is torch.float16:
            self._product_range(measure, func, args, kwargs, tensors, outs[0])
        self._decay(measure, name, args, outs)

    def _of_terms(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Return the error of a sum relative to that of its terms' sizes: terms that cancel leave little to compare."""
        real, twin, *_ = self._made[-1]
        terms = self.twin_of(args[0])
        sizes = func((args[0].float() if terms is None else terms).abs(), *args[1:], **(kwargs | {"dtype": None}))
        return float((real.double() - twin.double()).norm() / sizes.double().norm().clamp_min(1e-300))

    def _pair(self, out: Any, wide: Any) -> list[Tensor]:
        """Make what an operator gave from twins the twins of what it gave; return the latter."""
        outs = [t for t in (out if isinstance(out, (list, tuple)) else (out,)) if isinstance(t, Tensor)]
        wides = [t for t in (wide if isinstance(wide, (list, tuple)) else (wide,)) if isinstance(t, Tensor)]
        written = {id(one) for one, *_ in self._made}
        if wide is not None and len(outs) == len(wides):
            self._made += (
                (real, twin, self._twins, 0.0)
                for real, twin in zip(outs, wides, strict=True)
                if real.is_floating_point() and twin.shape == real.shape and id(real) not in written
            )
        return outs

    def _product_range(
        self, measure: Measure, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Tensor
    ) -> None:
        """Count what a product in fp16 overflows and, in backward, the share of its result that it flushes to zero."""
        if not bool(out.isfinite().all()) and all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point()):
            measure.overflowed += int((~out.isfinite()).sum())
        small = all(t.numel() <= _FLUSHED for t in (*tensors, out))
        if (
            torch._C._current_graph_task_id() != -1
            and small
            and func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm")
        ):
            wide = func(*_mapped(lambda v: v.float() if isinstance(v, Tensor) else v, args), **kwargs)
            there = wide != 0
            measure.figures["flushed"] = float(((out == 0) & there).sum()) / max(int(there.sum()), 1)

    def _decay(self, measure: Measure, name: str, args: tuple[Any, ...], outs: list[Tensor]) -> None:
        """Say which share of a product with a factor just below 1 is what it was before: it never decays."""
        factor = args[1] if name == "mul" and len(args) > 1 else None
        if (
            isinstance(factor, float)
            and 0.5 < factor < 1.0
            and outs
            and outs[0].dtype in self.low
            and outs[0].numel() > 1
        ):
            made = [twin for real, twin, table, _ in self._made if real is outs[0] and table is self._twins]
            before = sampled(made[0]) / factor if made else sampled(outs[0])
            there = before != 0
            same = sampled(outs[0]).float() == before.to(outs[0].dtype).float()
            measure.figures["factor"] = factor
            measure.figures["kept"] = float((same & there).sum()) / max(int(there.sum()), 1)

    def _unchanged(self, measure: Measure, before: list[tuple[Tensor, Tensor]]) -> None:
        """Say which share of what should have moved stayed, over all tensors that were written into."""
        moved = stayed = 0
        made = {id(real): twin for real, twin, table, _ in self._made if table is self._twins}
        for real, old in before:
            twin = made.get(id(real))
            if twin is not None:
                moves = sampled(twin) != old.float()
                moved += int(moves.sum())
                stayed += int((moves & (sampled(real) == old)).sum())
        measure.unchanged = stayed / moved if moved else None

    def _positions(self, measure: Measure, name: str) -> None:
        """Look at positions that are rounded: a row that increases, and of which several are the same afterwards."""
        if name not in ("_to_copy", "arange", "copy", "linspace", "mul", "div", "cumsum") or not self._made:
            return
        real, twin, table, _ = self._made[-1]
        row, wide = (
            t.detach().reshape(-1, t.shape[-1])[-1] if t.dim() else t.detach().reshape(1) for t in (real, twin)
        )
        if table is not self._twins or real.dtype not in self.low or not 16 <= row.numel() <= 1 << 20:
            return
        counts = name != "cumsum" or bool((wide == wide.round()).all())  # positions by a mask, and no sum of reals
        if counts and bool((wide[1:] > wide[:-1]).all()):
            measure.figures |= {"distinct": int(torch.unique(row).numel()), "positions": int(row.numel())}

    def _chosen(self, measure: Measure, name: str, args: tuple[Any, ...], outs: list[Tensor]) -> None:
        """Compare what was chosen by rounded scores with what FP32 would have chosen, row by row."""
        source = args[0]
        wide = self._twin(self._scores, source)
        if wide is None:
            wide = self.twin_of(source)
        if wide is None or source.dim() < 2 or source.shape[-1] > _MOST_EXPERTS or (len(args) < 2 and name != "argmax"):
            return
        count = int(args[1]) if name == "topk" else 1
        if count >= source.shape[-1]:
            return
        seen, wanted = source.detach().float(), wide.detach().float()
        seen, wanted = seen.reshape(-1, seen.shape[-1]), wanted.reshape(-1, wanted.shape[-1])
        one = name in ("argmax", "max")
        chosen = seen.argmax(-1, True) if one else outs[-1].reshape(-1, outs[-1].shape[-1])[:, :count]
        if chosen.shape[0] != seen.shape[0]:
            return
        other = wanted.topk(count, dim=-1).indices
        changed = (chosen.sort(-1).values != other.sort(-1).values).any(-1)
        top = seen.topk(count + 1, dim=-1).values
        measure.figures |= {
            "changed": float(changed.float().mean()),
            "ties": float((top[:, count - 1] == top[:, count]).float().mean()),
            "tokens": int(seen.shape[0]),
            "experts": int(seen.shape[-1]),
            "chosen": count,
        }

    def _note_scalars(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], measure: Measure) -> None:
        """Note an epsilon that is zero in the dtype of what it is added to."""
        bare = name.removeprefix("_foreach_")
        if bare not in _SCALED_EPS or not args:
            return
        first = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
        if not isinstance(first, Tensor) or first.dtype not in self.low:
            return
        numbers = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, float)]
        lost = [v for v in numbers if v and float(torch.tensor(v, dtype=first.dtype)) == 0.0]
        if lost:
            measure.figures["eps"] = lost[0]

    def _after(self, func: Any, before: tuple[Any, ...], out: Any) -> None:
        super()._after(func, before, out)
        measure, made = self._measure, self._made
        self._measure, self._made = None, []
        if measure is None:
            return
        for real, twin, table, error in made:
            value = self.value_of(real)
            if value >= 0:
                table[value] = twin, twin._version
                if table is self._twins:
                    self._errors[value] = error
        index = len(self.trace.calls) - 1
        self.measures[index] = measure
        if index % _PRUNED == 0:
            self._prune()

    def _prune(self) -> None:
        """Drop the twins of tensors that are gone."""
        expired: Callable[[int], bool] = self._storages.expired
        for table in (self._twins, self._scores):
            for value in [one for one in table if expired(self.trace.values[one].storage)]:
                del table[value]

    def _finish(self) -> None:
        self._twins.clear()
        self._scores.clear()
        super()._finish()


def _without_autocast(args: Any, kwargs: Any) -> Any:
    """Return a context in which operators run in the dtype of what they are given, whatever the script says."""
    return _Autocast(next((t.device.type for t in _tensors(args, kwargs)), "cpu"))


class _Autocast:
    """Autocast switched off without its context manager, whose end would forget the script's cached casts."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._was = torch.is_autocast_enabled(self._device)
        torch.set_autocast_enabled(self._device, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self._device, self._was)
