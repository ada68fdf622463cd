"""A search is told from its first second: phases, a line per trial in a pipe, what is best, how long it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.cli.progress import PHASES, TerminalProgress, describe
from autoprec.tuning.events import SearchInfo
from autoprec.tuning.study.run import Run, metrics_of

METRICS = {"speedup": 1.5, "divergence": 0.0012, "memory_bytes": 2e9, "step_time_ms": 10.0}
INFO = SearchInfo(
    study="s",
    study_dir="autoprec-runs/s",
    storage="sqlite:///x",
    script="train.py",
    target="h100",
    source="modelled",
    launch="fork",
    device="cpu",
    model={"class": "GPT", "parameters": 5_500_000},
    groups={"fc": ("fc",)},
    trials=30,
    resume_command="autoprec search --resume",
)


def record(kind: str = "search", number: int = 3, status: str = "ok", **values: object) -> Run:
    return Run(number, kind, f"trial {number}", {}, {}, status, metrics=metrics_of(METRICS), **values)  # type: ignore[arg-type]


def test_every_trial_is_a_line_where_there_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TerminalProgress()
    progress.phase("search")
    for done in (1, 2, 3):
        progress.trial(record(number=done + 3), done, 30, record(), 65.0)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[0:00] trials"
    assert [line.split("] ")[1].split(":")[0] for line in lines[1:]] == ["trial 4", "trial 5", "trial 6"]
    assert "1.50x over the script  divergence 0.120%" in lines[1]
    assert lines[1].endswith("[1 of 30 trials; best 1.50x over the script (trial 3); about 1:05 left]")


def test_what_was_found_is_told_before_the_first_trial(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = TerminalProgress()
    progress.phase("script", "train.py")
    progress.started(INFO)
    progress.phase("reference")
    progress.trial(record("reference", seconds=4.0), 0, 30, None, 0.0)
    progress.phase("sensitivity")
    progress.close()
    told = capsys.readouterr().err
    assert "starting the script: train.py" in told
    assert "GPT, 5.5 M parameters, 1 group of layers; target h100 (modelled); trials start by fork" in told
    assert "autoprec ui" in told
    monkeypatch.setattr("autoprec.cli.progress.is_available", lambda _name: False)
    progress.trial(record("reference", seconds=4.0), 0, 30, None, 0.0)
    assert "autoprec ui" not in capsys.readouterr().err, "it is not installed"
    assert "left" not in told, "the first run, which starts cold, does not tell how long the trials take"


@pytest.mark.parametrize(
    ("between", "times"), [("", 1), ("note", 2), ("trial", 2), ("phase", 2)], ids=lambda value: str(value)
)
def test_a_phase_that_did_nothing_is_not_named_twice(
    capsys: pytest.CaptureFixture[str], between: str, times: int
) -> None:
    progress = TerminalProgress()
    progress.phase("search")
    if between == "note":
        progress.note("n")
    elif between == "trial":
        progress.trial(record(), 1, 30, None, 65.0)
    elif between == "phase":
        progress.phase("finalists")
    progress.phase("search")
    progress.close()
    assert capsys.readouterr().err.count("] trials\n") == times


def test_further_seeds_say_how_long_they_may_take(capsys: pytest.CaptureFixture[str]) -> None:
    """They said "0:00 left" each, as if the search had ended."""
    for budget, told in ((None, "; about 1:05 left]"), (90.0, "; at most about 1:05 left]")):
        progress = TerminalProgress()
        progress.started(replace(INFO, options={"budget_s": budget}))
        progress.trial(record("finalist", seed=1), 1, 0, record(), 65.0)
        progress.close()
        assert capsys.readouterr().err.rstrip().endswith(told), "only a budget is a bound"


def test_quiet_leaves_notes_only(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TerminalProgress(-1)
    progress.phase("search")
    progress.started(INFO)
    progress.trial(record(), 1, 2, None, 1.0)
    progress.note("something a person should know")
    progress.close()
    assert capsys.readouterr().err == "[0:00] note: something a person should know\n"


def test_a_trial_that_failed_says_why() -> None:
    failed = Run(1, "search", "trial 1", {}, {}, "oom", reason="out of memory")
    assert describe(failed) == "oom: out of memory"


def test_gains_are_over_the_reference_of_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    for reference, over in (("script", "the script"), ("fp32", "the fp32 reference"), ("bf16", "the bf16 reference")):
        progress = TerminalProgress()
        progress.started(replace(INFO, options={"reference": reference}))
        progress.trial(record(), 1, 30, record(), 65.0)
        progress.close()
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"1.50x over {over}  divergence" in line
        assert f"best 1.50x over {over} (trial 3)" in line


def test_every_phase_of_a_search_has_words() -> None:
    phases = {"script", "graph", "reference", "verdict", "sensitivity", "search", "finalists", "variants", "answer"}
    assert set(PHASES) == phases | {"duel", "tracking"}
