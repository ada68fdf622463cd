from __future__ import annotations

import threading
from pathlib import Path

import pytest

from autoprec.errors import ScriptError
from autoprec.trial.protocol import HostInfo, TrainSpec
from autoprec.tuning.workers.local import HostPool
from tests.simulated import SimulatedRunner, SimulatedScript


class Recorded(SimulatedRunner):
    closed: list[int]

    def close(self) -> None:
        self.closed.append(self.seed)


def pool(tmp_path: Path, closed: list[int], started: list[int]) -> HostPool:
    def make(seed: int, _folder: Path) -> Recorded:
        runner = Recorded(SimulatedScript(), seed)
        runner.closed = closed
        started.append(seed)
        return runner

    return HostPool(make, tmp_path)


def test_a_host_is_started_once_when_first_needed_and_ended_with_the_pool(tmp_path: Path) -> None:
    closed: list[int] = []
    started: list[int] = []
    with pool(tmp_path, closed, started) as hosts:
        hosts.prepare(1)
        assert hosts.host(1).run(TrainSpec(steps=4)).ok
        assert hosts.host(0).run(TrainSpec(steps=4)).ok
        assert hosts.host(1).run(TrainSpec(steps=4)).ok
        assert started == [1, 0]
        hosts.release(1)
        assert closed == [1]
    assert sorted(closed) == [0, 1]


def test_later_seeds_take_over_what_the_first_host_found(tmp_path: Path) -> None:
    adopted: list[int] = []

    class Adopting(SimulatedRunner):
        def adopt(self, info: HostInfo) -> None:
            assert info.layers
            adopted.append(self.seed)

    with HostPool(lambda seed, _folder: Adopting(SimulatedScript(), seed), tmp_path) as hosts:
        for seed in (0, 1, 2):
            hosts.info(seed)
    assert adopted == [1, 2]


def test_a_host_is_waited_for_no_longer_than_there_is_time(tmp_path: Path) -> None:
    may = threading.Event()

    class Slow(SimulatedRunner):
        def start(self) -> HostInfo:
            may.wait(30)
            return super().start()

    with HostPool(lambda seed, _folder: Slow(SimulatedScript(), seed), tmp_path) as hosts:
        for asked in (hosts.info, hosts.host):
            with pytest.raises(TimeoutError):
                asked(0, 0.02)  # type: ignore[operator]
        may.set()
        assert hosts.info(0, 30.0).layers, "it is started once, and may still be used"


def test_a_script_that_fails_is_reported_where_its_host_is_needed(tmp_path: Path) -> None:
    class Failing(SimulatedRunner):
        def start(self) -> HostInfo:
            raise ScriptError("it raised before its first step")

    with HostPool(lambda seed, _folder: Failing(SimulatedScript(), seed), tmp_path) as hosts:
        hosts.prepare(0)
        with pytest.raises(ScriptError, match="first step"):
            hosts.host().run(TrainSpec())
