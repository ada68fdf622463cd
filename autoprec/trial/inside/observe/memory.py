"""Memory of one training step: counted exactly on the CPU, read from the allocator on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return to_local() if callable(to_local) else tensor


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    storage = _inner_tensors(tensor)[0].untyped_storage()  # a wrapper subclass has no storage of its own
    return storage.data_ptr(), storage.nbytes()


def _unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    sizes: dict[int, int] = {}
    for tensor in (part for whole in tensors for part in _inner_tensors(whole)):
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            continue
        pointer, size = _storage(tensor)
        sizes[pointer] = size
    return sum(sizes.values())


class _Held:
    """One tensor saved for backward; its bytes count for as long as autograd holds this object."""

    __slots__ = ("_counter", "_key", "tensor")

    def __init__(self, tensor: torch.Tensor, key: tuple[int, int] | None, counter: SavedBytes) -> None:
        self.tensor, self._key, self._counter = tensor, key, counter

    def __del__(self) -> None:
        if self._key is not None:
            self._counter.release(self._key)


class SavedBytes:
    """Context manager: the peak of bytes alive in tensors saved for backward, parameters excluded.

    Storages are counted once however many operators save views of them. Inside non-reentrant checkpointing autograd
    saves placeholders, so what checkpointing saves is not counted, as it is not kept.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._excluded = {_storage(p)[0] for p in parameters if p.device.type != "meta"}
        self._users: dict[tuple[int, int], int] = {}
        self._now = 0
        self.peak = 0
        self._hooks: Any = None

    def _pack(self, tensor: torch.Tensor) -> _Held:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return _Held(tensor, None, self)
        key = _storage(tensor)
        if key[0] in self._excluded:
            return _Held(tensor, None, self)
        users = self._users.get(key, 0)
        self._users[key] = users + 1
        if not users:
            self._now += key[1]
            self.peak = max(self.peak, self._now)
        return _Held(tensor, key, self)

    def release(self, key: tuple[int, int]) -> None:
        users = self._users[key] - 1
        if users:
            self._users[key] = users
            return
        del self._users[key]
        self._now -= key[1]

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.__exit__(*exc)


def state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Bytes of every tensor the optimizers keep."""
    found: list[torch.Tensor] = []
    for optimizer in optimizers:
        for state in optimizer.state.values():
            stack = list(state.values()) if isinstance(state, dict) else [state]
            while stack:
                value = stack.pop()
                if isinstance(value, torch.Tensor):
                    found.extend(_inner_tensors(value))
                elif isinstance(value, (list, tuple)):
                    stack.extend(value)
    return _unique_bytes(found)


def _inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what a wrapper subclass (low-precision optimizer state) really holds."""
    tensor = _local(tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if not callable(flatten):
        return [tensor]
    names = flatten()[0]
    return [part for name in names for part in _inner_tensors(getattr(tensor, name))]


def memory_of(
    parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], optimizers: Sequence[Optimizer], saved: int
) -> dict[str, int]:
    """Split the bytes of a step: parameters, gradients, optimizer, saved_for_backward, buffers."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return {
        "parameters": _unique_bytes(parameters),
        "gradients": _unique_bytes(gradients),
        "optimizer": state_bytes(optimizers),
        "saved_for_backward": saved,
        "buffers": _unique_bytes(buffers),
    }
