"""Trials that are forks share nothing: not the position of an open file, not memory, not what they remove."""

from __future__ import annotations

import mmap
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprec.trial.inside.isolate import sharing
from autoprec.trial.inside.isolate.overlay import Overlay
from autoprec.trial.protocol import Probe, ScanSpec, TrainSpec
from tests.trial.conftest import uniform
from tests.warm import Forked, run_forked

LOOPS = Path(__file__).parents[4] / "benchmarks" / "scripts" / "odd_loops"


@pytest.fixture(params=["mounts", "no mounts"])
def nets(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment in which the kernel lays a copy over the user's files, and one in which it cannot."""
    return {} if request.param == "mounts" else {"AUTOPREC_TRIAL_MOUNTED": ""}


def losses(script: str, *arguments: str, cwd: Path) -> list[float]:
    """What the script prints when nothing of ours is around it."""
    (cwd / "plain").mkdir()
    done = run_forked([LOOPS / script, *arguments], cwd / "plain")
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]


# What is in memory alone is found in the same way with mounts and without.
@pytest.mark.parametrize(
    ("script", "arguments", "launch", "nets"),
    [
        ("streaming_text.py", (), "fork", "mounts"),
        ("streaming_text.py", (), "fork", "no mounts"),
        ("temporary_folder.py", (), "fork", "mounts"),
        ("temporary_folder.py", (), "fork", "no mounts"),
        ("memory_map.py", ("memmap",), "zygote", "mounts"),
        ("memory_map.py", ("memmap",), "zygote", "no mounts"),
        ("memory_map.py", ("tensor",), "zygote", "mounts"),
        ("memory_map.py", ("value",), "zygote", "mounts"),
        ("open_database.py", (), "zygote", "mounts"),
        ("open_database.py", (), "zygote", "no mounts"),
        ("open_database.py", ("log",), "zygote", "mounts"),
    ],
    indirect=["nets"],
)
def test_every_trial_is_the_script_by_itself(
    script: str, arguments: tuple[str, ...], launch: str, nets: dict[str, str], host: Any, tmp_path: Path
) -> None:
    alone = losses(script, *arguments, cwd=tmp_path)
    assert len(alone) == 40
    probes = tuple(Probe(f"none {number}", {"schema": "autoprec.policy/1"}) for number in range(2))
    with host(str(LOOPS / script), *arguments, environment=nets) as runner:
        info = runner.start()
        trials = [runner.run(TrainSpec(steps=steps, warmup=0)) for steps in (6, 3)]
        scan = runner.run(ScanSpec(warmup=2, probes=probes))
        trials += [runner.run(TrainSpec(steps=6, warmup=0))]
    assert info.launch == launch, info.notes
    for trial in trials:
        assert trial.status == "ok", trial.reason + trial.tail
        assert trial.losses == pytest.approx(alone[: len(trial.losses)], abs=1e-6)
    assert scan.answer.reference_loss == pytest.approx(alone[2], abs=1e-6)
    assert [row.gradient_error for row in scan.answer.probes] == [0.0, 0.0], scan.answer
    assert not list((tmp_path / "user").iterdir())


def test_a_trial_that_fails_removes_nothing_of_the_others(nets: dict[str, str], host: Any, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    environment = {**nets, "FAIL_IF_THERE": str(flag)}
    with host(str(LOOPS / "temporary_folder.py"), environment=environment) as runner:
        assert runner.start().launch == "fork"
        first = runner.run(TrainSpec(steps=6, warmup=0))
        flag.touch()
        failed = runner.run(TrainSpec(steps=6, warmup=0, policy=uniform("bf16")))
        flag.unlink()
        second = runner.run(TrainSpec(steps=6, warmup=0))
    assert failed.status == "crashed"
    assert "this run fails" in failed.reason
    assert second.status == "ok", second.reason
    assert second.losses == first.losses


# -------------------------------------------------------------------- what cannot be had twice
def holds_nothing() -> None:
    with open("data.txt", "w") as out:
        out.write("x")
    kept.append(open("data.txt"))  # noqa: SIM115
    kept.extend((mmap.mmap(kept[0].fileno(), 0, prot=mmap.PROT_READ), os.pipe(), socket.socketpair()))


def holds_a_written_file() -> None:
    kept.append(tempfile.TemporaryFile())  # noqa: SIM115


def holds_memory() -> None:
    kept.append(mmap.mmap(-1, 4096))


def holds_a_waiting_pipe() -> None:
    _reader, writer = os.pipe()
    os.write(writer, b"x")


def holds_a_pipe() -> None:
    kept.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))


