"""The benchmark over other people's scripts: its manifest, what it calls changed, and how it judges a record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.scripts import data as scripts_data
from benchmarks.scripts import scripts, table

ROOT = Path(__file__).resolve().parents[2]


def record(**steps: dict[str, Any]) -> dict[str, Any]:
    plain = {"code": 0, "seconds": 1.0, "changed": [], "out": "", "err": "", "answer": {}}
    names = ("bare", *table.COMMANDS)
    return {"name": "a", "skipped": "", "steps": {name: plain | steps.get(name, {}) for name in names}}


def test_the_manifest_names_what_exists() -> None:
    found = scripts.manifest()
    assert len({script.name for script in found}) == len(found) >= 40
    assert sum(bool(script.repository) for script in found) >= 25
    for script in found:
        assert script.repository or (ROOT / "benchmarks" / "scripts" / "odd_loops" / script.path).is_file(), script.name
        for line in script.data:
            assert callable(getattr(scripts_data, line.split()[0])), script.name


def test_a_script_without_its_clone_or_package_is_skipped_with_the_reason(tmp_path: Path) -> None:
    script = scripts.Script("a", "train.py", repository="someone/thing")
    assert script.missing(tmp_path) == "no clone of someone/thing with train.py"
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "train.py").touch()
    assert script.missing(tmp_path) == ""
    assert scripts.Script("b", "x.py", packages=("no_such_package",)).missing(None) == "not installed: no_such_package"


def test_every_change_of_a_file_is_seen_and_our_own_folders_are_not(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("1")
    (tmp_path / "gone").write_text("1")
    before = scripts.contents(tmp_path)
    (tmp_path / "kept").write_text("2")
    (tmp_path / "gone").unlink()
    (tmp_path / "new" / "deep").mkdir(parents=True)
    (tmp_path / "autoprec-runs").mkdir()
    (tmp_path / "autoprec-runs" / "study.db").touch()
    assert scripts.differences(before, scripts.contents(tmp_path)) == ["+ new", "+ new/deep", "- gone", "~ kept"]


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [
        ({}, "works"),
        ({"check": {"code": 1}}, "fault"),
        ({"run": {"code": 1}}, "fault"),
        ({"inspect": {"changed": ["+ model.pt"]}}, "fault"),
        ({"search": {"code": "time"}}, "fault"),
        ({"search": {"answer": {"trials": {"failed": 2}}}}, "fault"),
        ({"inspect": {"code": 4, "err": "autoprec: error: x (not an AutoPrec failure)"}}, "fault"),
        (
            {"check": {"code": 4, "err": "autoprec: error: a.py: AutoPrec's own code failed inside the script's"}},
            "fault",
        ),
        (
            {"search": {"code": 4, "err": "autoprec: error: a.py: its first training steps failed: exit code 1"}},
            "fault",
        ),
        ({"search": {"code": 1, "err": "autoprec: error: this is a defect of AutoPrec, not of your script"}}, "fault"),
        ({"inspect": {"code": 4, "err": "autoprec: error: never called backward\n  fix: use Session"}}, "told"),
    ],
)
def test_an_outcome_follows_from_the_record(steps: dict[str, Any], outcome: str) -> None:
    assert table.outcome(record(**steps)) == outcome


def test_what_the_script_itself_writes_is_not_held_against_run() -> None:
    assert table.touched(record(bare={"changed": ["~ log-1.csv"]}, run={"changed": ["~ log-2.csv"]}), "run") == []
    assert table.touched(record(run={"changed": ["~ data.csv"]}), "run") == ["~ data.csv"]


def test_a_script_is_wrongly_called_random_only_if_its_bits_are_the_same() -> None:
    said = {"answer": {"notes": ["two trials of the unchanged script differ by 1%, which is"]}}
    for second, fault in ((["aa\nbb"], True), (["aa\ncc"], False)):
        one = record(bare={"losses": [["aa", "bb", "cc"]]}, search=said)
        one["steps"]["again"] = {"losses": [text.split("\n") for text in second]}
        assert (table.outcome(one) == "fault") is fault


def test_generated_data_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        scripts_data.text(tmp_path / folder, "a.txt", "20")
        scripts_data.mnist(tmp_path / folder, "data", "16", "4")
        scripts_data.cora(tmp_path / folder, "cora", "30", "12")
    assert scripts.contents(tmp_path / "one") == scripts.contents(tmp_path / "two")
    assert len(scripts.contents(tmp_path / "one")) > 8
