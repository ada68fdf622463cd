"""Tells tensors apart by their storage, without keeping any of them alive."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["StorageTable"]


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
        try:
            storage = tensor.untyped_storage()
            address = storage._cdata
        except (RuntimeError, NotImplementedError):  # sparse and other storage-less tensors: by object
            return (id(tensor),)
        if address not in self._weak:
            self._weak[address] = (storage._weak_ref(), storage.nbytes())
        if tensor.layout is not torch.strided:
            return (address, tuple(tensor.shape), tensor.dtype)
        return (address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)

    def address(self, tensor: torch.Tensor) -> int:
        """Return what the views of one storage have in common, 0 for a tensor without storage."""
        try:
            return int(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):
            return 0

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Keep a storage's address from being reused."""
        if storage._cdata not in self._weak:
            self._weak[storage._cdata] = (storage._weak_ref(), storage.nbytes())

    def exclude(self, tensor: torch.Tensor) -> None:
        """Leave a tensor's storage out of activation memory: a parameter, a buffer, or the batch."""
        try:
            self._excluded.add(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):
            return

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
