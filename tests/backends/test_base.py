"""The base class of backends: what has a default, and what must be said."""

from __future__ import annotations

import pytest

from autoprec.backends import BACKENDS, Backend, get
from autoprec.backends.base import feature_sizes
from autoprec.precision.hardware import Capability


@pytest.mark.parametrize("name", BACKENDS)
def test_what_a_backend_does_not_need_has_a_default(name: str) -> None:
    backend = get(name)
    assert isinstance(backend, Backend)
    assert backend.around_model() is None


def test_a_backend_must_answer_and_bind() -> None:
    with pytest.raises(TypeError, match=r"available.*bind.*capability"):
        type("Half", (Backend,), {"name": "half"})()


def test_a_no_is_false() -> None:
    assert Capability(True)
    assert not Capability(False, "no such unit")


def test_tokens_are_padded_so_they_are_not_a_feature() -> None:
    assert feature_sizes("fprop", 7, 32, 64) == {"K": 32, "N": 64}
    assert feature_sizes("dgrad", 7, 64, 32) == {"K": 64, "N": 32}
    assert feature_sizes("wgrad", 64, 7, 32) == {"M": 64, "N": 32}
