"""Names that are imported on first use."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from autoprec.support.lazy import names_on_use


def test_a_name_is_imported_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lazy_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from autoprec.support.lazy import names_on_use\n__getattr__ = names_on_use(__name__, {'Answer': 'inner'})\n"
    )
    (package / "inner.py").write_text("class Answer:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    lazy = importlib.import_module("lazy_package")
    assert "lazy_package.inner" not in sys.modules
    assert lazy.Answer is importlib.import_module("lazy_package.inner").Answer
    assert "Answer" in vars(lazy)
    with pytest.raises(AttributeError, match="module 'lazy_package' has no attribute 'Anser'"):
        _ = lazy.Anser


def test_a_name_that_its_module_lacks_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        names_on_use("autoprec", {"nothing": "errors"})("nothing")
