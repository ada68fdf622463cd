"""Savers that open files in C write into the trial's layer; uploads do nothing."""

from __future__ import annotations

import importlib.util
import io
import os
import sqlite3
import sys
import warnings
from pathlib import Path

import pytest

from autoprec.trial.inside.isolate import savers
from autoprec.trial.inside.isolate.overlay import Overlay
from autoprec.trial.inside.isolate.overlay_calls import install

from .test_overlay import in_fork


@pytest.fixture
def user(tmp_path: Path) -> Path:
    folder = tmp_path / "user"
    folder.mkdir()
    (tmp_path / "layer").mkdir()
    return folder


def begin(user: Path, tmp_path: Path) -> None:
    os.chdir(user)
    overlay = Overlay(str(tmp_path / "layer"), [str(user)], [])
    savers.install(overlay)
    install(overlay)


def test_what_c_libraries_save_is_loaded_again(user: Path, tmp_path: Path) -> None:
    def work() -> None:
        import torch

        begin(user, tmp_path)
        value = torch.arange(4.0)
        torch.save({"x": value}, "model.pt")
        assert torch.equal(torch.load("model.pt")["x"], value)
        assert torch.equal(torch.load("model.pt", mmap=True)["x"], value)
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer), value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and still what many scripts do
            torch.jit.save(torch.jit.trace(lambda x: x + 1, value), "script.pt")
            assert torch.equal(torch.jit.load("script.pt")(value), value + 1)
        torch.from_file("raw.bin", shared=True, size=4).copy_(value)
        assert os.path.getsize("raw.bin") == 16
        with sqlite3.connect("runs.db") as database:
            database.execute("create table t (x)")
        assert os.path.exists("runs.db")
        if importlib.util.find_spec("safetensors") is not None:
            from safetensors.torch import load_file, save_file

            save_file({"x": value}, "model.safetensors")
            assert torch.equal(load_file("model.safetensors")["x"], value)
        assert savers.suppressed == {}

    assert in_fork(work)
    assert list(user.iterdir()) == []


def test_what_cannot_be_pickled_or_does_not_fit_is_counted(user: Path, tmp_path: Path) -> None:
    def work() -> None:
        import torch

        begin(user, tmp_path)
        torch.save(lambda: 0, "model.pt")
        assert not os.path.exists("model.pt")
        savers.MAX_SAVED_BYTES = -1
        torch.save({}, "other.pt")
        assert savers.suppressed == {"torch.save": 2}
        assert savers.remarks() == "torch.save (2 times)"

    assert in_fork(work)
    assert list(user.iterdir()) == []


def test_uploads_do_nothing_and_modules_are_wrapped_when_imported(user: Path, tmp_path: Path) -> None:
    package = tmp_path / "package" / "huggingface_hub"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def upload_file(path):\n    raise SystemExit('uploaded')\n")

    def work() -> None:
        for name in [n for n in sys.modules if n.startswith("huggingface_hub")]:
            del sys.modules[name]
        sys.path.insert(0, str(tmp_path / "package"))
        begin(user, tmp_path)
        import huggingface_hub

        assert huggingface_hub.upload_file("x") is None
        assert savers.suppressed == {"huggingface_hub.upload_file": 1}

    assert in_fork(work)
