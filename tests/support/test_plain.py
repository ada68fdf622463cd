"""Dataclasses come back from JSON as they were."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from autoprec.support.plain import or_null, rebuild, shallow


@dataclass(frozen=True)
class Row:
    name: str
    losses: tuple[float, ...] = ()
    words: tuple[str, ...] = ("a",)


def test_tuples_and_numbers_that_are_not_finite_come_back() -> None:
    row = Row("x", (1.5, math.inf, math.nan), ("b", "c"))
    text = json.dumps(asdict(row) | {"losses": or_null(row.losses)}, allow_nan=False)
    again = rebuild(Row, json.loads(text))
    assert again.losses[0] == 1.5
    assert math.isnan(again.losses[1])
    assert math.isnan(again.losses[2])
    assert again.words == ("b", "c")


def test_what_another_version_wrote_can_be_read() -> None:
    assert rebuild(Row, {"name": "x", "unknown": 1}) == Row("x")


def test_a_shallow_dictionary_copies_no_value() -> None:
    row = Row("x", (1.5,))
    assert shallow(row) == asdict(row)
    assert shallow(row)["losses"] is row.losses
