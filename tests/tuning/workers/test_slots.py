from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from autoprec.trial.protocol import HostInfo, TrainSpec, TrialResult, TrialSpec
from autoprec.tuning.decide.metrics import step_time
from autoprec.tuning.workers.engines import gpu_slots
from autoprec.tuning.workers.slots import SlotRunner, free_gpus, visible_gpus
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
    runner = SlotRunner(OnGpus(1), slots)
    with ThreadPoolExecutor(9) as threads:
        results = list(threads.map(lambda _: runner.run(TrainSpec(steps=4)), range(30)))
    assert all(result.ok for result in results)
    assert not any(slot.shared for slot in slots)
    assert 30 <= sum(slot.used for slot in slots) <= 32  # with the reference on each further one
    assert all(slot.used > 0 for slot in slots)


class OnGpus(SimulatedRunner):
    """A script on GPUs whose trials are processes; ``slower`` is its GPU's step time over another's."""

    def __init__(self, gpus: int, slower: float = 1.0) -> None:
        super().__init__(SimulatedScript())
        self.info = replace(super().start(), launch="zygote", gpus=gpus)
        self.slower, self.hosts, self.runs = slower, 0, 0
        self.adopted: HostInfo | None = None
        self.hold = threading.Event()
        self.hold.set()

    def adopt(self, info: HostInfo) -> None:
        self.adopted = info

    def start(self) -> HostInfo:
        if self.adopted is None:
            self.hosts, self.adopted = self.hosts + 1, self.info
        return self.adopted

    def run(self, spec: TrialSpec) -> TrialResult:
        self.start()
        self.runs += 1
        self.hold.wait(20)
        result = super().run(spec)
        return replace(result, step_ms=tuple(ms * self.slower for ms in result.step_ms))


def test_what_runs_alone_has_one_gpu_and_other_gpus_are_compared_by_their_own_reference() -> None:
    slots = [OnGpus(1), OnGpus(1, slower=1.25), OnGpus(1, slower=0.8)]
    runner = SlotRunner(OnGpus(1), slots)
    reference = runner.run(TrainSpec(steps=4))
    for _ in range(4):
        runner.run(TrainSpec(steps=4))
    assert [slot.runs for slot in slots] == [5, 0, 0]
    slots[0].hold.clear()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(runner.run, TrainSpec(steps=4))
        while slots[0].runs < 6:
            time.sleep(0.001)
        other = runner.run(TrainSpec(steps=4))
        slots[0].hold.set()
        first.result()
    assert slots[1].runs == 2  # the reference, and what was asked
    assert step_time(other.step_ms, other.warmup) == pytest.approx(step_time(reference.step_ms, reference.warmup))


@pytest.mark.parametrize(("gpus", "size", "hosts"), [(1, 3, 0), (4, 1, 1), (0, 1, 1)])
def test_a_script_that_uses_several_gpus_itself_keeps_them(gpus: int, size: int, hosts: int) -> None:
    whole, slots = OnGpus(gpus), [OnGpus(gpus) for _ in range(3)]
    runner = SlotRunner(whole, slots, notes=["GPU 7 is busy"])
    info = runner.start()
    assert runner.size == size
    assert runner.run(TrainSpec(steps=4)).ok
    assert (whole.runs, whole.hosts) == (hosts, 1)
    assert sum(slot.hosts for slot in slots) == 0, "one host has said what the script is"
    assert len(info.notes) == bool(gpus)


def test_gpus_whose_memory_other_programs_hold_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {"0": "12", "1": "70000", "2": "[N/A]", "3": ""}
    monkeypatch.setattr("autoprec.tuning.workers.slots.ask_driver", lambda fields, gpu: used[gpu])
    assert free_gpus(["0", "1", "2", "3"]) == ["0", "2", "3"]
    assert free_gpus(["1"]) == ["1"]


def test_visible_gpus_are_what_the_environment_says() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 5"}) == ["2", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []


def test_slots_of_several_gpus() -> None:
    assert gpu_slots(["0", "1", "2", "3"], 2) == ["0,1", "2,3"]
    assert gpu_slots([], 1) == []
    assert gpu_slots(["0", "1", "2"], 2) == ["0,1"]
