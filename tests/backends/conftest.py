"""Fixtures of several backends' tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoprec.backends import fused

KERNELS = "autoprec.backends.fused_kernels"


@pytest.fixture
def triton_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the kernels be imported anew for Triton's interpreter, on the CPU, and be compared with torch again."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    fused._kernels.cache_clear()
    monkeypatch.setattr(fused, "_agreed", {})
    yield
    sys.modules.pop(KERNELS, None)
    fused._kernels.cache_clear()


@pytest.fixture
def compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the Triton kernels, imported anew to be compiled.

    An interpreted one, which another test left as an attribute of the package, has nothing to compile.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    return importlib.import_module(KERNELS)
