"""The peak memory of a training step on a CPU: every allocation and release of torch's allocator, as its profiler sees.

Counting begins in the first step, so that gradients and optimizer state which later steps release or replace are known,
and the second step is the one whose peak counts: the optimizer has its state by then. Neither is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

#: Its profiler's functions are not all declared.
_TORCH: Any = torch.autograd
_SECOND_STEP, _MEMORY = "autoprec.second_step", "[memory]"


class StepPeak:
    """Counts bytes from :meth:`begin` to :meth:`end`, and what was the most after :meth:`second_step`.

    Of operators nothing is recorded (their events would take ten times as long as small ones do).
    """

    def __init__(self) -> None:
        self._lasting, self._counts = 0, False

    def begin(self, lasting: Iterable[torch.Tensor]) -> None:
        """Start counting on top of what is there already, unless the script profiles itself.

        Args:
            lasting: tensors of any shapes that are there before a step (:func:`lasting`).
        """
        self._lasting, self._counts = _unique_bytes(lasting), not _TORCH._profiler_enabled()
        if self._counts:
            no_more = torch._C._profiler._ExperimentalConfig()
            config = _TORCH.ProfilerConfig(_TORCH.ProfilerState.KINETO, False, True, False, False, False, no_more)
            kind, scope = {_TORCH.ProfilerActivity.CPU}, {torch._C._profiler.RecordScope.USER_SCOPE}
            _TORCH._prepare_profiler(config, kind)
            _TORCH._enable_profiler(config, kind, scope)

    def second_step(self) -> None:
        """Mark where the second step begins, the first whose peak counts."""
        with record_function(_SECOND_STEP):
            pass

    def end(self) -> int:
        """Return the peak of the second step in bytes; 0 where the script profiled itself meanwhile."""
        if not self._counts:
            return 0
        self._counts = False
        events = sorted(_TORCH._disable_profiler().events(), key=lambda event: event.start_ns())
        now, most, begun = self._lasting, 0, False
        for event in events:
            if event.name() == _MEMORY:
                now += event.nbytes()
            begun = begun or event.name() == _SECOND_STEP
            if begun:
                most = max(most, now)
        return most


def lasting(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """Yield what is there before a step, of any shapes: parameters, buffers, gradients, and optimizer state."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    stack: list[Any] = [optimizer.state for optimizer in optimizers]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)


def _unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of storages, each of them once."""
    sizes: dict[int, int] = {}
    for tensor in (part for whole in tensors for part in _inner_tensors(whole)):
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what a wrapper subclass (low-precision optimizer state) really holds."""
    to_local = getattr(tensor, "to_local", None)
    tensor = to_local() if callable(to_local) else tensor
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if not callable(flatten):
        return [tensor]
    names = flatten()[0]
    return [part for name in names for part in _inner_tensors(getattr(tensor, name))]


def is_out_of_memory(error: BaseException) -> bool:
    """True for the ways torch and Python say that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return "can't allocate memory" in text or "out of memory" in text.lower()
