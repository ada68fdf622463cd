"""DataLoader workers and forking do not go together: load in the training process instead, and do not charge for it.

Worker processes do not survive a fork of their parent. In a host every DataLoader is therefore built without workers;
map-style data come in the same order. The CPU time that workers would have spent is taken off the step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch.utils.data.dataloader as dataloader
from torch.utils.data import IterableDataset


class Loading:
    """What was changed, and the CPU seconds spent on loading that worker processes would have done."""

    def __init__(self) -> None:
        self.loaders = 0
        self.iterable = False
        self.charge: Callable[[float], None] = lambda _seconds: None


def load_in_process() -> Loading:
    """From now on build every DataLoader with ``num_workers=0``; returns the record of what that changed."""
    loading = Loading()
    original = dataloader.DataLoader.__init__

    @functools.wraps(original)
    def __init__(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if kwargs.get("num_workers", 0) or len(args) > 4:
            changed = dict(kwargs)
            positional = list(args)
            if len(positional) > 4 and positional[4]:
                changed["num_workers"], positional[4] = positional[4], 0
            if changed.get("num_workers", 0):
                loading.loaders += 1
                loading.iterable |= isinstance(dataset, IterableDataset)
                changed.pop("num_workers")
                for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout"):
                    changed.pop(name, None)
                original(self, dataset, *positional, **changed)
                self.__dict__["_autoprec_had_workers"] = True
                return
        original(self, dataset, *args, **kwargs)

    dataloader.DataLoader.__init__ = __init__  # type: ignore[method-assign]
    fetch = dataloader._SingleProcessDataLoaderIter._next_data

    def _next_data(self: Any) -> Any:
        start = time.process_time()
        try:
            return fetch(self)  # type: ignore[no-untyped-call]
        finally:
            if self.__dict__.get("_autoprec_free"):
                loading.charge(time.process_time() - start)

    make = dataloader.DataLoader._get_iterator

    def _get_iterator(self: Any) -> Any:
        iterator = make(self)
        if self.__dict__.get("_autoprec_had_workers"):
            iterator.__dict__["_autoprec_free"] = True
        return iterator

    dataloader._SingleProcessDataLoaderIter._next_data = _next_data  # type: ignore[method-assign]
    dataloader.DataLoader._get_iterator = _get_iterator  # type: ignore[method-assign]
    return loading
