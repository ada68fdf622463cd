"""Trials on a real Ray cluster of this machine: results equal local ones, and lost workers are replaced."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import ScriptError
from autoprec.support.optional import is_available
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.protocol import TrainSpec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_available("ray"), reason="Ray is not installed: pip install 'autoprec[ray]'"),
]

TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(400):
    loss = model(torch.randn(64, 16)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.fixture(scope="module")
def before() -> set[str]:
    """Who listened before the cluster was started."""
    return listening()


@pytest.fixture(scope="module")
def ray(before: set[str]) -> Iterator[Any]:
    from autoprec.tuning.workers.ray import connect

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = connect("")
        yield found
        found.shutdown()


@pytest.fixture
def command(tmp_path: Path) -> ScriptCommand:
    (tmp_path / "train.py").write_text(TRAIN)
    return ScriptCommand.parse(("train.py",), cwd=tmp_path)


def hosts_of(folder: Path) -> list[str]:
    """Processes that still run in a folder: a killed worker must not leave its script behind."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.readlink() == folder:
                found.append(link.parent.name)
        except OSError:
            continue
    return found


def listening() -> set[str]:
    """Addresses on which processes of this user listen for TCP; a table is read, nothing is asked."""
    found = set()
    for name, loopback in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            mapped = "0000000000000000FFFF00000100007F"
            if fields[3] == "0A" and int(fields[7]) == os.getuid() and address not in (loopback, mapped):
                found.add(f"{address}:{int(port, 16)}")
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_cluster_of_our_own_listens_on_the_loopback(before: set[str], ray: Any) -> None:
    assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")
    assert listening() - before == set()


@pytest.mark.filterwarnings("ignore")
def test_results_equal_local_ones(ray: Any, command: ScriptCommand, tmp_path: Path) -> None:
    from autoprec.tuning.workers.ray import RayRunner

    remote = RayRunner(command, tmp_path / "ray", 0, slots=1)
    try:
        assert remote.start().launch == "fork"
        far = remote.run(TrainSpec(steps=6, warmup=1))
    finally:
        remote.close()
    with TrialRunner(command, run_dir=tmp_path / "local") as local:
        near = local.run(TrainSpec(steps=6, warmup=1))
    assert far.ok, far
    assert far.losses == near.losses


@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_is_replaced_and_its_trial_run_again(ray: Any, command: ScriptCommand, tmp_path: Path) -> None:
    from autoprec.tuning.workers.ray import RayRunner

    remote = RayRunner(command, tmp_path / "ray", 0, slots=1)
    try:
        remote.start()
        pid = ray.get(next(iter(remote._actors)).__ray_call__.remote(lambda _: os.getpid()))

        def kill() -> None:
            time.sleep(0.3)
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        result = remote.run(TrainSpec(steps=300, warmup=1))
        killer.join()
    finally:
        remote.close()
    assert result.ok, result
    assert len(result.losses) == 301
    deadline = time.monotonic() + 20
    while hosts_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert hosts_of(tmp_path) == []


@pytest.mark.filterwarnings("ignore")
def test_a_failing_script_is_a_script_error_here_too(ray: Any, tmp_path: Path) -> None:
    from autoprec.tuning.workers.ray import RayRunner

    (tmp_path / "broken.py").write_text("raise SystemExit('no data')")
    remote = RayRunner(ScriptCommand.parse(("broken.py",), cwd=tmp_path), tmp_path / "ray", 0, slots=1)
    try:
        with pytest.raises(ScriptError, match="no data"):
            remote.start()
    finally:
        remote.close()
