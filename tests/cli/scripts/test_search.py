"""What ``autoprec search`` does around the engine: grouped help, reports that may fail, the last lines."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from autoprec.cli import cli
from autoprec.cli.options import search_groups
from autoprec.cli.script import TakesScript
from autoprec.cli.scripts.search import EXAMPLES, print_result, write_reports
from autoprec.errors import FileError
from autoprec.tuning.decide.sentences import Reason
from tests.cli.helpers import autoprec
from tests.tracking.conftest import make_records, make_result


def test_every_option_stands_under_a_heading() -> None:
    command = cli.get_command(click.Context(cli), "search")
    assert isinstance(command, TakesScript)
    grouped = command.grouped(click.Context(command))
    assert list(grouped) == [*search_groups(), "Options"]
    assert [param.opts[-1] for param in grouped["Options"]] == ["--help"]
    assert all(len(params) >= 2 for heading, params in grouped.items() if heading != "Options")


def test_help_shows_headings_and_examples_that_parse() -> None:
    text = autoprec("search", "--help").out
    for heading in (*search_groups(), "Examples"):
        assert f"\n{heading}:\n" in text
    command = cli.get_command(click.Context(cli), "search")
    assert command is not None
    for line in EXAMPLES:
        assert f"  {line}\n" in text
        context = command.make_context("search", line.split()[2:], parent=click.Context(cli, **cli.context_settings))
        assert context.params["script"]


def test_a_report_that_cannot_be_written_is_named_and_never_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise FileError("the disk is a museum piece")

    monkeypatch.setattr("autoprec.reports.html.write_html", refuse)
    engine: Any = SimpleNamespace(records=[], study_dir=tmp_path, graph=None)
    result: Any = SimpleNamespace(to_json=lambda: {"verdict": "stay"})
    assert set(write_reports(engine, result)) == {"result.json"}
    assert "report.html could not be written: the disk is a museum piece" in capsys.readouterr().err


def printed(
    result: Any, monkeypatch: pytest.MonkeyPatch, set_aside: str = "", folder: Path = Path("nowhere")
) -> list[str]:
    """Return what the command prints below the table."""
    monkeypatch.setattr("autoprec.support.tables.Table.rich", lambda *_: "TABLE")
    engine: Any = SimpleNamespace(records=[], set_aside=set_aside, go_on_command=lambda: "again", study_dir=folder)
    out = io.StringIO()
    with redirect_stdout(out):
        print_result(engine, result, {})
    return out.getvalue().splitlines()


def test_a_verdict_is_one_line_and_its_caveats_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = (
        Reason("no_gain", {"name": "all bf16", "merit": 0.9, "noise": 0.01}),
        Reason("none_measured"),
        Reason("interrupted"),
    )
    found = replace(make_result(make_records()), reasons=tuple(reason.to_json() for reason in reasons))
    lines = printed(found, monkeypatch)
    first, *caveats = map(str, reasons)
    assert lines[1:4] == [f"verdict: adopt. {first}", *(f"         - {line}" for line in caveats)]
    assert "wrap_optimizer(optimizer)" in lines[-1], "as in the README: a model has to be named only where two share it"


def test_a_result_of_an_earlier_version_has_its_reason_in_words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(replace(make_result(make_records()), reason="2x faster. Twice", reasons=()), monkeypatch)
    assert lines[1] == "verdict: adopt. 2x faster. Twice"


def test_after_stay_nothing_is_offered_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(replace(make_result(make_records()), verdict="stay"), monkeypatch, "it is now policy.yaml.1")
    assert not any("load" in line for line in lines)
    assert any("it is now policy.yaml.1" in line for line in lines)
    assert any(line.startswith("policy:  ") and ", which changes nothing" in line for line in lines)


@pytest.mark.parametrize("saved", [True, False])
def test_where_no_policy_was_written_it_is_said_and_what_there_is_is_named(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if saved:
        (tmp_path / "best.yaml").write_text("schema: autoprec.policy/1\n")
    found = replace(make_result(make_records()), verdict="undecided", policy="")
    (line,) = [line for line in printed(found, monkeypatch, folder=tmp_path) if line.startswith("policy:")]
    assert "none was written" in line
    assert (f"the best that was tried is {tmp_path / 'best.yaml'}" in line) is saved
