"""The heat map: a colour means the same share of the gradient noise everywhere."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.reports.sensitivity import heat_colour, heat_map


def row(group: str, choice: str, error: float, **more: object) -> dict[str, object]:
    return {"group": group, "choice": choice, "gradient_error": error, **more}


def colour(**facts: object) -> str:
    found = re.search(r"background:(#[0-9a-f]{6})", heat_map([row("g", "fp8", **facts)]))  # type: ignore[arg-type]
    assert found is not None
    return found[1]


@given(st.floats(-2, 3))
def test_every_place_has_a_colour(place: float) -> None:
    assert re.fullmatch("#[0-9a-f]{6}", heat_colour(place))


def test_the_scale_ends_where_harm_begins_and_is_total() -> None:
    assert [heat_colour(place) for place in (-1.0, 0.0, 0.5, 1.0, 9.0)] == [
        "#e8f3ee", "#e8f3ee", "#fae2a6", "#eb8c6e", "#eb8c6e",
    ]  # fmt: skip


@pytest.mark.parametrize(("share", "place"), [(0.0, 0.0), (0.01, 0.0), (0.12, 0.5), (1.0, 1.0), (50.0, 1.0)])
def test_a_share_of_the_gradient_noise_decides_the_colour_where_it_is_known(share: float, place: float) -> None:
    assert colour(error=0.3, noise_share=share) == heat_colour(place)


@pytest.mark.parametrize(("error", "place"), [(0.001, 0.0), (0.03, 0.5), (0.3, 1.0)])
def test_else_the_plain_error_does(error: float, place: float) -> None:
    assert colour(error=error) == heat_colour(place)


def test_inferred_and_missing_entries_are_told_apart_from_measured_ones() -> None:
    page = heat_map(
        [
            row("h.<0>", "bf16", 0.01),
            row("h.<0>", "fp8", 0.2, measured=False),
            row("head", "fp8", 0.05),
            row("head", "bf16", float("nan")),
        ]
    )
    assert "<code>h.&lt;0&gt;</code>" in page
    assert 'title="inferred from other measurements">20 % ~</td>' in page
    assert 'title="measured">1 %</td>' in page
    assert "<code>head</code></td><td></td>" in page


def test_nothing_measured_is_nothing_drawn() -> None:
    assert heat_map([]) == ""
    assert heat_map([{"group": "g", "choice": "fp8", "gradient_error": None}]) == ""


def test_a_long_choice_may_go_on_in_the_next_line() -> None:
    rows = [{"group": "a", "choice": "int8_tensor/wgrad=keep", "gradient_error": 0.001}]
    assert "<th>int8_tensor/<wbr>wgrad=keep</th>" in heat_map(rows)
