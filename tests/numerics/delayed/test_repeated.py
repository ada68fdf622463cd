"""What a checkpointed part writes down, and who reads it."""

from __future__ import annotations

import threading

import pytest
import torch

from autoprec.numerics.delayed.repeated import Part, Used, learning, remember, repeated


def use(key: str, value: float) -> float:
    """Use a scale as a layer does: what is repeated if anything is, else ``value``."""
    found = repeated(key)
    scale = value if found is None else float(found.scale)
    remember(key, Used(torch.tensor(scale), found is None))
    return scale


def test_layers_that_run_several_times_read_in_order_and_anew_each_time() -> None:
    part = Part()

    def body(*values: float) -> list[float]:
        return [use("ab"[index % 2], value) for index, value in enumerate(values)]

    with part.recorded():
        assert body(1.0, 2.0, 3.0, 4.0) == [1.0, 2.0, 3.0, 4.0]
    again = part.repeating(body)
    for _ in range(2):  # retain_graph
        assert again(9.0, 9.0, 9.0, 9.0) == [1.0, 2.0, 3.0, 4.0]
    assert again(9.0) == [1.0]  # ended early
    assert again(9.0, 9.0, 9.0, 9.0, 9.0) == [1.0, 2.0, 3.0, 4.0, 9.0]  # ran less often at first
    assert body(5.0) == [5.0]


def test_parts_in_parts_repeat_the_first_forward_of_all() -> None:
    outer, inner = Part(), Part()
    with outer.recorded(), inner.recorded():
        use("a", 1.0)
    later = Part()

    def again() -> float:
        with later.recorded():  # the inner one, called anew where the outer one is repeated
            return use("a", 2.0)

    assert outer.repeating(again)() == 1.0
    assert later.repeating(lambda: use("a", 3.0))() == 1.0
    assert inner.repeating(lambda: use("a", 3.0))() == 1.0


def test_of_a_part_whose_first_call_is_repeated_later() -> None:
    call = Part().beginning(lambda value: (use("a", value), learning()), learns=True)
    assert [call(1.0), call(2.0), call(3.0)] == [(1.0, True), (1.0, False), (1.0, False)]


def test_in_a_part_that_learns_parts_without_gradients_do() -> None:
    def outer() -> bool:
        return Part().beginning(learning, learns=False)()

    assert Part().beginning(outer, learns=True)()
    assert not Part().beginning(outer, learns=False)()


def test_an_exception_leaves_nothing_active() -> None:
    def fails() -> None:
        raise ValueError("stopped early")

    with pytest.raises(ValueError, match="early"):
        Part().beginning(fails, learns=True)()
    assert repeated("a") is None
    assert not learning()


def test_another_thread_repeats_nothing() -> None:
    part, seen = Part(), []
    with part.recorded():
        use("a", 1.0)

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: seen.append(use("a", 2.0)))
        thread.start()
        thread.join()

    part.repeating(elsewhere)()
    assert seen == [2.0]
