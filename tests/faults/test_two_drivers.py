"""Two drivers and one study: the second is refused and told who holds it, wherever it was started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import StudyError
from autoprec.trial.command import ScriptCommand
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import SearchOptions
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph


def search(storage: str, hook: Any, **changes: Any) -> Search:
    script = SimulatedScript(graph=simulated_graph(1, width=4096, tokens=16384), device="NVIDIA H100 80GB HBM3")

    class Hooked(SimulatedRunner):
        def run(self, spec: Any) -> Any:
            hook(len(script.calls))
            return super().run(spec)

    options = SearchOptions(
        command=("train.py",), study="s", storage=storage, trials=4, steps=8, seeds=1, force=True,
        space="hopper-fp8", **changes,
    )  # fmt: skip
    command = ScriptCommand.parse(options.command)
    return Search(options, command, Listeners(), lambda seed, _: Hooked(script, seed))


@pytest.mark.parametrize("named", [False, True], ids=["the default storage", "one database, two folders"])
def test_the_second_driver_is_refused(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = f"sqlite:///{tmp_path / 'shared.db'}" if named else ""
    homes = [tmp_path / "one", tmp_path / "two" if named else tmp_path / "one"]
    for home in homes:
        home.mkdir(exist_ok=True)
        (home / "train.py").touch()
    refused: list[StudyError] = []

    def second(calls: int) -> None:
        if calls in (2, 6):
            monkeypatch.chdir(homes[1])
            with pytest.raises(StudyError, match="in use by") as refusal:
                search(storage, lambda _: None, resume=True).run()
            refused.append(refusal.value)
            monkeypatch.chdir(homes[0])

    monkeypatch.chdir(homes[0])
    first = search(storage, second)
    assert first.run().policy == "policy.yaml"
    assert len(refused) == 2
    assert all(f"pid {os.getpid()}" in error.what and error.fix for error in refused)
    monkeypatch.chdir(homes[1])
    again = search(storage, lambda _: None, resume=True)
    again.run()
    assert [r.name for r in again.records] == [r.name for r in first.records]
    print("2 second drivers refused, the study continued after the first had ended")
