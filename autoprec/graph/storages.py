"""Tells tensors apart by their storage, without keeping any of them alive."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["StorageTable", "storage_of"]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None for sparse and other tensors that have none."""
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # NotImplementedError is one of them
        return None


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
        """Return what identifies a tensor's contents and view; registers its storage."""
        storage = storage_of(tensor)
        if storage is None:
            return (id(tensor),)  # by object
        address = storage._cdata
        self.watch(storage)
        if tensor.layout is not torch.strided:
            return (address, tuple(tensor.shape), tensor.dtype)
        return (address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)

    def address(self, tensor: torch.Tensor) -> int:
        """Return what the views of one storage have in common, 0 for a tensor without storage."""
        storage = storage_of(tensor)
        return 0 if storage is None else int(storage._cdata)

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Keep a storage's address from being reused."""
        if storage._cdata not in self._weak:
            self._weak[storage._cdata] = (storage._weak_ref(), storage.nbytes())

    def exclude(self, tensor: torch.Tensor) -> None:
        """Leave a tensor's storage out of activation memory: a parameter, a buffer, or the batch."""
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

    def release(self) -> None:
        """Give the weak references back."""
        free: Any = torch.UntypedStorage._free_weak_ref
        for weak, _ in self._weak.values():
            free(weak)
        self._weak.clear()
