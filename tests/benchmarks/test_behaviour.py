"""The comparison of two dumps of behaviour, and what a dump is made of."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import behaviour
from benchmarks.behaviour_commands import random_policy, shape
from benchmarks.house import PACKAGE


def dump_of(**items: str) -> dict[str, Any]:
    return {"commit": "x", "parts": {"help": {name: {"sha256": text, "text": text} for name, text in items.items()}}}


def test_what_differs_is_gone_or_new_is_a_line_each() -> None:
    found = behaviour.differences(dump_of(same="1", other="a\nb", gone="2"), dump_of(same="1", other="a\nc", new="3"))
    assert found == ["help: other: differs", "    -b", "    +c", "help: gone: gone", "help: new: new"]


def test_parts_that_were_not_taken_again_are_not_compared() -> None:
    old = dump_of(same="1")
    old["parts"]["exits"] = {"x": {"sha256": "1"}}
    assert behaviour.differences(old, dump_of(same="1")) == []


def test_the_exit_code_tells_whether_something_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, text in zip(paths, "ab", strict=True):
        path.write_text(json.dumps(dump_of(item=text)))
    monkeypatch.setattr(sys, "argv", ["behaviour.py", "--compare", str(paths[0]), str(paths[1])])
    assert behaviour.main() == 1
    monkeypatch.setattr(sys, "argv", ["behaviour.py", "--compare", str(paths[0]), str(paths[0])])
    assert behaviour.main() == 0


def test_a_part_that_breaks_off_keeps_what_it_had() -> None:
    def maker(folder: Path) -> Iterator[tuple[str, str | bytes]]:
        yield "first", f"in {folder}"
        raise ValueError("broken")

    items = behaviour.taken("help", maker)
    assert items["first"]["text"] == "in DIR"
    assert "broken" in items["(broke off)"]["text"]


def test_every_part_has_a_maker_and_concerns_rooms_that_exist() -> None:
    assert list(behaviour.makers()) == list(behaviour.PARTS)
    rooms = {room for concerned in behaviour.PARTS.values() for room in concerned}
    assert [room for room in rooms if not ((PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").exists())] == []


def test_keys_are_paths_whatever_the_length_of_lists() -> None:
    assert shape({"a": [{"b": 1}, {"c": {}}], "d": []}) == {".a[].b", ".a[].c{}", ".d[]"}


def test_random_policies_are_the_same_at_every_call() -> None:
    assert random_policy(3) == random_policy(3) != random_policy(7)
