"""Errors of documents: the place, the nearest valid key or value, and a fix."""

from typing import Any, Literal

import pytest
from pydantic import Field

from autoprec.errors import FileError, SpaceError
from autoprec.support.validation import Frozen, cut, validated


class Inner(Frozen):
    kind: Literal["row", "tensor"] = "row"
    size: int = Field(1, ge=1)


class Outer(Frozen):
    inner: Inner = Inner()
    several: tuple[Inner, ...] = ()
    named: str = Field("", alias="name")
    gemms: dict[Literal["fprop", "dgrad", "wgrad"], str] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("document", "what", "fix"),
    [
        ({"iner": {}}, "iner: unknown key 'iner'", "did you mean 'inner'?"),
        ({"nam": ""}, "nam: unknown key 'nam'", "did you mean 'name'?"),
        ({"several": [{}, {"zzz": 1}]}, "several[1].zzz: unknown key 'zzz'", "valid keys: kind, size"),
        ({"inner": {"kind": "rwo"}}, "inner.kind: 'rwo' is not one of row, tensor", "did you mean 'row'?"),
        ({"inner": {"kind": "zzz"}}, "inner.kind: 'zzz' is not one of row, tensor", "use one of row, tensor"),
        ({"gemms": {"wgrda": "bf16"}}, "gemms.wgrda: 'wgrda' is not one of fprop", "did you mean 'wgrad'?"),
        ({"inner": {"size": 0}}, "inner.size: Input should be greater", "correct the value; see docs/page.md"),
    ],
)
def test_a_document_that_is_not_valid_is_refused_with_place_and_fix(
    document: dict[str, Any], what: str, fix: str
) -> None:
    with pytest.raises(SpaceError) as caught:
        validated(Outer, document, where="f.yaml", about="page", error=SpaceError)
    assert caught.value.what.startswith(what)
    assert (caught.value.where, caught.value.fix) == ("f.yaml", fix)


def test_several_faults_are_told_together() -> None:
    with pytest.raises(FileError, match=r"inner.kind: .*; inner.size: "):
        validated(Outer, {"inner": {"kind": "a", "size": 0}}, where="f", about="page")


def test_a_long_value_is_cut() -> None:
    assert cut("x" * 200) == "x" * 120 + "..."
