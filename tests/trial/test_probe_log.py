"""Answers of a scan that outlive it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from autoprec.trial.probe_log import append_round, append_row, read_rounds, read_rows
from autoprec.trial.protocol import ProbeResult

ROWS = (ProbeResult("0|bf16", 0.25, 1.5), ProbeResult("1|fp8", None, None, nonfinite=True), ProbeResult("2|int8", 1e-9))


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, row in zip((first, second, first), ROWS, strict=True):
        append_row(path, row)
    assert read_rows([first, second, tmp_path / "none.jsonl"]) == {row.id: row for row in ROWS}


def test_a_probe_that_failed_is_asked_again(tmp_path: Path) -> None:
    """Its process may have been ended with the search's."""
    append_row(tmp_path / "a.jsonl", ProbeResult("0|bf16", failed="no gradients: it was killed by signal 9"))
    assert read_rows([tmp_path / "a.jsonl"]) == {}


@pytest.mark.parametrize("path", ["", "/dev/full", "missing/folder/a.jsonl"])
def test_a_log_that_cannot_be_written_costs_nothing(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    append_row(path, ROWS[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", [1, 10, 40, -1])
def test_a_line_that_a_kill_has_cut_off_costs_that_line_alone(left: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_row(path, ROWS[0])
    whole = len(path.read_bytes())
    append_row(path, ROWS[1])
    path.write_bytes(path.read_bytes()[: whole + left if left > 0 else left])
    assert read_rows([path]) == {ROWS[0].id: ROWS[0]}
    append_row(path, ROWS[2])
    assert read_rows([path]) == {row.id: row for row in (ROWS[0], ROWS[2])}


@pytest.mark.parametrize(
    "line", [b"[1, 2]", b"{}", b"null", b"\xff\xfe", b'{"id": "0|bf16", "gradient_error": 0.1}', b"\0" * 99]
)
def test_what_is_not_a_whole_row_is_passed_over(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_row(path, ROWS[0])
    path.write_bytes(path.read_bytes() + b"\n" + line)
    assert read_rows([path]) == {ROWS[0].id: ROWS[0]}


def test_a_changed_figure_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_row(path, ROWS[0])
    path.write_bytes(path.read_bytes().replace(b"0.25", b"0.35"))
    assert read_rows([path]) == {}


def test_a_loss_that_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_row(path, ProbeResult("0|bf16", 0.5, math.nan))
    assert read_rows([path]) == {"0|bf16": ProbeResult("0|bf16", 0.5)}


def test_rounds_of_all_processes_are_read_with_the_seconds_of_each(tmp_path: Path) -> None:
    """A process counts its seconds from its own begin."""
    path = tmp_path / "a.jsonl"
    for ms, seconds in ((3.0, 1.0), (4.0, 2.5), (5.0, 0.5), (6.0, 1.5)):
        append_round(path, {"": ms, "all bf16": 2.0}, seconds)
    append_row(path, ROWS[0])  # of a scan
    rounds, taken = read_rounds([path, tmp_path / "none.jsonl"])
    assert rounds == [{"": ms, "all bf16": 2.0} for ms in (3.0, 4.0, 5.0, 6.0)]
    assert taken == pytest.approx(2.5 + 1.5)
    assert read_rows([path]) == {ROWS[0].id: ROWS[0]}
    assert read_rounds([]) == ([], 0.0)
