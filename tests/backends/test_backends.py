"""Choosing backends; what they compute is checked by their conformance suite in tests/testing/test_backends.py."""

from __future__ import annotations

import pytest

from autoprec.backends import BACKENDS, choose, get
from autoprec.errors import UnknownNameError


def test_names() -> None:
    assert set(BACKENDS) == {"emulated", "native", "torchao", "transformer_engine"}
    assert all(get(name).name == name for name in BACKENDS)
    with pytest.raises(UnknownNameError, match="did you mean 'torchao'"):
        get("torch_ao")


def test_auto_follows_the_device() -> None:
    assert choose("auto", "cpu").name == "emulated"
    assert choose("auto", "cuda:0").name == "native"
    assert choose("torchao", "cpu").name == "torchao"
