"""The base class of backends: what has a default, and what must be said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from autoprec.backends import BACKENDS, Backend, get
from autoprec.backends.base import misaligned
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
    assert misaligned("fprop", 7, 32, 64, 16) == misaligned("dgrad", 7, 64, 32, 16) == ""
    assert misaligned("wgrad", 64, 7, 32, 16) == ""
    assert misaligned("fprop", 7, 32, 40, 16) == "fprop N = 40 is not a multiple of 16"
    assert misaligned("wgrad", 24, 7, 40, 16) == "wgrad M = 24 is not a multiple of 16"


def test_a_backend_that_never_ran_on_a_device_is_marked_and_the_documentation_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not any(get(name).is_experimental("cpu") for name in BACKENDS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0) if device == "cuda:1" else (9, 0))
    assert not any(get(name).is_experimental("cuda:0") for name in BACKENDS)
    marked = [name for name in BACKENDS if get(name).is_experimental("cuda:1")]
    page = Path(__file__).parents[2] / "docs" / "numerics.md"
    (line,) = re.findall(
        r"((?:`\w+`,? (?:and )?)+)have\s+run on an H100 [^.]*\.md`\) and are experimental", page.read_text()
    )
    assert re.findall(r"`(\w+)`", line) == marked
