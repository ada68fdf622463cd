"""A fork that answers once: its answer, its silence, its end."""

from __future__ import annotations

import os
import time
from typing import Any

from autoprec.trial.inside.isolate import answering
from autoprec.trial.inside.isolate.answering import answer, await_answer, fork_to_answer


def asked(monkeypatch: Any, limit_s: float = 30.0, **what: Any) -> dict[str, Any] | str:
    monkeypatch.setattr(answering, "add_layer_of_probe", lambda: None)
    pid, descriptor = fork_to_answer()
    if not pid:
        if "ends" in what:
            os._exit(what["ends"])
        if "sleeps" in what:
            time.sleep(what["sleeps"])
        answer(descriptor, what)
    return await_answer(pid, descriptor, limit_s)


def test_it_answers_once_and_ends(monkeypatch: Any) -> None:
    long = "x" * 200_000  # more than a pipe holds at once
    assert asked(monkeypatch, ms=1.5, text=long) == {"ms": 1.5, "text": long}


def test_one_that_ends_without_an_answer_says_how(monkeypatch: Any) -> None:
    assert asked(monkeypatch, ends=3) == f"it ended with status {3 << 8}"


def test_one_that_stands_still_is_ended(monkeypatch: Any) -> None:
    assert asked(monkeypatch, limit_s=0.4, sleeps=30) == "the deadline passed"
