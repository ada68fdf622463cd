"""Counts the bytes autograd saves for backward, and steps aside where that is not allowed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autoprec.graph.storages import StorageTable, storage_of

__all__ = ["SavedTensors"]


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
        """Install the hooks."""
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
        """Take the hooks off."""
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
