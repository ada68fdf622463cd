"""Optional packages: found, missing, too old, broken; each answer carries the pip line."""

import importlib
import importlib.metadata
import sys
from pathlib import Path

import pytest

from autoprec.errors import MissingDependencyError
from autoprec.support import optional
from autoprec.support.optional import EXTRAS, installed_version, is_available, require

ROOT = Path(__file__).resolve().parents[2]


def test_a_package_that_is_there_is_imported() -> None:
    assert require("json") is sys.modules["json"]
    assert is_available("json")
    assert installed_version("click") == importlib.metadata.version("click")


def test_a_missing_package_carries_the_pip_line() -> None:
    with pytest.raises(MissingDependencyError) as caught:
        require("transformer_engine", purpose="the transformer_engine backend")
    assert "pip install 'autoprec[te]'" in str(caught.value)
    assert "the transformer_engine backend" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_package_too_old_is_refused_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "installed_version", lambda _name: "0.9.1")
    monkeypatch.setattr(importlib, "import_module", lambda _name: pytest.fail("it was imported"))
    with pytest.raises(MissingDependencyError, match=r"torchao 0\.9\.1 is too old: 0\.15 or newer"):
        require("torchao")


def test_a_broken_package_says_what_broke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brokenpkg.py").write_text("raise OSError('libcudart.so.12: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependencyError, match="installed but cannot be imported: OSError: libcudart"):
        require("brokenpkg")


def test_availability_respects_the_oldest_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torchao.py").write_text("raise SystemExit('asking must not import')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(optional, "installed_version", lambda _name: "0.14.9")
    assert not is_available("torchao")
    monkeypatch.setattr(optional, "installed_version", lambda _name: "0.15.0+cpu")
    assert is_available("torchao")


def test_mlflow_skinny_is_not_taken_for_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """``doctor`` said that MLflow works, and ``autoprec ui`` that it is not installed."""
    monkeypatch.setattr(optional, "installed_version", lambda name: None if name == "mlflow" else "3.17")
    assert not is_available("mlflow")


@pytest.mark.parametrize("name", EXTRAS)
def test_every_extra_that_is_named_exists_in_the_project_file(name: str) -> None:
    install = EXTRAS[name][2]
    if install.startswith("autoprec["):
        extra = install.removeprefix("autoprec[").removesuffix("]")
        assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
