"""Several GPUs behind one runner: which a script uses, which are free, and on which a trial runs."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace

from autoprec.trial.driver.base import Runner
from autoprec.trial.inside.observe.conditions import FOREIGN_MEMORY, ask_driver
from autoprec.trial.protocol import HostInfo, TrainSpec, TrialResult, TrialSpec
from autoprec.tuning.decide.metrics import step_time


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


def free_gpus(gpus: Sequence[str]) -> list[str]:
    """Return the GPUs on which no other program holds memory; all of them where every one is in use."""
    used = {gpu: ask_driver(["memory.used"], gpu) for gpu in gpus}
    return [gpu for gpu in gpus if not used[gpu].isdigit() or int(used[gpu]) << 20 <= FOREIGN_MEMORY] or list(gpus)


class SlotRunner(Runner):
    """Runs trials on whichever of several runners is free, one trial at a time on each, in their order.

    Timed trials never share a device: a slot is a device (or a set of devices) of its own. Devices of one machine
    differ by percents, and so do step times while others compile: what runs alone (references, duels, further seeds)
    therefore always has the first slot, and step times of another slot are multiplied by what the script as written
    took there, over what it took in the first.

    Args:
        whole: sees all GPUs, and finds out how many the script uses; where that is another number than those of a slot,
            it runs the trials.
        slots: one runner for each set of GPUs.
        gpus: how many a slot has.
        notes: for the user.
    """

    def __init__(self, whole: Runner, slots: Sequence[Runner], *, gpus: int = 1, notes: Sequence[str] = ()) -> None:
        self._whole, self._slots, self._gpus, self._notes = whole, list(slots), gpus, tuple(notes)
        self._free: queue.PriorityQueue[int] = queue.PriorityQueue()
        self._info: HostInfo | None = None
        self._adopted: HostInfo | None = None
        self._lock = threading.Lock()
        self._reference: tuple[TrialSpec, float] | None = None
        self._ratios: dict[int, float] = {}

    @property
    def size(self) -> int:
        return len(self._slots)

    def adopt(self, info: HostInfo) -> None:
        """Take over what the host of another seed found."""
        for runner in (self._whole, *self._slots):
            runner.adopt(info)

    def start(self) -> HostInfo:
        """Start the script with all GPUs in sight; the slots start with their first trial."""
        with self._lock:
            if self._info is None:
                info = self._whole.start()
                used = info.gpus * info.world_size
                if 1 <= used <= self._gpus:
                    for slot in self._slots:
                        slot.adopt(info)
                    info = replace(info, notes=(*info.notes, *self._notes))
                else:
                    self._slots = [self._whole]
                    why = f"the script uses {used} GPUs itself: trials run one at a time on all of them"
                    info = replace(info, notes=(*info.notes, why)) if used else info
                for number in range(len(self._slots)):
                    self._free.put(number)
                self._info = info
            return self._info

    def run(self, spec: TrialSpec) -> TrialResult:
        self.start()
        number = self._free.get()
        try:
            ratio = self._ratio(number) if isinstance(spec, TrainSpec) else 1.0
            result = self._slots[number].run(spec)
        finally:
            self._free.put(number)
        if isinstance(spec, TrainSpec) and result.ok and self._reference is None:
            self._reference = spec, step_time(result.step_ms, result.warmup)
        return result if ratio == 1.0 else replace(result, step_ms=tuple(ms * ratio for ms in result.step_ms))

    def _ratio(self, number: int) -> float:
        """Return the script's step time in the first slot over that in another, which is measured there once."""
        if number and number not in self._ratios and self._reference is not None:
            spec, first = self._reference
            result = self._slots[number].run(spec)
            self._ratios[number] = first / step_time(result.step_ms, result.warmup) if result.ok else 1.0
        return self._ratios.get(number, 1.0)

    def close(self) -> None:
        for runner in dict.fromkeys((*self._slots, self._whole)):
            runner.close()
