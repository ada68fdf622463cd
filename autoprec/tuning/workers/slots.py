"""Several places to run trials behind one runner: a free one is taken, used, and given back."""

from __future__ import annotations

import queue
import subprocess
from collections.abc import Sequence

from autoprec.trial.driver.base import Runner
from autoprec.trial.protocol import HostInfo, TrialResult, TrialSpec


def visible_gpus(environment: dict[str, str]) -> list[str]:
    """Return the GPUs this process may use, as ``CUDA_VISIBLE_DEVICES`` names them; nothing is initialised.

    ``CUDA_VISIBLE_DEVICES`` where it is set, else what ``nvidia-smi -L`` lists, else none.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [part.strip() for part in named.split(",") if part.strip() and part.strip() != "-1"]
    return [str(index) for index, line in enumerate(listed_gpus()) if line.startswith("GPU ")]


def listed_gpus() -> list[str]:
    """Return the lines of ``nvidia-smi -L``: GPUs and their MIG devices, with names and UUIDs; none without it."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.splitlines()


class SlotRunner(Runner):
    """Runs trials on whichever of several runners is free, one trial at a time on each.

    Timed trials never share a device: a slot is a device (or a set of devices) of its own.
    """

    def __init__(self, slots: Sequence[Runner]) -> None:
        self._slots = list(slots)
        self._free: queue.SimpleQueue[Runner] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)

    @property
    def size(self) -> int:
        return len(self._slots)

    def start(self) -> HostInfo:
        """Start the first slot; the others start with their first trial."""
        return self._slots[0].start()

    def run(self, spec: TrialSpec) -> TrialResult:
        slot = self._free.get()
        try:
            return slot.run(spec)
        finally:
            self._free.put(slot)

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
