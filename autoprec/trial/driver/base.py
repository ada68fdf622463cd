"""The interface of what runs trials: one or several processes, a Ray cluster, or a formula in a test."""

from __future__ import annotations

from abc import ABC, abstractmethod

from autoprec.trial.protocol import HostInfo, TrialResult, TrialSpec


class Runner(ABC):
    """Runs the trials of one script under one paired seed; safe to call from several threads at once."""

    @property
    def size(self) -> int:
        """How many trials run at once without sharing a device."""
        return 1

    @abstractmethod
    def start(self) -> HostInfo:
        """Start the script and wait for its first training forward; a second call returns what the first did.

        Raises:
            ScriptError: the script failed before its first training step.
        """

    def adopt(self, info: HostInfo) -> None:  # noqa: B027
        """Take over what the host of another seed found, before :meth:`start`, where that is all a host would do."""

    @abstractmethod
    def run(self, spec: TrialSpec) -> TrialResult:
        """Run one trial and return how it ended, whatever it does.

        Raises:
            NoSpaceError: its files do not fit on the disk, which says nothing about the policy.
        """

    @abstractmethod
    def close(self) -> None:
        """End every process; a running trial is not waited for."""
