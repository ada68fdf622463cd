"""Where a study's figures come from: versions of what ran, and the commit of the script."""

from __future__ import annotations

import contextlib
import platform
import subprocess

from autoprec._version import __version__
from autoprec.support.optional import installed_version

#: What changes numerics, times or proposals; optional packages only where they are installed.
_PACKAGES = ("torch", "optuna", "mlflow-skinny", "numpy", "torchao", "transformer_engine", "transformers", "accelerate")
_PATIENCE_S = 2.0


def versions() -> dict[str, str]:
    """Return the version of AutoPrec, of Python, and of every installed package that matters; nothing is imported."""
    found = {name.replace("_", "-"): installed_version(name) for name in _PACKAGES}
    known = {name: version for name, version in found.items() if version is not None}
    return {"autoprec": __version__, "python": platform.python_version(), **known}


def commit_of(folder: str) -> dict[str, str]:
    """Return ``git_commit`` of a folder and ``git_changes``: ``none`` or ``uncommitted``; empty outside one."""

    def git(*words: str) -> str:
        line = ["git", "-C", folder or ".", *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
        return done.stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError, UnicodeDecodeError):
        commit = git("rev-parse", "HEAD")
        return {"git_commit": commit, "git_changes": "uncommitted" if git("status", "--porcelain", "-uno") else "none"}
    return {}
