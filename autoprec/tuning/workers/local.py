"""Hosts: one running copy of the script per paired seed, started when first needed and ended with the search.

Starting a script is slow (imports, data, compilation) and a trial is short, so a host is started once and answers every
trial of its seed. The next seed's host is started in the background while the current one is busy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autoprec.errors import AutoPrecError
from autoprec.trial.driver.base import Runner
from autoprec.trial.protocol import HostInfo

#: (seed offset, folder for logs) -> runner
RunnerFactory = Callable[[int, Path], Runner]


class HostPool:
    """Runners by paired seed; seed 0 is the script as written."""

    def __init__(self, factory: RunnerFactory, run_dir: Path) -> None:
        self._factory, self._run_dir = factory, run_dir
        self._runners: dict[int, Runner] = {}
        self._infos: dict[int, Future[HostInfo]] = {}
        self._known: HostInfo | None = None  # what the first host found
        self._lock, self._closed = threading.Lock(), False
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host")

    def prepare(self, seed: int) -> None:
        """Begin to start the host of a seed in the background.

        Raises:
            AutoPrecError: the pool was closed: an interrupted search starts nothing new.
        """
        with self._lock:
            if self._closed:
                raise AutoPrecError("this search has ended", fix="start another, or --resume it")
            if seed not in self._infos:
                runner = self._runners[seed] = self._factory(seed, self._run_dir / f"host-{seed}")
                self._infos[seed] = self._starter.submit(self._start, runner)

    def _start(self, runner: Runner) -> HostInfo:
        if self._known is not None:
            runner.adopt(self._known)
        self._known = runner.start()
        return self._known

    def info(self, seed: int = 0, within_s: float | None = None) -> HostInfo:
        """Return what the host found, waiting for it.

        Args:
            seed: the paired seed.
            within_s: seconds that it is waited for at most; None: as long as it takes.

        Raises:
            ScriptError: the script failed before its first training step.
            TimeoutError: it is not there yet.
        """
        self.prepare(seed)
        return self._infos[seed].result(within_s)

    def host(self, seed: int = 0, within_s: float | None = None) -> Runner:
        """Return the host of a seed, once it has started; arguments and errors as :meth:`info`."""
        self.info(seed, within_s)
        return self._runners[seed]

    def slots(self, seed: int = 0) -> int:
        """Return how many trials the host of a seed can run at once without sharing a device."""
        self.info(seed)
        return self._runners[seed].size

    def release(self, seed: int) -> None:
        """End the host of a paired seed."""
        runner = self._runners.pop(seed, None)
        self._infos.pop(seed, None)
        if runner is not None:
            runner.close()

    @contextmanager
    def threads(self, count: int, name: str) -> Iterator[ThreadPoolExecutor]:
        """Lend threads that run trials; when the block is left by an error or Ctrl-C, running trials are ended.

        A plain ``ThreadPoolExecutor`` would wait for every running trial first: minutes, for somebody who wants out.
        """
        threads = ThreadPoolExecutor(max_workers=count, thread_name_prefix=name)
        try:
            yield threads
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            self.close()
            raise
        threads.shutdown()

    def close(self) -> None:
        """End all hosts."""
        with self._lock:
            self._closed = True
        self._starter.shutdown(wait=False, cancel_futures=True)
        for seed in list(self._runners):
            self.release(seed)

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
