from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.errors import UsageError
from autoprec.support.amounts import check_share, parse_bytes, parse_duration, parse_limit, parse_share


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400), (" 2 m ", 120), ("0.5s", 0.5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "2", "90", "-3m", "3d", "0s", "1m30s"])
def test_what_is_no_duration_says_how_to_write_one(text: str) -> None:
    with pytest.raises(UsageError, match="duration") as error:
        parse_duration(text)
    assert "m" in error.value.fix


def test_a_duration_without_a_unit_names_the_units_of_that_number() -> None:
    with pytest.raises(UsageError, match="without a unit") as error:
        parse_duration("2")
    assert error.value.fix == "write 2s, 2m or 2h"


@pytest.mark.parametrize(("text", "share"), [("0.25%", 0.0025), ("0.0025", 0.0025), ("1 %", 0.01), ("1e-3", 1e-3)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("60GB", 60 * 10**9), ("512MiB", 512 * 2**20), ("1k", 1000), ("1048576", 2**20), ("1.5gb", 15 * 10**8)],
)
def test_bytes(text: str, amount: int) -> None:
    assert parse_bytes(text) == amount


@given(st.text(max_size=12))
def test_parsers_accept_or_refuse_and_never_crash(text: str) -> None:
    for parse in (parse_duration, parse_share, parse_bytes, parse_limit):
        with contextlib.suppress(UsageError):
            assert (found := parse(text)) == "auto" or found >= 0


@pytest.mark.parametrize(
    ("parse", "text", "way_out"),
    [
        (parse_share, "0.25", "0.25% or 0.0025"),
        (parse_share, "0.0501", "0.0501%"),
        (parse_share, "10", "10% or 0.1"),
        (parse_bytes, "60", "60GiB"),
        (parse_bytes, "1048575", "GiB"),
        (parse_duration, "2", "2m"),
    ],
)
def test_a_number_that_lacks_its_unit_is_asked_for_it(parse: Callable[[str], float], text: str, way_out: str) -> None:
    """``--max-divergence 0.25`` was 25 %, and ``--max-memory 60`` 60 bytes."""
    with pytest.raises(UsageError) as error:
        parse(text)
    assert error.value.code == "unit"
    assert way_out in error.value.fix


def test_a_limit_of_memory_may_be_the_devices() -> None:
    assert (parse_limit(" Auto"), parse_limit("60GiB")) == ("auto", 60 * 2**30)


def test_a_large_share_can_be_meant() -> None:
    assert parse_share("25%") == 0.25
    assert parse_share("0.05") == check_share(0.05) == 0.05
