"""The compiled casts: kept once, never loaded from a folder that others write, and done without where need be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoprec.backends.cpu import library as module
from autoprec.backends.cpu.library import compiler, library

pytestmark = pytest.mark.skipif(not compiler(), reason="there is no C compiler here")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "autoprec"


def fresh() -> object:
    return library.__wrapped__()


def test_it_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fresh() is not None
    (made,) = folder.iterdir()
    monkeypatch.setattr(module, "_compile", lambda *_: pytest.fail("compiled again"))
    assert fresh() is not None
    assert list(folder.iterdir()) == [made]


def test_a_broken_file_is_made_anew(folder: Path) -> None:
    fresh()
    (made,) = folder.iterdir()
    made.unlink()  # the one that is loaded stays as it is
    made.write_bytes(b"not a library")
    assert fresh() is not None


def test_a_compiler_without_threads_or_without_the_machines_options_will_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, wrapper = compiler(), tmp_path / "cc"
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *openmp*|*march*|*mcpu*) exit 1;; esac\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CC", str(wrapper))
    assert fresh() is not None
    assert len(list(folder.iterdir())) == 1


def test_without_a_compiler_or_with_one_that_fails_there_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    assert fresh() is None
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(module, "compiler", lambda: "")
    assert fresh() is None


def test_a_folder_that_everybody_writes_is_not_used(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    assert fresh() is None
    folder.chmod(0o700)
    assert fresh() is not None


def test_a_cache_that_cannot_be_made_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert fresh() is None


def test_other_instructions_are_another_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("x86 only")
    fresh()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert fresh() is not None
    assert len(list(folder.iterdir())) == 2
