"""Recording a step of a model that is too big for this machine: shapes flow, no data does.

Two things cannot be known without data and are answered by a stated guess, counted in the report's notes: a value
brought to Python (``.item()``: one; or true, and false every sixteenth time so that a waiting loop ends) and the number
of non-zero entries (an eighth).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.graph.analysis.rules import Rules
from autoprec.graph.recorder import StepRecorder
from autoprec.graph.report import GraphReport

__all__ = ["FakeStepRecorder", "record_fake"]

_NONZERO_SHARE = 8
_TURNS = 16
_ASKED = itertools.count()


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Run an operator on fake tensors; returns its result and whether it had to be guessed."""
    name = str(getattr(getattr(func, "_schema", None), "name", func))
    if name == "aten::_grouped_mm":
        return _grouped(*args, **kwargs), False
    try:
        return func(*args, **kwargs), False
    except DataDependentOutputException:
        return _guess(args[0]), True
    except DynamicOutputShapeException:
        rows = _some_rows(name, args[0])
        if rows is None:
            raise
        return rows, True


class _Guessing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers for data while the model is being built."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _answer(func, args, kwargs or {})[0]


class FakeStepRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """A :class:`StepRecorder` under ``FakeTensorMode``: guesses where an operator asks for data."""

    def __init__(self, model: nn.Module, *, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        super().__init__(model, optimizers=optimizers)
        self.trace.source = "fake"

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out, guessed = _answer(func, args, kwargs)
        self.trace.guesses += guessed
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


def record_fake(
    build: Callable[[], nn.Module],
    step: Callable[[nn.Module], Any],
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    rules: Rules | Path | str | None = None,
) -> GraphReport:
    """Build a model and run one step of it without memory or arithmetic, and report as for a real step.

    Args:
        build: returns the model; called under ``FakeTensorMode``.
        step: runs forward and backward on the model; its inputs must be created inside.
        optimizer: returns the optimizer whose state is to be counted.
        rules: rules, or a rules file that extends the built-in ones.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        with _Guessing():  # type: ignore[no-untyped-call]
            model = build()
        optimizers = () if optimizer is None else (optimizer(model),)
        with FakeStepRecorder(model, optimizers=optimizers) as recorder:
            step(model)
        return recorder.report(rules)
