"""What a search tells before its first run follows from what it is of, and from its bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.tuning.setup import Setup
from autoprec.tuning.target import target
from autoprec.tuning.telling import (
    NOTHING_KNOWN,
    ONE_THREAD,
    ONLY_SIXTEEN_BIT,
    STANDS_IN,
    introduction,
    notes_of_bound,
    typed,
    verdict_text,
)
from tests.tuning.test_engine import plain_search


@pytest.fixture
def setup() -> Setup:
    made = plain_search().made.setup
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("narrow", "beyond", "measured", "told"),
    [
        (False, True, True, []),
        (True, True, True, [ONLY_SIXTEEN_BIT]),
        (False, False, True, []),  # trials decide
        (False, False, False, [STANDS_IN]),
        (True, False, False, [ONLY_SIXTEEN_BIT, STANDS_IN]),
    ],
)
def test_what_follows_from_the_bound(setup: Setup, narrow: bool, beyond: bool, measured: bool, told: list[str]) -> None:
    asked = replace(setup, measured=measured)
    assert list(notes_of_bound(asked, narrow=narrow, beyond=beyond)) == told


def test_trials_that_run_beside_each_other_on_a_cpu_have_one_thread_each(setup: Setup) -> None:
    here = replace(setup, target=target("cpu"), measured=True)
    assert ONE_THREAD not in notes_of_bound(here, narrow=False, beyond=True)
    here = replace(here, options=replace(here.options, workers=2))
    assert next(notes_of_bound(here, narrow=False, beyond=True)) == ONE_THREAD


def test_a_bound_beside_real_timings_claims_no_more_than_it_covers(setup: Setup) -> None:
    verdict = setup.verdict()
    assert verdict_text(replace(setup, measured=False), verdict) == verdict.reason
    assert verdict_text(setup, verdict) != verdict.reason
    assert verdict_text(setup, verdict) != NOTHING_KNOWN
    stays = replace(verdict, kind="stay", reason="at most 1.00x over the script as written: too little (47%)")
    assert verdict_text(setup, stays) == f"{stays.reason}. This is by the cost model, and the trials check it"


def test_a_variant_is_told_as_it_is_typed(setup: Setup) -> None:
    row = {"name": "half", "arguments": "--half", "status": "accepted"}
    assert typed(row) == "half: --half"
    made = plain_search().made
    info = introduction(setup, made.command, made.options, "sqlite:///x.db", row)
    assert info.options["variant"] == "half: --half"
    assert info.storage == "sqlite:///x.db"
    assert info.study == made.options.study
