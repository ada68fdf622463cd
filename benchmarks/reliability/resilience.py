"""What a search survives: kills of its driver, its children, its workers and nodes; a tracking server that is gone.

    python benchmarks/reliability/resilience.py [kills children ray tracker workers ...] [--out FILE]
    python benchmarks/reliability/resilience.py --list

Prints a table per part. Driver, studies, signals, servers and clusters are real; ``kills``, ``tracker`` and ``workers``
train a simulated script, ``children`` and ``ray`` a small real one. Damaged files: ``resilience_files.py``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.reliability.resilience_workers import children, ray, workers  # noqa: E402
from tests.faults.points import POINTS  # noqa: E402
from tests.faults.servers import SERVERS, serving  # noqa: E402

Row = tuple[str, str, str]
DRIVER = ROOT / "tests" / "faults" / "driver.py"
COMMAND_LINE = ROOT / "tests" / "faults" / "cli_driver.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
KILLS, TRIALS, DELAY_S = 100, 240, 0.03
#: Searches beside each tracking server.
TURNS = 2


class Driven:
    """One driver process; notes when each line came."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.began = time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), *words],
            cwd=folder,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.endswith("\n"):
                self.lines.append((time.monotonic(), line.strip()))

    def end(self, after_s: float | None) -> int:
        """Kill it after some seconds (None: never), and return its exit code."""
        try:
            self.process.wait(after_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self._reader.join()
        return int(self.process.returncode)

    def at(self, text: str) -> float | None:
        """Return when a line first appeared, in seconds from the start."""
        return next((when - self.began for when, line in self.lines if line == text), None)

    def cpu(self, name: str) -> float | None:
        """Return the CPU seconds the driver had used when a phase began."""
        found = [line.split()[2] for _, line in self.lines if line.startswith(f"cpu {name} ")]
        return float(found[0]) if found else None

    def told(self) -> list[str]:
        return [line for _, line in self.lines if line.startswith(("trial preset", "trial search"))]


def kills() -> list[Row]:
    """kill -9 of the driver at random moments, until the study is done."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plain = Driven(folder, "plain", str(TRIALS), "0")
        if plain.end(None):
            raise SystemExit("\n".join(line for _, line in plain.lines))
        begin = plain.at("phase search") or 0.0
        told: list[str] = []
        resumes: list[float] = []
        spent: list[float] = []
        killed = failed = stalled = 0
        while True:
            done = killed >= KILLS
            known = (folder / "autoprec-runs" / "cut" / "study.db").exists()
            run = Driven(folder, "cut", str(TRIALS), str(DELAY_S), *(["resume"] if known else []))
            # any moment, but so that the study lasts: ahead of the kills, rather before its next trial ends
            ahead = len(told) * KILLS > TRIALS * (killed + 1)
            low, high = (0.3, 0.95) if ahead else (0.8, 1.4 + 0.2 * stalled)
            code = run.end(None if done else rng.uniform(low, high) * begin)
            stalled = 0 if ahead or run.told() else stalled + 1
            told += run.told()
            began, ready = run.at("begun"), run.at("phase search")
            if known and began is not None and ready is not None:
                resumes.append(ready - began)
                spent.append((run.cpu("search") or 0.0) - (run.cpu("begun") or 0.0))
            if code == 0:
                break
            killed += 1
            failed += code != -signal.SIGKILL
        stored = _stored(folder / "autoprec-runs" / "cut" / "study.db")
        same = _policy(folder / "plain.yaml") == _policy(folder / "cut.yaml")
    lost = len({line.split(maxsplit=2)[2].rpartition(" ")[0] for line in told} - set(stored))
    repeated = len(told) - len(set(told)) + len(stored) - len(set(stored))
    return [
        ("kill -9 of the driver at random moments of one study", str(KILLS), f"{killed} in {TRIALS} trials"),
        ("resumes that failed", "0", str(failed)),
        ("completed trials lost, repeated", "0, 0", f"{lost}, {repeated}"),
        ("stored, different", str(TRIALS), f"{len(stored)}, {len(set(stored))}"),
        (
            "from the end of the imports to the next trial (median, worst)",
            "<= 2 s",
            f"{statistics.median(resumes):.2f}, {max(resumes):.2f} s",
        ),
        ("the same in CPU time", "", f"{statistics.median(spent):.2f}, {max(spent):.2f} s"),
        ("final policy equal to the uninterrupted run's", "yes", "yes" if same else "no"),
    ]


def _stored(database: Path) -> list[str]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.load_study(study_name="cut", storage=f"sqlite:///{database}")
    records = [trial.user_attrs["record"] for trial in study.get_trials(deepcopy=False)]
    return [record["name"] for record in records if record["kind"] in ("preset", "search")]


def _policy(path: Path) -> object:
    from autoprec.policy import load_policy

    policy = load_policy(path)
    return policy.layers, policy.activations, policy.evidence["speedup"], policy.evidence["divergence"]


def tracker() -> list[Row]:
    """A whole search beside a server that is dead, silent, answers 500, or trickles; then ``autoprec ui --sync``."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for kind in SERVERS:
            folder = Path(scratch) / kind
            folder.mkdir()
            with serving(kind) as uri:
                waited = [_tracked_search(folder, f"{kind}{turn}", uri) for turn in range(TURNS)]
            target = f"sqlite:///{folder / 'later.db'}"
            words = ["ui", "--sync", str(folder / "autoprec-runs")]
            done = subprocess.run(
                [sys.executable, "-m", "autoprec", *words],
                env=ENVIRONMENT | {"MLFLOW_TRACKING_URI": target},
                capture_output=True,
                text=True,
            )
            name = f"tracking server {kind}"
            rows.append(
                (f"{name}: all the waiting of a search for it, worst of {TURNS}", "< 2 s", f"{max(waited):.2f} s")
            )
            wanted, stored = _wanted(folder / "autoprec-runs"), _runs(target)
            rows.append((f"{name}: runs after `autoprec ui --sync` (exit {done.returncode})", str(wanted), str(stored)))
    return rows


def _tracked_search(folder: Path, study: str, uri: str) -> float:
    """Run a whole search; return the seconds it spent in its tracking."""
    environment = ENVIRONMENT | {"MLFLOW_TRACKING_URI": uri, "AUTOPREC_TEST_WAITED": str(folder / "waited.txt")}
    words = ["search", "-q", "--trials", "20", "--seeds", "2", "--study", study]
    done = subprocess.run(
        [sys.executable, str(COMMAND_LINE), "0.05", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return float((folder / "waited.txt").read_text())


def _wanted(runs: Path) -> int:
    """Return how many runs the studies come to: one each, and one per finished record."""
    from autoprec.tracking.server import studies

    return sum(1 + len(folder.records()) for folder in studies(runs))


def _runs(uri: str) -> int:
    code = (
        "import sys, mlflow; c = mlflow.MlflowClient(sys.argv[1]); e = c.get_experiment_by_name('later'); "
        "print(len(c.search_runs([e.experiment_id], max_results=5000)))"
    )
    environment = ENVIRONMENT | {"MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code, uri], env=environment, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) if done.stdout.split() else 0


PARTS: dict[str, Callable[[], list[Row]]] = {
    "kills": kills,
    "children": children,
    "ray": ray,
    "tracker": tracker,
    "workers": workers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="what a search survives")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, help="add the table to this file")
    parser.add_argument("--list", action="store_true", help="print what broke from outside once, and its tests")
    arguments = parser.parse_args()
    if arguments.list:
        for number, (what, tests) in sorted(POINTS.items()):
            print("\n  ".join((f"{number}. {what}", *(f"tests/{test}" for test in tests))))
        return
    chosen = arguments.parts or list(PARTS)
    for part in chosen:
        if part not in PARTS:
            parser.error(f"no part '{part}'; there are {', '.join(PARTS)}")
    for part in chosen:
        began = time.monotonic()
        rows = PARTS[part]()
        lines = [f"| {part} | goal | measured |", "|---|---|---|"]
        lines += [f"| {what} | {goal} | {got} |" for what, goal, got in rows]
        lines += ["", f"({time.monotonic() - began:.0f} s)", ""]
        print("\n".join(lines), flush=True)
        if arguments.out:
            versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("optuna", "mlflow", "ray", "torch"))
            words = f"`python benchmarks/reliability/resilience.py {part}`"
            where = f"{datetime.date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"
            with arguments.out.open("a", encoding="utf-8") as stream:
                stream.write("\n".join([f"{words}: {where}", "", *lines, ""]))


if __name__ == "__main__":
    main()
