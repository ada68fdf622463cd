"""The exception tree: exit codes, the three parts of a message, and near-miss suggestions."""

import inspect
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec import errors
from autoprec.errors import AutoPrecError, UnknownNameError, nearest

ROOT = Path(__file__).resolve().parent.parent
CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, AutoPrecError)]


def test_every_error_is_drawn_in_the_tree() -> None:
    drawing = errors.__doc__ or ""
    for cls in CLASSES:
        (line,) = [row for row in drawing.splitlines() if row.strip("│├└─ ").startswith(cls.__name__ + " ")]
        assert f"exit {cls.exit_code}" in line


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_documented_with_its_exit_code(cls: type[AutoPrecError]) -> None:
    rows = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").splitlines()
    (row,) = [row for row in rows if f"`{cls.__name__}`" in row]
    assert row.startswith(f"| {cls.exit_code} |")


def test_a_message_says_what_where_and_how_to_fix() -> None:
    error = AutoPrecError("it broke", where="a.yaml", fix="mend it")
    assert str(error) == "a.yaml: it broke\n  fix: mend it"
    assert str(AutoPrecError("it broke")) == "it broke"
    assert (error.what, error.where, error.fix) == ("it broke", "a.yaml", "mend it")


def test_an_unknown_name_carries_the_nearest_one() -> None:
    error = UnknownNameError("target", "h1000", ["a100", "h100", "h200"])
    assert error.close == ["h100"]
    assert "did you mean 'h100'" in str(error)
    assert error.exit_code == 2
    lost = UnknownNameError("target", "zzz", ["a100", "h100"])
    assert lost.close == []
    assert "did you mean" not in str(lost)
    assert "a100, h100" in str(lost)


def test_long_lists_of_valid_names_are_cut() -> None:
    error = UnknownNameError("layer", "x", [f"layer{i:03d}" for i in range(100)])
    assert str(error).count("layer0") == 20
    assert str(error).endswith(", ...")


@pytest.mark.parametrize(
    ("name", "valid", "expected"),
    [
        ("BF16", ["bf16", "fp16"], ["bf16"]),
        ("fp8_rowise", ["fp8_rowwise", "fp8_delayed"], ["fp8_rowwise"]),
        ("transformer.h.0.mlp", ["transformer.h.0.mlp.c_fc", "lm_head"], ["transformer.h.0.mlp.c_fc"]),
        ("", ["a"], []),
        ("a", [], []),
    ],
)
def test_nearest(name: str, valid: list[str], expected: list[str]) -> None:
    assert nearest(name, valid) == expected


@given(st.text(max_size=20), st.lists(st.text(max_size=20), max_size=10))
def test_nearest_is_always_a_valid_name(name: str, valid: list[str]) -> None:
    assert set(nearest(name, valid, limit=3)) <= set(valid)


@given(st.text(min_size=1, max_size=20), st.lists(st.text(max_size=20), max_size=10))
def test_a_name_is_nearest_to_itself(name: str, others: list[str]) -> None:
    found = nearest(name, [name, *others])
    assert found
    assert found[0].lower() == name.lower()
