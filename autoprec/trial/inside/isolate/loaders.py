"""DataLoader workers and forking do not go together: load in the training process instead, and do not charge for it.

Worker processes do not survive a fork of their parent. In a host that may be forked every DataLoader is therefore
iterated without workers; map-style data come in the same order. The CPU time that workers would have spent is taken off
the step. A trial that is a process of its own has the script's workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter


class Loading:
    """Iterates DataLoaders without their workers until :meth:`undo`.

    Attributes:
        loaders: how many iterators have had no workers for that.
        iterable: whether one of them was over an IterableDataset.
        charge: called with the CPU seconds of loading that worker processes would have done.
    """

    def __init__(self) -> None:
        self.loaders = 0
        self.iterable = False
        self.charge: Callable[[float], None] = lambda _seconds: None
        original = self._original = DataLoader.__iter__

        # the loader itself stays as the script made it: a trial that is a process of its own may inherit it
        def __iter__(loader: Any) -> Any:  # noqa: N807
            if not loader.num_workers:
                return original(loader)
            self.loaders += 1
            self.iterable |= isinstance(loader.dataset, IterableDataset)
            settings = loader.num_workers, loader.timeout
            loader.num_workers = loader.timeout = 0
            try:
                return _Iterator(loader, self)
            finally:
                loader.num_workers, loader.timeout = settings

        DataLoader.__iter__ = __iter__  # type: ignore[method-assign]

    def undo(self) -> None:
        """Give DataLoaders their workers back."""
        DataLoader.__iter__ = self._original  # type: ignore[method-assign]


class _Iterator(_SingleProcessDataLoaderIter):
    def __init__(self, loader: Any, loading: Loading) -> None:
        super().__init__(loader)
        self._loading = loading

    def _next_data(self) -> Any:
        start = time.process_time()
        try:
            return super()._next_data()  # type: ignore[no-untyped-call]
        finally:
            self._loading.charge(time.process_time() - start)
