"""Globs on module names: what they match, hostile ones, and brackets that are not closed."""

import fnmatch
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from autoprec.errors import PolicyError, SpaceError
from autoprec.policy import Glob, LayerRule, escape, glob_matches, glob_regex, policy_from_dict
from autoprec.policy.space import space_from_dict

NAMES = st.text(alphabet="ab.0[]*?!^-\\", max_size=12)
GLOBS: TypeAdapter[str] = TypeAdapter(Glob)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*", "anything.at.all", True),
        ("*", "", True),
        ("blocks.*.fc", "blocks.11.fc", True),
        ("blocks.*.fc", "blocks.1.mlp.fc", True),  # * crosses dots, as in Megatron's and torchao's filters
        ("blocks.*.fc", "xblocks.1.fc", False),
        ("blocks.*.fc", "blocks.1.fc2", False),
        ("blocks.?.fc", "blocks.1.fc", True),
        ("blocks.?.fc", "blocks.11.fc", False),
        ("blocks.[0-3].fc", "blocks.2.fc", True),
        ("blocks.[0-3].fc", "blocks.4.fc", False),
        ("blocks.[!0].fc", "blocks.4.fc", True),
        ("blocks.[!0].fc", "blocks.0.fc", False),
        ("Head", "head", False),
        ("a[", "a[", True),
        ("a[z-a]", "a[z-a]", True),
        ("a.b", "aXb", False),
        ("a+", "aa", False),
        ("a[^b]", "a^", True),
        ("a\nb", "a\nb", True),
    ],
)
def test_globs(pattern: str, name: str, expected: bool) -> None:
    assert glob_matches(pattern, name) is expected


@given(NAMES)
def test_an_escaped_name_matches_itself_and_nothing_else(name: str) -> None:
    assert glob_matches(escape(name), name)
    assert not glob_matches(escape(name), name + "x")


@given(NAMES, NAMES)
def test_no_pattern_breaks_matching(pattern: str, name: str) -> None:
    assert glob_matches(pattern, name) in (True, False)


@given(st.text(alphabet="ab.*?", max_size=8), st.text(alphabet="ab.", max_size=8))
def test_without_brackets_globs_mean_what_fnmatch_means(pattern: str, name: str) -> None:
    assert glob_matches(pattern, name) == fnmatch.fnmatchcase(name, pattern)


def test_many_stars_do_not_take_for_ever() -> None:
    began = time.process_time()
    assert not glob_matches("*" * 50 + "x", "a" * 200)
    assert not glob_matches("*a*a*a*a*b", "a" * 60)
    assert time.process_time() - began < 10


def test_a_glob_of_many_stars_takes_no_time() -> None:
    began = time.process_time()
    assert not glob_matches("*a" * 40 + "*b", "a" * 400)
    assert glob_matches("*a" * 40 + "*b", "a" * 400 + "b")
    assert time.process_time() - began < 5


GLOB = st.text("ab*?[]!^", max_size=8)


@given(GLOB, st.text("ab", max_size=8))
def test_the_bounded_form_and_the_exported_one_agree(pattern: str, name: str) -> None:
    assert glob_matches(pattern, name) == (re.compile(glob_regex(pattern), re.DOTALL).fullmatch(name) is not None)


@pytest.mark.parametrize(
    ("pattern", "at"), [("h.[0-9*", 3), ("a[", 2), ("[]", 1), ("[ab].c[d", 7), ("[[]x[", 5), ("[]]a[!", 5)]
)
def test_a_bracket_that_is_not_closed_is_refused_with_its_place(pattern: str, at: int) -> None:
    with pytest.raises(PolicyError, match="bracket at character") as caught:
        policy_from_dict({"schema": "autoprec.policy/1", "layers": [{"match": pattern, "recipe": "keep"}]})
    assert caught.value.what == f"layers[0].match: the bracket at character {at} of '{pattern}' is not closed"
    assert "'[[]'" in caught.value.fix
    with pytest.raises(SpaceError, match="is not closed"):
        space_from_dict({"schema": "autoprec.space/1", "name": "s", "groups": [[pattern]]})


@given(NAMES.filter(bool))
def test_a_name_with_brackets_is_written_escaped(name: str) -> None:
    assert LayerRule(match=escape(name), recipe="keep").match == escape(name)


@given(NAMES.filter(bool))
def test_what_is_refused_is_a_bracket_outside_every_choice(pattern: str) -> None:
    unclosed = "[" in re.sub(r"\[.[^\]]*\]", "", pattern, flags=re.DOTALL)
    try:
        GLOBS.validate_python(pattern)
    except ValidationError:
        assert unclosed
    else:
        assert not unclosed