def holds_a_connection() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    kept.extend((listener, socket.create_connection(listener.getsockname()), listener.accept()))


kept: list[Any] = []


@pytest.mark.parametrize(
    ("hold", "says"),
    [
        (holds_nothing, ""),
        (holds_a_written_file, "a file that is open for reading and writing"),
        (holds_memory, "memory that is shared for writing"),
        (holds_a_waiting_pipe, "a pipe with data in it"),
        (holds_a_pipe, "a pipe to another process"),
        (holds_a_connection, "an open connection (127.0.0.1:"),
    ],
)
def test_what_forks_would_share_is_named(hold: Callable[[], None], says: str, tmp_path: Path) -> None:
    def body() -> None:
        hold()
        print("found:", sharing.shared_state())

    child = Forked(body, cwd=tmp_path)
    said = child.communicate()
    assert child.returncode == 0, said
    found = said.rpartition("found: ")[2].strip()
    assert found.startswith(says)
    assert bool(found) == bool(says)


# -------------------------------------------------------------------- descriptions of one's own
def test_duplicates_still_move_together_and_others_do_not(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("0123456789")
    overlay = Overlay(str(tmp_path / "layer"), [str(tmp_path)], [])

    def body() -> None:
        first = os.open("data", os.O_RDONLY)
        second, other = os.dup(first), os.open("data", os.O_RDONLY)
        gone = os.open("data", os.O_RDONLY)
        os.lseek(first, 3, os.SEEK_SET)
        files = sharing.open_files(overlay)
        if os.fork() == 0:
            sharing.reopen(files, overlay)
            os.read(first, 4)
            assert os.lseek(second, 0, os.SEEK_CUR) == 7
            assert os.lseek(other, 0, os.SEEK_CUR) == 0
            os._exit(0)
        assert os.wait()[1] == 0
        assert os.lseek(first, 0, os.SEEK_CUR) == 3
        os.remove("data")
        files = sharing.open_files(overlay)
        assert {file.path for file in files} == {""}
        if os.fork() == 0:
            sharing.reopen(files, overlay)
            assert os.read(gone, 2) == b"01"
            os._exit(0)
        assert os.wait()[1] == 0
        assert os.read(gone, 2) == b"01", "the fork has moved its own position"

    child = Forked(body, cwd=tmp_path)
    assert child.communicate() == ""
    assert child.returncode == 0


@pytest.mark.parametrize("inheritable", [False, True])
@pytest.mark.parametrize(
    ("closed", "opened"),
    [("first", ""), ("second", ""), ("other", ""), ("first second other", ""), ("other", "late"), ("first", "late")],
)
def test_what_is_closed_after_it_was_listed_is_left_alone(
    closed: str, opened: str, inheritable: bool, tmp_path: Path
) -> None:
    (tmp_path / "data").write_text("0123456789")
    (tmp_path / "late").write_text("abcdefghij")
    overlay = Overlay(str(tmp_path / "layer"), [str(tmp_path)], [])

    def body() -> None:
        first = os.open("data", os.O_RDONLY)
        held = {"first": first, "second": os.dup(first), "other": os.open("data", os.O_RDONLY)}
        for number in held.values():
            os.set_inheritable(number, inheritable)
        files = sharing.open_files(overlay)
        for name in closed.split():
            os.close(held.pop(name))
        late = os.open(opened, os.O_RDONLY) if opened else -1  # takes the number of what was closed
        if os.fork() == 0:
            sharing.reopen(files, overlay)
            assert all(os.read(held[name], 2) == b"01" for name in ("other", "second") if name in held)
            if "first" in held and "second" in held:
                assert os.read(held["first"], 2) == b"23"
            assert late < 0 or os.read(late, 2) == b"ab"
            os._exit(0)
        assert os.wait()[1] == 0
        assert all(os.lseek(number, 0, os.SEEK_CUR) == 0 for number in held.values())

    child = Forked(body, cwd=tmp_path)
    assert child.communicate() == ""
    assert child.returncode == 0
