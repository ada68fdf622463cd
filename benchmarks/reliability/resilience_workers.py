"""Killed trial children, hosts, Ray workers and Ray nodes; and how busy a driver of eight workers is."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.processes import marked_processes
from autoprec.trial.protocol import TrainSpec, TrialResult, TrialSpec
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.workers.local import RunnerFactory
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph

__all__ = ["children", "ray", "workers"]

Row = tuple[str, str, str]
TRAIN = """
import time, torch
torch.manual_seed(0)
model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(64, 64), torch.nn.ReLU())])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(400):
    x = torch.randn(64, 64)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    time.sleep(0.005)
"""
SECONDS, COUNT = 5.0, 160


def _search(folder: Path, factory: RunnerFactory, **changes: Any) -> Search:
    os.chdir(folder)
    (folder / "train.py").touch()
    values: dict[str, Any] = {"command": ("train.py",), "steps": 8, "seeds": 1, "force": True}
    options = SearchOptions(**(values | changes))
    return Search(options, ScriptCommand.parse(options.command), Listeners(), factory)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class _Played(SimulatedRunner):
    """Counts the CPU time that the simulated script itself takes: that would be the trial's, not the driver's."""

    seconds = 0.0
    _guard = threading.Lock()

    def run(self, spec: TrialSpec) -> TrialResult:
        before = time.thread_time()
        result = super().run(spec)
        with _Played._guard:
            _Played.seconds += time.thread_time() - before
        return result


class _Harassed(TrialRunner):
    """Loses its host or the trial's own process in every third trial of the search."""

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self.rng = random.Random(0)
        self.outcomes: list[tuple[str, TrialResult]] = []

    def run(self, spec: TrialSpec) -> TrialResult:
        if spec.kind != "train" or spec.policy is None or self.rng.random() > 0.5:
            return super().run(spec)
        kind, killed = self.rng.choice(["child", "host"]), []

        def strike() -> None:
            if self._host is None:
                return
            pids = [self._host.pid] if kind == "host" else _children(self._host.pid)
            killed.extend(pid for pid in pids if _kill(pid))

        timer = threading.Timer(self.rng.uniform(0.03, 0.08), strike)
        timer.start()
        result = super().run(spec)
        timer.join()
        if killed:
            self.outcomes.append((kind, result))
        return result


def _children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == str(parent):
            found.append(int(path.parent.name))
    return found


def children() -> list[Row]:
    """SIGKILL to trial children and hosts in the middle of a real search."""
    runners: list[_Harassed] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "train.py").write_text(TRAIN)
        command = ScriptCommand.parse(("train.py",), cwd=folder)

        def factory(seed: int, logs: Path) -> TrialRunner:
            runners.append(_Harassed(command, run_dir=logs, seed_offset=seed))
            return runners[-1]

        search = _search(folder, factory, trials=40)
        result = search.run()
        os.chdir("/")
    outcomes = [outcome for runner in runners for outcome in runner.outcomes]
    lost = [r for kind, r in outcomes if kind == "child"]
    hosts = [r for kind, r in outcomes if kind == "host"]
    named = sum(r.status == "oom" and "SIGKILL" in r.reason for r in lost)
    # a strike may come when the trial has its result already: then there is nothing to classify
    named += sum(r.ok for r in lost)
    left = sum(len(marked_processes(runner.mark)) for runner in runners)
    return [
        ("trial children killed: classified, or done before", f"{len(lost)}", f"{named}"),
        ("hosts killed: replaced, and the trial run again", f"{len(hosts)}", f"{sum(r.ok for r in hosts)}"),
        ("the search ends with an answer", "yes", f"yes: {result.verdict}, {result.trials}"),
        ("processes left", "0", str(left)),
    ]


