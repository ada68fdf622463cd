"""What the parts of the day on a GPU share: results by name that a later call, or another machine, goes on from."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["PRESETS", "ROOT", "TRAIN", "Parts", "environment", "write_whole"]

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "benchmarks" / "gpu" / "train_transformer.py"
#: What people set by hand, as that script's ``--precision`` names it.
PRESETS = ("bf16", "torchao-tensorwise", "torchao-rowwise", "torchao-auto", "te-delayed", "te-current", "te-block")
#: How a run fails that lacks a package, which says nothing about what was asked.
ABSENT = re.compile(r"No module named|is not installed|ModuleNotFoundError|ImportError")


def environment() -> dict[str, str]:
    """Return the environment of processes that import this checkout."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    made = path.with_name(path.name + ".new")
    made.write_text(text)
    made.replace(path)


class Parts:
    """Results by name, kept on disk, so that a second call continues the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a result, made where it is not kept; what failed for a missing package is made again next time."""
        path = self._folder / f"{name}.json"
        if path.exists():
            return dict(json.loads(path.read_text()))
        print(f"... {name}", file=sys.stderr, flush=True)
        value = make()
        if not ABSENT.search(str(value.get("failed", ""))):
            write_whole(path, json.dumps(value))
        return value
