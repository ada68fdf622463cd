"""A search that is killed again and again, beside the same one that is not.

    python -m tests.faults.killed_every 40 --trials 10 examples/train_gpt.py --steps 60 --width 192 --depth 2

Each session is killed, with all that it started, after so many seconds of CPU time, in which a busy machine gets as far
as an idle one; then the very same command goes on. Prints what both answer and what they took.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
MOST_SESSIONS = 60


def started_by(root: int) -> dict[int, float]:
    """Return the CPU seconds of a process and of all that it started and that still run, by id."""
    seen: dict[int, tuple[int, int, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            seen[int(folder.name)] = int(words[1]), int(words[3]), sum(map(int, words[11:15])) / _TICKS
    found = {root}
    while more := {pid for pid, row in seen.items() if pid not in found and (row[0] in found or row[1] == root)}:
        found |= more
    return {pid: seen[pid][2] for pid in found if pid in seen}


def session(words: list[str], folder: Path, most_s: float) -> tuple[int | None, str, float]:
    """Run one command; its exit code (None: it was killed), what it printed, and its CPU seconds."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    with (folder / "out").open("w+b") as out, (folder / "err").open("ab") as err:
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=out, stderr=err, start_new_session=True)
        spent = 0.0
        while process.poll() is None:
            time.sleep(0.2)
            running = started_by(process.pid)
            spent = max(spent, sum(running.values()))
            if spent >= most_s:
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()
                return None, "", spent
    return process.returncode, (folder / "out").read_text(encoding="utf-8"), spent


def search(words: list[str], folder: Path, most_s: float) -> list[str]:
    """Search in sessions of at most so many CPU seconds; what there is to say of it, a cell each."""
    command = [sys.executable, "-m", "autoprec", "search", "--resume", "--study", "killed", "--no-mlflow", "--json"]
    began, spent = time.monotonic(), 0.0
    for number in range(1, MOST_SESSIONS + 1):
        code, text, seconds = session([*command, *words], folder, most_s)
        spent += seconds
        print(
            f"session {number}: {'killed' if code is None else code}, {seconds:.0f} CPU s", file=sys.stderr, flush=True
        )
        if code is not None:
            break
    took = [str(number), f"{time.monotonic() - began:.0f}", f"{spent:.0f}"]
    if code != 0:
        return ["no answer" if code is None else (folder / "err").read_text(encoding="utf-8")[-300:], "", "", *took]
    answer: dict[str, Any] = json.loads(text)
    best = answer.get("best") or {}
    low, high = best.get("intervals", {}).get("speedup", (0.0, 0.0))
    speed = f"{best.get('speedup', 1.0):.2f}x [{low:.2f}, {high:.2f}], {best.get('divergence', 0.0):.3%}"
    return [f"{answer['verdict']}: {best.get('name', '')}", speed, str(answer["trials"]["complete"]), *took]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("words", nargs=argparse.REMAINDER, help="options of the search, the script and its arguments")
    asked = parser.parse_args()
    words = [str(Path(word).resolve()) if word.endswith(".py") else word for word in asked.words]
    load = os.getloadavg()[0]
    print("| | answer | speed-up, divergence | trials | sessions | s | CPU s |\n|---|---|---|--:|--:|--:|--:|")
    for name, most_s in (("not killed", float("inf")), (f"killed every {asked.seconds:.0f} CPU s", asked.seconds)):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            print("|", " | ".join([name, *search(words, Path(folder), most_s)]), "|", flush=True)
    print(f"\nLoad {load:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores.")


if __name__ == "__main__":
    main()
