"""What a script reports: which values count, and when a trial has what it was asked for."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoprec.errors import UsageError
from autoprec.trial.driver.results import load_result
from autoprec.trial.inside.reporting.reports import Reports, is_number
from autoprec.trial.losses import HIGHER, Series
from autoprec.trial.protocol import TrainSpec
from tests.trial.conftest import uniform

NUMBERS = (1, 2.5, True, np.float32(0.5), np.int64(3), torch.tensor(1.5), torch.tensor([2.0]), np.array([[4.0]]))
OTHERS = ("0.5", None, [1.0], {"a": 1.0}, torch.zeros(2), np.zeros(3), object())


def asked(total: int = 4, name: str = "f1") -> tuple[Reports, list[int], list[int]]:
    """Return reports that ask for a metric, the steps that are done (appended to), and when it ended."""
    done, ends = [0], []  # type: ignore[var-annotated]
    reports = Reports()
    reports.ask(Series(name, higher=True), total, lambda: done[-1], lambda: ends.append(done[-1]))
    return reports, done, ends


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_a_number_is_kept(value: Any) -> None:
    reports, _, _ = asked()
    reports.report({"f1": value})
    assert reports.series is not None
    assert reports.series.values == (float(value.item() if hasattr(value, "item") else value),)


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_anything_else_is_an_error_where_the_script_says_it_itself(value: Any) -> None:
    reports, _, _ = asked()
    assert not is_number(value)
    with pytest.raises(UsageError, match=r"autoprec.report\(f1=...\) takes a number, not a") as caught:
        reports.report({"f1": value})
    assert caught.value.code == "type"
    reports.add("wandb.log", {"f1": value, 3: 1.0})  # type: ignore[dict-item]
    assert reports.series is not None
    assert reports.series.names == ()


@given(st.lists(st.tuples(st.integers(0, 3), st.floats()), max_size=20), st.integers(1, 8))
def test_every_value_is_kept_with_the_steps_done_and_the_first_after_the_last_step_ends_it(
    rows: list[tuple[int, float]], total: int
) -> None:
    reports, done, ends = asked(total)
    for more, value in rows:
        done.append(done[-1] + more)
        reports.add("autoprec.report", {"f1": value, "loss": 1.0})
    series = reports.series
    assert series is not None
    kept = dict(zip(done[1:], [value for _, value in rows], strict=True))  # of each step the last
    assert series.steps == tuple(kept)
    assert [repr(value) for value in series.values] == [repr(value) for value in kept.values()]
    assert ends == [steps for steps in done[1:] if steps >= total]  # in a trial the first ends the process
    assert bool(reports.missing) == (not rows)


def test_of_each_name_the_first_source_counts() -> None:
    reports, done, _ = asked()
    reports.add("LightningModule.log", {"f1": 1.0})
    done.append(1)
    reports.add("wandb.log", {"f1": 1.0, "lr": 0.1})
    reports.add("LightningModule.log", {"f1": 2.0})
    assert reports.series is not None
    assert reports.series.values == (1.0, 2.0)
    assert reports.series.names == ("f1", "lr")


def test_nothing_is_kept_and_nothing_read_where_no_metric_is_asked_for() -> None:
    class Unread:
        shape = ()

        def item(self) -> float:
            raise AssertionError("it would wait for the device")

    reports = Reports()
    reports.report({"f1": Unread()})
    assert reports.series is None
    assert reports.missing == ""
    assert reports.gives_up(0)
    reports.ask(Series("f1"), 4, lambda: 0, lambda: None)
    reports.add("wandb.log", {"loss": Unread()})
    assert reports.series is not None
    assert reports.series.names == ("f1", "loss")


def test_a_value_that_cannot_be_read_is_not_a_number() -> None:
    reports, _, _ = asked()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        reports.add("wandb.log", {"f1": torch.zeros(())})
    assert reports.series is not None
    assert math.isnan(reports.series.values[0])


def test_processes_that_the_script_forks_report_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, _, _ = asked()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    reports.add("wandb.log", {"f1": 1.0})
    assert reports.series is not None
    assert reports.series.values == ()


def test_a_trial_waits_for_twice_its_steps() -> None:
    reports, done, _ = asked(total=4)
    assert [reports.gives_up(steps) for steps in (4, 7, 8)] == [False, False, True]
    done.append(8)
    assert reports.missing == "the script did not report f1 within 8 steps"


# --- in a trial of a script ------------------------------------------------------------------------------------------
def spec(metric: str = "eval_loss", **changes: Any) -> TrainSpec:
    return TrainSpec(steps=4, warmup=2, metric=metric, **changes)


def test_a_trial_goes_on_until_the_metric_was_reported_after_its_last_step(host: Any, tmp_path: Path) -> None:
    with host("reporting.py") as runner:
        plain = runner.run(TrainSpec(steps=4, warmup=2))
        found = runner.run(spec())
        again = runner.run(spec())
        other = runner.run(spec(policy=uniform("fp8")))
        higher = runner.run(spec("accuracy", better=HIGHER))
        each = runner.run(spec("train_loss"))
        wrong = runner.run(spec("eval_los"))
    assert plain.metric is None
    assert plain.curve == plain.losses
    assert found.ok
    assert found.metric is not None
    assert found.metric.steps == (4, 8)  # an evaluation every four steps, and six steps
    assert found.curve == found.metric.values
    assert found.losses == plain.losses
    assert len(found.step_ms) == 6
    assert again.curve == found.curve
    assert other.ok
    assert other.curve != found.curve
    assert higher.metric is not None
    assert all(0 <= value <= 1 for value in higher.metric.values)
    assert higher.curve == tuple(-value for value in higher.metric.values)
    assert each.metric is not None
    assert each.metric.steps == tuple(range(1, 7))
    assert each.curve == pytest.approx(each.losses, abs=1e-6)
    assert wrong.status == "unreported"
    assert wrong.reason == "the script did not report eval_los within 12 steps"
    assert wrong.metric is not None
    assert wrong.metric.names == ("train_loss", "eval_loss", "accuracy")


def test_a_script_that_ends_first_is_judged_by_what_it_has_reported(host: Any) -> None:
    with host("reporting.py", "--steps", "7") as runner:
        found, wrong = runner.run(spec()), runner.run(spec("eval_los"))
    assert found.ok
    assert found.metric is not None
    assert found.metric.steps == (4,)
    assert wrong.status == "unreported"
    assert wrong.reason == "the script did not report eval_los within 7 steps"


def test_a_loss_that_is_not_finite_fails_a_trial_whatever_its_metric_is(host: Any) -> None:
    with host("reporting.py", "--breaks-at", "5") as runner:
        found = runner.run(spec("train_loss"))
    assert found.status == "diverged"
    assert found.reason == "the loss is nan at step 5"


@pytest.mark.slow
def test_the_first_of_several_ranks_ends_the_trial_and_the_others_tell_their_losses(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float, ...]] = []

    def load(path: Path) -> Any:
        found = load_result(path)
        told.append(found.losses if found else ())
        return found

    monkeypatch.setattr("autoprec.trial.driver.results.load_result", load)
    with host("torchrun", "--nproc-per-node", "2", "ddp.py") as runner:
        runner.start()
        found = runner.run(TrainSpec(steps=3, warmup=2, metric="kept"))
        wrong = runner.run(TrainSpec(steps=3, warmup=2, metric="other"))
    assert found.ok, found.reason + found.tail
    assert found.metric is not None
    assert found.metric.steps == (4, 8)
    first, second = told[:2]
    assert len(first) == len(second) == 5
    assert first != second
    assert found.losses == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])
    assert wrong.status == "unreported"
    assert wrong.metric is not None
    assert wrong.metric.names == ("kept",)
