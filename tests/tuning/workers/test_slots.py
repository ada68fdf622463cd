from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from autoprec.trial.protocol import TrialResult, TrialSpec
from autoprec.tuning.workers.engines import gpu_slots
from autoprec.tuning.workers.slots import SlotRunner, visible_gpus
from tests.simulated import SimulatedRunner, SimulatedScript


class Exclusive(SimulatedRunner):
    """Notices when two trials share it."""

    def __init__(self) -> None:
        super().__init__(SimulatedScript())
        self.used, self.shared, self._busy = 0, False, threading.Lock()

    def run(self, spec: TrialSpec) -> TrialResult:
        if not self._busy.acquire(blocking=False):
            self.shared = True
            return TrialResult("crashed", "two trials on one device")
        try:
            time.sleep(0.005)
            self.used += 1
            return super().run(spec)
        finally:
            self._busy.release()


def test_timed_trials_never_share_a_device_and_use_all_of_them() -> None:
    slots = [Exclusive() for _ in range(3)]
    runner = SlotRunner(slots)
    with ThreadPoolExecutor(9) as threads:
        results = list(threads.map(lambda _: runner.run(TrialSpec(steps=4)), range(30)))
    assert all(result.ok for result in results)
    assert not any(slot.shared for slot in slots)
    assert sum(slot.used for slot in slots) == 30
    assert all(slot.used > 0 for slot in slots)


def test_visible_gpus_are_what_the_environment_says() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 5"}) == ["2", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []


def test_slots_of_several_gpus() -> None:
    assert gpu_slots(["0", "1", "2", "3"], 2) == ["0,1", "2,3"]
    assert gpu_slots([], 1) == []
    assert gpu_slots(["0", "1", "2"], 2) == ["0,1"]
