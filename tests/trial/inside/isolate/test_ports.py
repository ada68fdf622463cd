"""Ranks of one trial meet at one port, those of another trial at another, whatever port the script fixes."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import distributed as dist

from autoprec.trial.inside.isolate.ports import is_here, note_own, own_port, use_own_ports
from tests.documents import ROOT
from tests.warm import run_ranks

#: One rank of a job that meets at the port of its arguments, as a script that sets MASTER_PORT itself.
RANK = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from autoprec.trial.inside.isolate.ports import use_own_ports
folder, rank, port, add = sys.argv[1:]
use_own_ports(Path(folder))
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": "2"}
dist.init_process_group("gloo")
value = torch.tensor(float(add))
dist.all_reduce(value)
print(float(value))
"""


def test_ranks_of_a_trial_agree_and_trials_do_not(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: own_port(one, 29500), range(8)))
    assert len(found) == 1
    assert found != {own_port(other, 29500)}
    assert own_port(one, 29500) != own_port(one, 29501)


def test_a_port_that_is_the_trials_own_and_any_port_stay(tmp_path: Path) -> None:
    own = own_port(tmp_path, 29500)
    assert own_port(tmp_path, own) == own, "torchrun hands the port of its store to its workers"
    assert own_port(tmp_path, 0) == 0
    note_own(tmp_path, 12345)
    assert own_port(tmp_path, 12345) == 12345


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "", socket.gethostname()])
def test_this_machine_has_many_names(host: str) -> None:
    assert is_here(host)
    assert not is_here("node-17.cluster")


def stores_meet(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        undo = use_own_ports(folder)
        try:
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            joined = dist.TCPStore("127.0.0.1", port, None, False)
            joined.set("key", "value")
            assert store.get("key") == b"value"
            assert store.port == own_port(folder, port) != port
            chosen = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            assert own_port(folder, chosen.port) == chosen.port
        finally:
            undo()
        with pytest.raises((dist.DistNetworkError, RuntimeError)):
            dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def test_a_store_listens_at_the_trials_own_port_and_says_so(tmp_path: Path) -> None:
    """In a fork: what libuv keeps for its signals, a pipe with a byte in it, would keep later scripts from forking."""
    ended = run_ranks(lambda _rank: stores_meet(tmp_path), cwd=tmp_path, ranks=1)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_two_jobs_of_one_fixed_port_at_once_each_have_their_own_ranks(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    jobs = [(folder, rank, add) for folder, add in (("a", "1"), ("b", "10")) for rank in ("0", "1")]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / folder), rank, port, add],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        )
        for folder, rank, add in jobs
    ]  # fmt: skip
    assert [one.communicate(timeout=120)[0].strip() for one in running] == ["2.0", "2.0", "20.0", "20.0"]
