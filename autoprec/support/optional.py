"""Optional packages: imported where they are used, through one helper whose error prints the pip line."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from types import ModuleType

from autoprec.errors import MissingDependencyError

#: import name -> (distribution, oldest version that works, what to pip install)
EXTRAS: dict[str, tuple[str, str, str]] = {
    "torchao": ("torchao", "0.15", "autoprec[torchao]"),
    "transformer_engine": ("transformer-engine", "2.19", "autoprec[te]"),
    "ray": ("ray", "2.40", "autoprec[ray]"),
    "transformers": ("transformers", "4.50", "autoprec[hf]"),
    "accelerate": ("accelerate", "1.10", "autoprec[hf]"),
    "lightning": ("lightning", "2.5", "autoprec[lightning]"),
    "bitsandbytes": ("bitsandbytes", "0.45", "bitsandbytes"),
    "psycopg2": ("psycopg2-binary", "2.9", "psycopg2-binary"),
    # AutoPrec itself needs mlflow-skinny alone, which is imported by the same name
    "mlflow": ("mlflow", "3.7", "autoprec[ui]"),
}


def _is_older(version: str, oldest: str) -> bool:
    """Compare two versions by their first two numbers."""
    found, needed = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (version, oldest))
    return found < needed


def installed_version(name: str) -> str | None:
    """Return the installed version of an import name, or None; nothing is imported."""
    distribution = EXTRAS.get(name, (name, "", ""))[0]
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def how_to_install(name: str) -> str:
    """Return the pip line of a package by import name."""
    return f"pip install '{EXTRAS.get(name, (name, '', name))[2]}'"


def is_available(name: str) -> bool:
    """Say whether ``require(name)`` would find the package in a version that works; nothing is imported."""
    if importlib.util.find_spec(name.split(".")[0]) is None:
        return False
    oldest, found = EXTRAS.get(name, (name, "", ""))[1], installed_version(name)
    if name == "mlflow" and found is None:  # what was found is mlflow-skinny
        return False
    return not oldest or found is None or not _is_older(found, oldest)


def require(name: str, *, purpose: str = "") -> ModuleType:
    """Import an optional package.

    Raises:
        MissingDependencyError: not installed, too old, or broken on import; the message carries the pip line.
    """
    top = name.split(".")[0]
    oldest = EXTRAS.get(top, (top, "", top))[1]
    why = f" for {purpose}" if purpose else ""
    fix = how_to_install(top)
    found = installed_version(top)
    if found is not None and oldest and _is_older(found, oldest):
        raise MissingDependencyError(f"{top} {found} is too old{why}: {oldest} or newer is needed", fix=fix)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"{top} is needed{why} but is not installed ({error})", fix=fix) from error
    except Exception as error:  # a package that is installed but broken (no CUDA libraries, ...) is reported as such
        raise MissingDependencyError(
            f"{top} is installed but cannot be imported{why}: {type(error).__name__}: {error}", fix=fix
        ) from error
