"""Ranks of one trial meet at one port, those of another trial at another, whatever port the script fixes."""

import functools
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from autoprec.trial.inside.isolate.ports import is_here, note_own, own_port, use_own_ports
from tests.warm import Forked, run_ranks


def rank_of_a_job(folder: Path, rank: int, port: int, add: float) -> None:
    """Be one rank of a job that meets at a fixed port, as a script that sets MASTER_PORT itself."""
    use_own_ports(lambda: folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    value = torch.tensor(add)
    dist.all_reduce(value)
    print(float(value))


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
        undo = use_own_ports(lambda: folder)
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
        port = free.getsockname()[1]
    jobs = [(tmp_path / folder, rank, port, add) for folder, add in (("a", 1.0), ("b", 10.0)) for rank in (0, 1)]
    running = [Forked(functools.partial(rank_of_a_job, *job), cwd=tmp_path) for job in jobs]
    said = [one.communicate().strip().splitlines() for one in running]
    assert [lines[-1:] for lines in said] == [["2.0"], ["2.0"], ["20.0"], ["20.0"]]


def moves_to_another_trial(folders: list[Path]) -> None:
    now = folders[0]
    undo = use_own_ports(lambda: now)
    try:
        now = folders[1]
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        print(*[(folder / "ports" / f"own-{store.port}").exists() for folder in folders])
    finally:
        undo()


def test_a_process_that_is_forked_for_a_trial_has_its_ports(tmp_path: Path) -> None:
    """A script that starts ranks itself is one from the second seed on, and they looked for its port elsewhere."""
    moved = Forked(functools.partial(moves_to_another_trial, [tmp_path / "zygote", tmp_path / "trial"]), cwd=tmp_path)
    assert moved.communicate().split() == ["False", "True"]
