"""A call that passes an argument which was removed is refused by its name."""

from __future__ import annotations

import inspect

import pytest

from autoprec.errors import UsageError
from autoprec.support.removed import no_longer_takes


@no_longer_takes(old="use 'new'")
def example(value: int, *, new: int = 1) -> int:
    return value + new


def test_a_removed_argument_is_named_and_its_old_default_is_not() -> None:
    assert example(1, new=2) == example(1, new=2, old=None) == 3  # type: ignore[call-arg]
    with pytest.raises(UsageError) as caught:
        example(1, old=5)  # type: ignore[call-arg]
    assert "'old'" in caught.value.what
    assert caught.value.fix == "use 'new'"


def test_any_other_unknown_argument_is_a_type_error_and_the_signature_does_not_show_the_removed() -> None:
    with pytest.raises(TypeError, match="other"):
        example(1, other=5)  # type: ignore[call-arg]
    assert list(inspect.signature(example).parameters) == ["value", "new"]
