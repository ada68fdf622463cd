"""The census and what was seen, as plain data."""

import json

from autoprec.graph.census import Held, Judged, Observation

SEEN = Judged(
    (
        Held("loss", "/w/train.py:3", "fp32", where="/w/train.py:3"),
        Held("parameter", "a.weight", "bf16", (2, 3), "fp32"),
    ),
    (Observation("loss-16bit", "/w/train.py:9", "aten::_log_softmax", "m", ("bf16",), {"error": 0.5}, ("/w/b.py:1",)),),
    {"operators": 7},
    ("nothing",),
)


def test_json_and_back_is_the_same() -> None:
    assert Judged.from_json(json.loads(json.dumps(SEEN.to_json()))) == SEEN


def test_kinds_come_in_reading_order_and_dtypes_apart() -> None:
    assert list(SEEN.by_kind()) == ["parameter", "loss"]
    assert [row.name for row in SEEN.by_kind()["parameter"]["bf16"]] == ["a.weight"]


def test_places_are_told_from_the_folder_they_lie_in() -> None:
    near = SEEN.within("/w")
    assert (near.observations[0].where, near.observations[0].also) == ("train.py:9", ("b.py:1",))
    assert near.census[0].where == near.census[0].name == "train.py:3"
    assert SEEN.within("/elsewhere") == SEEN