def ray() -> list[Row]:
    """SIGKILL to Ray workers, and a Ray node that goes away with a running trial."""
    warnings.simplefilter("ignore")
    from ray.cluster_utils import Cluster

    from autoprec.tuning.workers import ray as ray_engine

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    connected = ray_engine.connect(cluster.address)
    ray_engine.ROOM_S = 10.0
    workers_kept = node_kept = 0
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "train.py").write_text(TRAIN)
            command = ScriptCommand.parse(("train.py",), cwd=folder)
            runner = ray_engine.RayRunner(command, folder / "ray", 0, slots=1, address=cluster.address)
            runner.start()
            for _ in range(5):
                actor = next(iter(runner._actors))
                pid = connected.get(actor.__ray_call__.remote(lambda _: os.getpid()))
                threading.Timer(0.5, _kill, (pid,)).start()
                workers_kept += runner.run(TrainSpec(steps=300, warmup=1)).ok
            runner.close()
            runner = ray_engine.RayRunner(command, folder / "ray", 0, slots=2, address=cluster.address)
            runner.start()
            actor = next(iter(runner._actors))
            home = connected.get(actor.__ray_call__.remote(lambda _: _node_of()))
            node = next(n for n in nodes if n.node_id == home)
            threading.Timer(0.5, cluster.remove_node, (node,), {"allow_graceful": False}).start()
            node_kept += runner.run(TrainSpec(steps=300, warmup=1)).ok
            after = runner.run(TrainSpec(steps=8, warmup=1)).ok
            runner.close()
    finally:
        connected.shutdown()
        cluster.shutdown()
    return [
        ("Ray workers killed in a trial: replaced, the trial run again", "5", str(workers_kept)),
        ("Ray node killed in a trial: the trial run on the other node", "1", str(node_kept)),
        ("trials go on with the nodes that are left", "yes", "yes" if after else "no"),
    ]


def _node_of() -> str:
    import ray as library

    return str(library.get_runtime_context().get_node_id())


class _Simulated:
    """What a Ray actor supervises when the script is simulated: see ``ray_engine._Supervisor``."""

    def __init__(self, _command: Any, _run_dir: str, seed: int) -> None:
        script = SimulatedScript(graph=simulated_graph(8, width=4096, tokens=16384), delay_s=SECONDS)
        script.device = "NVIDIA H100 80GB HBM3"
        self._runner = SimulatedRunner(script, seed)

    def start(self) -> dict[str, Any]:
        return {"info": self._runner.start().to_json()}

    def ready(self) -> bool:
        return True

    def run(self, spec: dict[str, Any]) -> dict[str, Any]:
        return {"result": self._runner.run(TrialSpec.from_json(spec)).to_json()}

    def close(self) -> None:
        self._runner.close()


def workers() -> list[Row]:
    """Eight local workers, then two Ray nodes of two slots, on 160 simulated trials of five seconds."""
    script = SimulatedScript(graph=simulated_graph(8, width=4096, tokens=16384), delay_s=SECONDS)
    script.device = "NVIDIA H100 80GB HBM3"
    rows = _driven("8 local workers", lambda seed, _: _Played(script, seed), 8)
    warnings.simplefilter("ignore")
    from ray.cluster_utils import Cluster

    from autoprec.tuning.workers import ray as ray_engine

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    connected = ray_engine.connect(cluster.address)
    ray_engine._Supervisor = _Simulated  # type: ignore[assignment, misc]
    try:
        rows += _driven(
            "2 Ray nodes x 2 slots",
            lambda seed, folder: ray_engine.RayRunner(
                ScriptCommand.parse((sys.executable,)), folder, seed, slots=4, address=cluster.address
            ),
            4,
        )
    finally:
        connected.shutdown()
        cluster.shutdown()
    return rows


def _driven(name: str, factory: RunnerFactory, count: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        _Played.seconds, busy, began = 0.0, time.process_time(), time.monotonic()
        search = _search(Path(scratch), factory, trials=COUNT, workers=count, space="hopper-fp8")
        search.run()
        busy, wall = time.process_time() - busy - _Played.seconds, time.monotonic() - began
        records = [record for record in search.records if record.kind in ("preset", "search")]
        os.chdir("/")
    different = len({repr(sorted(record.params.items())) for record in records})
    numbers = len({record.number for record in records})
    return [
        (
            f"{name}: trials, different policies, different numbers",
            f"{COUNT} each",
            f"{len(records)}, {different}, {numbers}",
        ),
        (f"{name}: driver's CPU of the wall time of {wall:.0f} s", "< 5 %", f"{busy / wall:.1%}"),
        (f"{name}: driver's CPU per trial", "", f"{1000 * busy / COUNT:.0f} ms"),
    ]
