"""A scan's process that stays at its step: every later scan of the same step is a fork of it.

The scans of a search ask for gradient errors at one step of the script under one policy, each with other probes. Its
warm-up is trained once for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

from autoprec.support.files import canonical_json
from autoprec.support.plain import Document
from autoprec.trial.driver.forks import ForkedProcess, Forks
from autoprec.trial.driver.process_tree import ProcessTree
from autoprec.trial.protocol import ScanSpec


class Staying:
    """The one process of a runner that stays at the step of its last scan."""

    def __init__(self) -> None:
        self._step = ""
        self._process: ProcessTree | None = None
        self._forks: Forks | None = None
        self._lock = threading.Lock()

    def hold(self, spec: ScanSpec, process: ProcessTree, forks: Forks) -> None:
        """Keep a process that has come to the step of a scan, and end the one before.

        Args:
            spec: the scan.
            process: the process.
            forks: the connection to it.
        """
        self.end()
        with self._lock:
            self._step, self._process, self._forks = _step_of(spec), process, forks

    def fork(self, spec: ScanSpec, config: Document, environment: Mapping[str, str], mark: str) -> ForkedProcess | None:
        """Start a scan in a fork of the process that stays at its step; None where none does.

        Args:
            spec: the scan.
            config: the configuration of its process.
            environment: variables that it has beside the other's.
            mark: the mark by which its processes are found.
        """
        with self._lock:
            forks = self._forks if self._step == _step_of(spec) else None
        return None if forks is None else forks.fork(config, environment, mark, None)

    def end(self) -> None:
        """End the process; nothing where there is none."""
        with self._lock:
            process, forks = self._process, self._forks
            self._step, self._process, self._forks = "", None, None
        if forks is not None:
            forks.end()
        if process is not None:
            process.wait(1.0)
            process.end()


def _step_of(spec: ScanSpec) -> str:
    """Return what says at which step, and under what, a scan asks."""
    asked = replace(spec, probes=(), timeout_s=0.0, within_s=None, noise_batches=1, side_by_side=1, log="")
    return canonical_json(asked.to_json())
