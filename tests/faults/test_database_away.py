"""A PostgreSQL server that dies in the middle of a search and comes back, or does not, or is slow."""

from __future__ import annotations

import importlib.util
import os
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import StudyError
from autoprec.policy import load_policy
from autoprec.trial.command import ScriptCommand
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.study import storage
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph

missing = [name for name in ("pgserver", "psycopg2") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"needs a PostgreSQL server: pip install {' '.join(missing)}"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Notes:
    """Collects notes, and calls a function when the search says that the server is away."""

    def __init__(self, away: Callable[[], Any] = lambda: None) -> None:
        self.texts: list[str] = []
        self.away = away

    def note(self, text: str) -> None:
        self.texts.append(text)
        if "does not answer" in text:
            self.away()

    def phase(self, name: str, detail: str = "") -> None: ...
    def started(self, info: Any) -> None: ...
    def trial(self, *values: Any) -> None: ...
    def finished(self, result: Any) -> None: ...


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pgserver

        found = pgserver.get_server(Path(tempfile.mkdtemp(prefix="autoprec-postgres-")), cleanup_mode="delete")
    yield found
    found.cleanup()


def kill(server: Any) -> None:
    """End the server at once, as a crash would, and return when nobody listens any more."""
    stat = Path(f"/proc/{server.get_pid()}/stat")
    os.kill(server.get_pid(), signal.SIGQUIT)
    until = time.monotonic() + 30
    with suppress(FileNotFoundError, ProcessLookupError):
        while " Z " not in stat.read_text() and time.monotonic() < until:
            time.sleep(0.01)


def search(server: Any, notes: Notes, study: str, hook: Any, **changes: Any) -> Search:
    script = SimulatedScript(graph=simulated_graph(2, width=4096, tokens=16384), device="NVIDIA H100 80GB HBM3")

    class Hooked(SimulatedRunner):
        def run(self, spec: Any) -> Any:
            hook(len(script.calls))
            return super().run(spec)

    url = server.get_uri().replace("postgresql://", "postgresql+psycopg2://")
    options = SearchOptions(
        command=("train.py",), study=study, storage=url, trials=10, steps=8, seeds=2, space="hopper-fp8", force=True,
        sampler="random", **changes,
    )  # fmt: skip
    command = ScriptCommand.parse(options.command)
    return Search(options, command, Listeners(notes), lambda seed, _: Hooked(script, seed))


def test_a_server_that_restarts_is_waited_for_and_one_that_does_not_is_named(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    search(server, Notes(), "plain", lambda _: None).run()
    expected = load_policy("policy.yaml")

    restarts: list[threading.Timer] = []

    def back_in_a_second() -> None:
        restarts.append(threading.Timer(1.0, server.ensure_postgres_running))
        restarts[-1].start()

    notes = Notes(away=back_in_a_second)
    restarted = search(server, notes, "restarted", lambda calls: kill(server) if calls in (7, 12) else None)
    restarted.run()
    for thread in restarts:
        thread.join()
    numbers = [record.number for record in restarted.records]
    assert len(numbers) == len(set(numbers))
    assert load_policy("policy.yaml").layers == expected.layers
    assert sum("does not answer" in text for text in notes.texts) == len(restarts) == 2
    assert sum("is back" in text for text in notes.texts) == 2

    monkeypatch.setattr(storage.patiently, "__kwdefaults__", {"patience_s": 1.0})
    with pytest.raises(StudyError) as away:
        search(server, Notes(), "away", lambda calls: kill(server) if calls == 9 else None).run()
    assert "cannot be used" in away.value.what
    assert "--resume" in away.value.fix
    server.ensure_postgres_running()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert search(server, Notes(), "away", lambda _: None, resume=True).run().policy == "policy.yaml"
    assert load_policy("policy.yaml").layers == expected.layers
    print("2 restarts waited for, 1 server that stayed away, 0 trials lost or stored twice")


def test_a_slow_server_only_costs_its_time(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    pid, frozen = server.get_pid(), []

    def freeze(calls: int) -> None:
        if calls != 8:
            return
        group = [pid]
        for process in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = process.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == str(pid):
                group.append(int(process.parent.name))
        for number in group:
            os.kill(number, signal.SIGSTOP)
        frozen.append(time.monotonic())

        def thaw() -> None:
            for number in group:
                os.kill(number, signal.SIGCONT)

        threading.Timer(2.0, thaw).start()

    notes = Notes()
    search(server, notes, "slow", freeze).run()
    assert time.monotonic() - frozen[0] >= 1.5
    assert not any("does not answer" in text for text in notes.texts)
