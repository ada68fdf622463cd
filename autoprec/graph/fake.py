"""Recording a step of a model that is too big for this machine: shapes flow, no data does.

:func:`fake_weights` makes every Parameter that is created from then on a fake tensor: it has a shape, a dtype and a
device and no memory, and so has everything that is computed from it. The script's own data stay real, so that it reads,
tokenises and indexes as ever. Two things cannot be known without data and are answered by a guess, which the report
counts: a value brought to Python (``.item()``: one; or true, and false every sixteenth time so that a loop ends) and
the number of non-zero entries (an eighth).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from autoprec.graph.recorder import StepRecorder
from autoprec.graph.report import GraphReport

#: Without values: one in so many elements of a mask is true, and one in so many conditions false (of `while not done`).
_NONZERO_SHARE, _TURNS = 8, 16
_ASKED = itertools.count()


class _GuessingMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode that answers where an operator asks for data, entered by every operator on a fake tensor."""

    guesses = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(getattr(func, "_schema", None), "name", func))
        if name == "aten::_grouped_mm":
            return _grouped(*args, **kwargs)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            guessed: Any = _guess(args[0])
        except DynamicOutputShapeException:
            guessed = _some_rows(name, args[0])
            if guessed is None:
                raise
        _GuessingMode.guesses += 1
        return guessed


class FakeStepRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """A :class:`StepRecorder` that counts what was guessed where an operator asked for data."""

    def __init__(self, model: nn.Module, *, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        super().__init__(model, optimizers=optimizers)
        self.trace.source = "fake"

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = _GuessingMode.guesses
        out = super()._run(func, args, kwargs)
        self.trace.guesses += _GuessingMode.guesses - before
        return out


def _guess(tensor: torch.Tensor) -> bool | int | float:
    if tensor.dtype is torch.bool:
        return next(_ASKED) % _TURNS != _TURNS - 1  # now and then False: a loop that waits for it must end
    return 1.0 if tensor.dtype.is_floating_point else 1


def _some_rows(name: str, tensor: torch.Tensor) -> Any:
    count = max(tensor.numel() // _NONZERO_SHARE, 1)
    if name == "aten::nonzero":
        return tensor.new_empty((count, tensor.dim()), dtype=torch.int64)
    if name == "aten::masked_select":
        return tensor.new_empty((count,))
    return None


def _grouped(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, _bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Shape of a grouped GEMM; the fake kernel insists on bfloat16 where the real one takes any dtype."""
    dtype = out_dtype or a.dtype
    groups = offs.shape[0] if offs is not None else 0
    if a.dim() == 2 and b.dim() == 2:
        return a.new_empty((groups, a.shape[0], b.shape[1]), dtype=dtype)
    if a.dim() == 2:
        return a.new_empty((a.shape[0], b.shape[-1]), dtype=dtype)
    return a.new_empty((*a.shape[:-1], b.shape[-1]) if b.dim() == 3 else (a.shape[1], b.shape[1]), dtype=dtype)


def fake_weights() -> None:
    """Make every Parameter of this process fake from now on; there is no way back."""
    mode = _GuessingMode(allow_non_fake_inputs=True)
    make = nn.Parameter.__new__

    def without_data(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if data is not None and not isinstance(data, FakeTensor) and type(data) in (torch.Tensor, nn.Parameter):
            with mode:
                data = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=data.device)
        return make(cls, data, requires_grad)

    nn.Parameter.__new__ = without_data  # type: ignore[method-assign]
    nn.Module._apply = _converted  # type: ignore[method-assign]


def _converted(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Stand in for ``Module._apply`` (``.to``, ``.half``): torch's swaps fake parameters, which optimizers forbid."""
    for child in self.children() if recurse else ():
        child._apply(fn)  # type: ignore[no-untyped-call]
    for name, parameter in self._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                new = fn(parameter)
            if new.device == parameter.device:
                parameter.data = new
            else:
                self._parameters[name] = nn.Parameter(new, parameter.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def is_fake(model: nn.Module) -> bool:
    """Say whether a model's weights hold no data (:func:`fake_weights`)."""
    return any(isinstance(p, FakeTensor) for p in model.parameters())


def recorder_for(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> StepRecorder:
    """Return a recorder for a model, also for one whose weights are fake (:func:`fake_weights`)."""
    if is_fake(model):
        return FakeStepRecorder(model, optimizers=optimizers)
    return StepRecorder(model, optimizers=optimizers)


def record_fake(
    build: Callable[[], nn.Module],
    step: Callable[[nn.Module], Any],
) -> GraphReport:
    """Build a model and run one step of it without memory or arithmetic, and report as for a real step.

    Args:
        build: returns the model; called under ``FakeTensorMode``.
        step: runs forward and backward on the model; its inputs must be created inside.
    """
    with _GuessingMode(allow_non_fake_inputs=True):
        model = build()
        with FakeStepRecorder(model) as recorder:
            step(model)
        return recorder.report()
