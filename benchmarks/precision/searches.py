"""Whole searches of faulty scripts: does every outlet of a search say that its reference is at fault?"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: A search that ends by itself on a script that trains for 20 steps.
OPTIONS = ("--trials", "2", "--steps", "4", "--warmup", "1", "--no-mlflow")
#: Seconds after which one is ended.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Searched:
    """What became of a search.

    Attributes:
        verdict: ``stay``, ``adopt``, ``undecided``; ``refused`` where it ended with an error instead.
        silent: outlets that do not say a fault's code and line, of terminal, result.json and policy.
        told: the headline, or the last words of an error.
    """

    verdict: str
    silent: tuple[str, ...]
    told: str


def searched(script: Path, code: str, lines: Sequence[int], options: Sequence[str]) -> Searched:
    """Search a copy of a script, as a person would, and return what it says of a fault.

    Args:
        script: which is copied to an empty folder.
        code: of the fault; any where it is empty.
        lines: where the fault is; any where there are none.
        options: of the search beside :data:`OPTIONS`.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(script, folder)
        command = [sys.executable, "-m", "autoprec", "search", *OPTIONS, *options, script.name]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        result = next(iter(Path(folder).glob("autoprec-runs/*/result.json")), None)
        policy = Path(folder) / "policy.yaml"
        if result is None:
            spoken = {"terminal": done.stderr[done.stderr.rfind("autoprec: ") :]}
            verdict, told = "refused", spoken["terminal"].strip()
        else:
            document = json.loads(result.read_text())
            verdict, told = document["verdict"], document["reason"]
            spoken = {"terminal": done.stdout, "result.json": told}
            if policy.exists():
                spoken["policy"] = policy.read_text()
    code, lines = ("", ()) if verdict == "refused" else (code, lines)  # it compares nothing: one of its faults will do
    silent = [outlet for outlet, text in spoken.items() if not _says(text, script.name, code, lines)]
    return Searched(verdict, tuple(silent), told)


def _says(text: str, name: str, code: str, lines: Sequence[int]) -> bool:
    text = " ".join(text.split())  # YAML folds long texts
    named = any(re.search(rf"{re.escape(name)}:{line}\b", text) for line in lines or [r"\d+"])
    return named and (f"[{code}]" in text or not code)
