"""The process of the next trial, started while one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoprec.trial.driver.spare import Spare, start_spare
from autoprec.trial.progress import starting_file
from autoprec.trial.protocol import TrialSpec
from tests.trial.conftest import uniform


class _Process:
    """A process tree that ends when told to."""

    pid, code = 1, None

    def poll(self) -> int | None:
        return self.code

    def end(self) -> None:
        self.code = -9


def _started(folder: Path, patience_s: float = 60.0) -> Spare:
    return start_spare(folder / "next.json", lambda result, order: _Process(), patience_s)  # type: ignore[arg-type, return-value]


def test_it_is_of_use_while_it_starts_and_when_it_has_arrived(tmp_path: Path) -> None:
    spare = _started(tmp_path)
    assert starting_file(spare.order).exists()
    assert spare.look()
    starting_file(spare.order).unlink()
    assert spare.look()


@pytest.mark.parametrize("why", ["it ended", "it does not arrive"])
def test_one_that_is_of_no_use_keeps_nobody_waiting(tmp_path: Path, why: str) -> None:
    spare = _started(tmp_path, 60.0 if why == "it ended" else -1.0)
    if why == "it ended":
        spare.process.end()
    assert not spare.look()
    assert not starting_file(spare.order).exists()
    assert spare.process.poll() is not None
    slow = _started(tmp_path, -1.0)
    starting_file(slow.order).unlink()  # it took its time, and is there
    assert slow.look()


def test_what_cannot_be_started_is_not_waited_for(tmp_path: Path) -> None:
    def launch(result: Path, order: str) -> Any:
        raise OSError(str(result) + order)

    with pytest.raises(OSError, match="next"):
        start_spare(tmp_path / "next.json", launch, 60.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_trial_finds_its_process_at_its_first_step_and_loses_nothing_by_it(host: Any) -> None:
    """Losses bit for bit those of trials that start when they are asked for; nothing is left behind."""
    policies = [None, uniform("bf16"), uniform("bf16"), None]
    plain, ahead = TrialSpec(steps=4, warmup=1, seed=0), TrialSpec(steps=4, warmup=1, seed=0, ahead=True)
    with host("plain.py", real=True, launch="zygote") as runner:
        assert runner.start().launch == "zygote"
        expected = [runner.run(TrialSpec(**{**plain.to_json(), "probes": (), "policy": p})) for p in policies]
        found = [runner.run(TrialSpec(**{**ahead.to_json(), "probes": (), "policy": p})) for p in policies]
        assert [r.status for r in (*expected, *found)] == ["ok"] * 8
        assert [r.losses for r in found] == [r.losses for r in expected]
        spare = runner._spare
        assert spare is not None
        assert spare.look()
        last = runner.run(plain)  # takes what waits, and leaves nothing
        assert last.losses == expected[0].losses
        assert runner._spare is None
    starts = [result.start_s for result in found]
    assert max(starts[1:]) < starts[0], starts


@pytest.mark.slow
@pytest.mark.parametrize("gone", [False, True])
def test_a_trial_runs_again_alone_where_the_next_one_may_have_taken_its_memory(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, gone: bool
) -> None:
    """Also where that one has run out of memory itself, and is gone."""
    if gone:
        monkeypatch.setattr(Spare, "look", lambda spare: bool(spare.end()))
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "hungry_train.py").write_text(_HUNGRY)
    with host("-m", "hungry_train", str(tmp_path / "failed"), real=True, launch="zygote") as runner:
        assert runner.start().launch == "zygote"
        (tmp_path / "failed").unlink()  # the first look at a small model went on for some steps
        result = runner.run(TrialSpec(steps=2, warmup=0, ahead=True))
        assert runner._spare is None or not runner._spare.look()
    assert (tmp_path / "failed").exists()
    assert result.ok, result.reason


_HUNGRY = """
import pathlib, sys, torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if step and not pathlib.Path(sys.argv[1]).exists():
        pathlib.Path(sys.argv[1]).touch()
        raise torch.OutOfMemoryError("CUDA out of memory")
    optimizer.step()
"""
