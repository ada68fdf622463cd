"""Damaged files and hostile documents: what is accepted, what is refused, what it costs.

    python benchmarks/reliability/resilience_files.py [--only cut flip bombs fuzz guided] [--flips N] [--inputs N]

``cut`` truncates a study database, a policy with evidence and a sensitivity table, which carry checksums, and a space
and a policy written by hand, which carry none, at every byte; ``flip`` flips one to eight of their bits. A file with
a checksum must read as it was written or be refused with what, where and how to go on; one without must be valid or
refused. ``fuzz`` feeds the loaders of policies and spaces mutated documents and bombs, ``bombs`` every bomb at a
megabyte, ``guided`` what atheris finds (if it is installed), in child processes that may not have more than 256 MiB of
data, under Python's audit hooks. CPU seconds, peak resident memory.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.faults.damage import Kept, Outcome, cut_everywhere, flip_at_random, kept_files  # noqa: E402

#: Of all flips; the database costs a hundred times what the others cost.
SHARES = {
    "study database": 0.2, "policy with evidence": 0.4, "sensitivity table": 0.1, "space (no checksum)": 0.15,
    "policy by hand (no checksum)": 0.15,
}  # fmt: skip


def _damage(folder: str | None, judge: Callable[[Kept], Outcome]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for kept in kept_files(Path(name)):
            outcome = judge(kept)
            counts = dict(sorted(outcome.counts.items()))
            out[kept.name] = {"bytes": len(kept.raw), "cases": sum(counts.values()), **counts}
            if outcome.faults:
                out[kept.name]["faults"] = outcome.faults[:3]
            print(f"  {kept.name:30s} {json.dumps(out[kept.name])}", flush=True)
    return out


def _child(*words: str) -> dict[str, Any]:
    """Run one fuzzing process and return its figures."""
    ended = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        return {"died": ended.returncode, "says": ended.stderr[-500:]}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    print(f"  {json.dumps(found)}", flush=True)
    return found


def _fuzz(inputs: int, folder: str | None) -> dict[str, Any]:
    where = ("--folder", folder) if folder else ()
    return _child("tests.faults.fuzzing", "--count", str(inputs), "--seed", "20", *where)


def _guided(inputs: int, folder: str | None) -> dict[str, Any]:
    if importlib.util.find_spec("atheris") is None:
        return {"inputs": 0, "reason": "atheris is not installed"}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        return _child("tests.faults.guided", str(inputs), "20", name)


def main() -> None:
    """Run the sections and print, or write, their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=["cut", "flip", "bombs", "fuzz", "guided"])
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--inputs", type=int, default=100_000, help="half mutated and bombs, half guided")
    parser.add_argument("--folder", help="where the files lie while they are damaged; a disk in memory is quickest")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/DATE_resilience_files.json")
    options = parser.parse_args()
    folder = options.folder
    bombs = ("--folder", folder) if folder else ()
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "cut": lambda: _damage(folder, cut_everywhere),
        "flip": lambda: _damage(
            folder, lambda kept: flip_at_random(kept, round(options.flips * SHARES[kept.name]), seed=20)
        ),
        "bombs": lambda: _child("tests.faults.fuzzing", "--each-bomb", "1000000", *bombs),
        "fuzz": lambda: _fuzz(options.inputs // 2, folder),
        "guided": lambda: _guided(options.inputs - options.inputs // 2, folder),
    }
    for name in options.only or sections:
        print(f"{name}:", flush=True)
        found = sections[name]()
        if options.write:
            _write(name, found)


def _write(name: str, found: dict[str, Any]) -> None:
    """Put one section into today's file, with the command that made it."""
    path = ROOT / "benchmarks" / "results" / f"{datetime.date.today().isoformat()}_resilience_files.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    command = "python benchmarks/reliability/resilience_files.py " + " ".join(sys.argv[1:])
    machine = {
        "commands": {**known.get("machine", {}).get("commands", {}), name: command},
        "python": platform.python_version(),
        "processor": platform.machine(),
        "versions": {name: metadata.version(name) for name in ("PyYAML", "pydantic", "optuna", "SQLAlchemy")},
    }
    path.write_text(json.dumps({**known, name: found, "machine": machine}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
