"""What to change, by numbers alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autoprec.applying.following.deciding import Desk, segments_to_ask
from autoprec.policy import resolve
from tests.applying.following.helpers import followed


def desk(error: float = 0.02) -> Desk:
    policy = followed(error=error)
    made = Desk.of(policy.follow, policy)
    assert made is not None
    return made


def test_the_assignment_in_force_is_read_from_the_policy() -> None:
    found = desk()
    assert found.now.tolist() == [1, 1, 1]
    assert found.lowered == (0, 1, 2)
    assert found.scaled
    assert found.predicted2(found.now) == pytest.approx(3 * 0.02**2)
    edited = followed(layers=[{"match": "layers.0", "recipe": "fp8", "gemms": {"wgrad": "keep"}}])
    assert Desk.of(edited.follow, edited) is None


def test_over_the_limit_counts_the_second_time_and_at_once_where_it_is_clear() -> None:
    found = desk()
    assert [found.is_over(error, 1.0) for error in (0.9, 1.1, 0.9, 1.1, 1.1, 1.3, math.nan)] == [
        False,
        False,
        False,
        False,
        True,
        True,
        True,
    ]


def test_a_proposal_keeps_a_margin_and_is_worth_a_change() -> None:
    found = desk()
    assert found.proposal(0.02 * math.sqrt(3) / 0.79, must=False) is None  # what runs already
    assert found.proposal(0.03, must=True).tolist().count(1) == 1
    found.now = np.zeros(3, dtype=np.int64)
    assert found.proposal(1.0, must=False).tolist() == [1, 1, 1]
    found.time[:, 1] = 0.99  # 0.03 ms of 4
    assert found.proposal(1.0, must=False) is None
    assert found.proposal(0.0, must=True) is None


def test_a_measured_error_moves_the_groups_it_is_of() -> None:
    found = desk()
    assert found.agrees(3 * 0.02**2)
    assert not found.agrees(3 * 0.04**2)
    found.learn([1], 0.5**2)
    assert found.error2[:, 1] == pytest.approx([0.02**2, 0.5**2, 0.02**2])
    assert found.proposal(0.1, must=True).tolist() == [1, 0, 1]
    found.learn([0, 2], math.inf)
    assert found.proposal(0.1, must=True).tolist() == [0, 0, 0]


def test_the_least_explained_segment_is_halved_until_one_group_is_left() -> None:
    predicted, truth = [1.0] * 8, [1.0] * 8
    truth[5] = 100.0
    known = {tuple(range(8)): sum(truth)}
    asked = []
    while (half := segments_to_ask(predicted, known)) is not None and len(asked) < 9:
        asked.append(half)
        whole = next(s for s in known if s[: len(half)] == half)
        known[half] = sum(truth[g] for g in half)
        known[whole[len(half) :]] = known.pop(whole) - known[half]
    assert known[5,] == 100.0
    assert len(asked) == 3


def test_a_new_policy_says_the_assignment_and_keeps_the_other_rules() -> None:
    policy, found = followed(), desk()
    base = policy.model_copy(
        update={"recipes": {"fp8": policy.recipes["fp8"].model_copy(update={"format": "bf16", "scaling": None})}}
    )
    names = ["layers.0", "layers.1", "layers.2", "head"]
    made = found.policy(policy, np.array([1, 0, 1]))
    plans = resolve(made, names)
    assert [bool(plans[name].scaled) for name in names] == [True, False, True, False]
    assert found.told(np.array([1, 0, 1])) == "layers.1: fp8 -> keep"
    # another recipe of that name in the policy: the recorded one gets a name of its own
    assert resolve(found.policy(base, found.now), names)["layers.0"].scaled
