"""The truth that claims are held against: what works beside each other, and when a claim is wrong."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from benchmarks.search import by_hand
from benchmarks.search.by_hand import Row, together

EVEN = (1.0, 0.98, 1.02)
RIGHT = Row("conv", "adopt", (1.7, 1.68, 1.72), (1.65, 1.62, 1.72), EVEN, EVEN, EVEN, "script", EVEN, 0.02, EVEN, 60.0)


def test_scripts_train_in_the_place_of_those_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started, killed, was_joined = [], [], threading.Event()

    class Training:
        def __init__(self, name: str) -> None:
            started.append(name)
            was_joined.set()

        def kill(self) -> None:
            killed.append(started[-1])

    monkeypatch.setattr(by_hand, "_training", Training)
    # the first of two at once ends, and there is a third; then there is none
    found = together(lambda name, number: number < 2 or was_joined.wait(60), [("conv", 0), ("tab", 1), ("moe", 2)], 2)
    assert found == [True, True, True]
    assert started == killed
    assert len(started) == 1
    assert together(lambda _name, number: number, [("conv", 0), ("conv", 1)], 1) == [0, 1]
    assert len(started) == 1


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, ""),
        ({"claimed": (1.71, 1.7, 1.72), "truth": (1.6, 1.58, 1.62)}, "the claim is +7% off"),
        ({"claimed": (1.63, 1.6, 1.66), "truth": (1.6, 1.58, 1.62)}, ""),
        ({"paired": (0.95, 0.9, 0.99)}, "autocast by hand is faster"),
        ({"other": (1.05, 1.03, 1.07)}, "more was left"),
        ({"verdict": "undecided", "paired": (0.95, 0.9, 0.99)}, ""),
    ],
)
def test_what_is_wrong_of_an_answer(changed: dict[str, object], wrong: str) -> None:
    assert replace(RIGHT, **changed).wrong == wrong
