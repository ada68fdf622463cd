"""Bytes saved for backward: what autograd keeps of the forward pass because a gradient formula will need it.

A linear layer keeps its input (for wgrad), GELU its input, softmax its output: these tensors, not the weights, are
what fills a GPU at large batches, and what a lower precision halves. Several operators often save views of one
storage, so storages are counted, each once, without parameters and the batch, which live anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None for sparse and other tensors that have none.

    Args:
        tensor: of any shape, dtype and layout.
    """
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # NotImplementedError is one of them
        return None


def address_of(tensor: torch.Tensor) -> int:
    """Return what the views of one storage have in common; 0 without storage.

    Args:
        tensor: of any shape, dtype and layout.
    """
    storage = storage_of(tensor)
    return 0 if storage is None else int(storage._cdata)


class StorageTable:
    """Weak references to every storage seen in a step.

    While a weak reference is held, the storage's memory is freed as usual but its address is not given out again:
    an address therefore names one storage for the whole recording. Tensors saved for backward come back as new
    Python objects; their storage, offset, shape and strides are what stays the same.
    """

    def __init__(self) -> None:
        self._weak: dict[int, tuple[Any, int]] = {}
        self._excluded: set[int] = set()

    def key(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return what identifies a tensor's contents and view; registers its storage.

        Args:
            tensor: of any shape, dtype and layout; one without a storage is known by its identity.
        """
        storage = storage_of(tensor)
        if storage is None:
            return (id(tensor),)  # by object
        address = storage._cdata
        self.watch(storage)
        if tensor.layout is not torch.strided:
            return (address, tuple(tensor.shape), tensor.dtype)
        return (address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Keep a storage's address from being reused."""
        if storage._cdata not in self._weak:
            self._weak[storage._cdata] = (storage._weak_ref(), storage.nbytes())

    def exclude(self, tensor: torch.Tensor) -> None:
        """Leave a tensor's storage out of activation memory.

        Args:
            tensor: a parameter, a buffer, or the batch, of any shape and dtype.
        """
        storage = storage_of(tensor)
        if storage is not None:
            self._excluded.add(storage._cdata)

    def excluded(self, address: int) -> bool:
        """Say whether :meth:`exclude` named this storage."""
        return address in self._excluded

    def live_bytes(self) -> int:
        """Return the bytes of storages seen so far that are still alive and not excluded."""
        expired = torch.UntypedStorage._expired
        return sum(
            size for address, (weak, size) in self._weak.items() if address not in self._excluded and not expired(weak)
        )

    def expired(self, address: int) -> bool:
        """Say whether a storage that was seen is gone."""
        held = self._weak.get(address)
        return held is not None and bool(torch.UntypedStorage._expired(held[0]))

    def release(self) -> None:
        """Give back the weak references to storages; the table is of no use after that."""
        free: Any = torch.UntypedStorage._free_weak_ref
        for weak, _ in self._weak.values():
            free(weak)
        self._weak.clear()


class SavedTensors:
    """Saved-tensor hooks that look at each storage once and change nothing.

    ``torch.func`` transforms refuse to run under such hooks. As the script must run as it would alone, the hooks are
    taken off the moment a transform begins; :attr:`complete` is then False and live tensors are counted instead.
    """

    def __init__(self, storages: StorageTable) -> None:
        self.complete = True
        self._storages = storages
        self._bytes: dict[int, int] = {}
        self._hooks: Any = None
        self._disable: Any = None

    def start(self) -> None:
        """Begin to count what autograd saves for the backward pass.

        Where the script forbids such hooks (``disable_saved_tensors_hooks``), counting steps aside for as long.
        """
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _same)
        self._hooks.__enter__()
        original = self._disable = torch.autograd.graph.disable_saved_tensors_hooks

        @contextlib.contextmanager
        def disable(message: str) -> Iterator[None]:
            self._step_aside()
            with original(message):
                yield

        graph: Any = torch.autograd.graph
        graph.disable_saved_tensors_hooks = disable

    def stop(self) -> None:
        """End counting, and put autograd's own functions back."""
        if self._disable is not None:
            torch.autograd.graph.disable_saved_tensors_hooks = self._disable
            self._disable = None
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def take(self) -> dict[int, int]:
        """Return the bytes of each storage saved since the last call, without excluded ones ({}: not complete)."""
        found = {address: size for address, size in self._bytes.items() if not self._storages.excluded(address)}
        self._bytes.clear()
        return found if self.complete else {}

    def _step_aside(self) -> None:
        if self._hooks is not None:
            self.complete = False
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:  # a checkpointed block run again inside backward: short-lived
            return tensor
        try:
            storage = storage_of(tensor)
            if storage is not None:
                self._bytes[storage._cdata] = storage.nbytes()
                self._storages.watch(storage)
        except (RuntimeError, AttributeError):
            pass  # a tensor subclass without storage: not counted, never a reason to stop the script
        return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
