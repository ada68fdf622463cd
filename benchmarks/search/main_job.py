"""Every figure of the main job, by the commands a user types: the first minutes, the search, the rehearsal, the hooks.

    python benchmarks/search/main_job.py [--only PART,PART] [--out benchmarks/results/<date>_<what>.md]

Prints one row per figure: goal, measured, and whether the goal was met. Losses stay in the table. Wall times need a
quiet machine; each row also says the CPU time of all processes, which a busy one changes little. All parts but
``install`` (a download) take 13 minutes on two cores: demo 2, answer 1/4, rehearsal 3, loaded 6, hooks 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "train_gpt.py")
#: As the demo has it: 1.4 B parameters, which an H100 can train.
SCALE = "width=8,depth=4,tokens=32"
REHEARSAL = ("--target", "h100", "--cost-scale", SCALE)
#: Other work beside the search: processes that never wait.
LOAD = 12


@dataclass(frozen=True)
class Row:
    what: str
    goal: str
    measured: str
    met: bool


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Ran:
    """One finished command."""

    stdout: str
    code: int
    wall_s: float
    cpu_s: float

    @property
    def cost(self) -> str:
        return f"{self.wall_s:.0f} s ({self.cpu_s:.0f} s of CPU)"


def run(command: list[str], cwd: Path, *, codes: tuple[int, ...] = (0,)) -> Ran:
    """Run one command to its end; any other exit code ends the benchmark with the command's last lines."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in codes:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ran(done.stdout, done.returncode, seconds, cpu)


def autoprec(*words: str, cwd: Path, codes: tuple[int, ...] = (0,)) -> Ran:
    return run([sys.executable, "-m", "autoprec", *words], cwd, codes=codes)


@contextmanager
def load(count: int) -> Iterator[None]:
    """Keep ``count`` processes busy beside what is measured."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def help_cost(cwd: Path) -> list[Row]:
    cost = statistics.median(autoprec("--help", cwd=cwd).cpu_s for _ in range(7)) * 1000
    return [Row("`autoprec --help`, CPU time", "<= 150 ms", f"{cost:.0f} ms", cost <= 150)]


def install(cwd: Path) -> list[Row]:
    """What ``make demo`` installs first, from the package index, into a fresh clone, without pip's cache."""
    run(["git", "clone", "-q", str(ROOT), str(cwd / "clone")], cwd)
    words = ["make", "-C", str(cwd / "clone"), f"PYTHON={sys.executable}", "ready"]
    made = run(["env", "-u", "PYTHONPATH", "PIP_NO_CACHE_DIR=1", *words], cwd)
    return [Row("installation before `make demo`, fresh clone, no cache", "<= 90 s", made.cost, made.wall_s <= 90)]


def demo(cwd: Path) -> list[Row]:
    made = autoprec("demo", cwd=cwd)
    report = list(cwd.glob("autoprec-runs/*/report.html"))
    found = re.search(r"verdict: (.{0,110})", made.stdout)
    what = "policy and report" if (cwd / "demo-policy.yaml").exists() and report else "NO policy or report"
    met = made.wall_s <= 180 and what.startswith("policy")
    return [
        Row("`make demo` after installation", "a searched policy, <= 180 s",
            f"{made.cost}, {what}; {found[1] if found else 'no verdict'}", met)
    ]  # fmt: skip


def first_answer(cwd: Path) -> list[Row]:
    """Time from the command to the line that says what could be gained; the search is interrupted then."""
    command = [sys.executable, "-m", "autoprec", "search", "--target", "h100", SCRIPT]
    began, told = time.monotonic(), ""
    process = subprocess.Popen(command, cwd=cwd, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if b"what could be gained" in line:
            told = line.decode().split("what could be gained: ")[-1].strip()
            break
    seconds = time.monotonic() - began
    process.terminate()  # not SIGINT: a shell lets its background jobs ignore that
    process.communicate()
    return [
        Row("first useful answer of `autoprec search --target h100`", "<= 15 s",
            f"{seconds:.1f} s: {told[:110] or 'none'}", bool(told) and seconds <= 15)
    ]  # fmt: skip


def timed_search(cwd: Path) -> list[Row]:
    """The search that is timed on this machine; a CPU without bf16 instructions gains nothing, and is told so."""
    made = autoprec("search", "--json", "-q", SCRIPT, cwd=cwd)
    result = json.loads(made.stdout)
    if result["verdict"] == "stay":
        return [
            Row("search of train_gpt.py on this CPU", "where nothing can be gained: stay, with the reason, <= 60 s",
                f"{made.cost}: {result['reason'][:110]}", made.wall_s <= 60 and not result["trials"]["complete"])
        ]  # fmt: skip
    timings, trials = result["timings"], result["trials"]
    start = 1000 * timings["start_s_sum"] / timings["starts"]
    overhead = 1 - timings["training_s"] / made.wall_s
    rows = [
        Row("search of train_gpt.py on this CPU, >= 30 trials + finalists, wall", "<= 180 s",
            f"{made.cost}, {trials['complete']} trials", made.wall_s <= 180 and trials["complete"] >= 30),
        Row("share of that wall time not spent in training steps", "<= 15 %", f"{overhead:.1%}", overhead <= 0.15),
        Row("start of one CPU trial, ask to first training step", "<= 200 ms", f"{start:.0f} ms", start <= 200),
    ]  # fmt: skip
    again = autoprec("verify", "--json", "-q", "--policy", "policy.yaml", SCRIPT, cwd=cwd, codes=(0, 1))
    policy, *presets = json.loads(again.stdout)["rows"]
    best = max((row for row in presets if row["divergences"]), key=lambda row: row["speedup"])
    spread = (max(policy["speedups"]) - min(policy["speedups"])) / policy["speedup"]
    met = policy["speedup"] >= 1.8 and policy["divergence"] <= 0.0025
    return [
        *rows,
        Row("policy vs script, re-timed by `autoprec verify`", ">= 1.8x at <= 0.25 %",
            f"{policy['speedup']:.2f}x at {policy['divergence']:.3%}", met),
        Row("policy vs the uniform bf16 preset, same run", "not slower beyond noise",
            f"{policy['speedup'] / best['speedup']:.3f}x of {best['name']} (spread {spread:.1%})",
            policy["speedup"] >= best["speedup"] * (1 - max(spread, 0.02))),
    ]  # fmt: skip


def rehearsal(cwd: Path) -> list[Row]:
    made = autoprec("search", "--json", "-q", *REHEARSAL, "--trials", "30", "-o", "h100.yaml", SCRIPT, cwd=cwd)
    result = json.loads(made.stdout)
    best, trials, timings = result["best"], result["trials"], result["timings"]
    acceptable = [row for row in result["presets"] if _acceptable(row, result["budget"])]
    nothing: dict[str, Any] = {"speedup": 1.0, "name": "none"}
    preset = max(acceptable, key=lambda row: float(row["speedup"]), default=nothing)
    formats = set(re.findall(r"format: (\w+)", (cwd / "h100.yaml").read_text()))
    where = ", ".join(f"{name[:-2]} {timings[name]:.0f} s" for name in ("verdict_s", "sensitivity_s", "finalists_s"))
    return [
        Row(f"rehearsal for h100 ({SCALE}), at most 30 trials, finalists, wall", "<= 180 s",
            f"{made.cost}, {trials['complete']} trials; {where}", made.wall_s <= 180),
        Row("its policy: mixed FP8, modelled speed-up >= best acceptable preset's", ">= 1.000",
            f"{best['speedup'] / preset['speedup']:.3f} of '{preset['name']}', formats {sorted(formats)}, "
            f"{best.get('speedup_over_16bit', 0.0):.2f}x over 16-bit",
            best["speedup"] >= preset["speedup"] * 0.999 and "fp8" in formats),
        Row("its finalists' divergence", "<= 0.25 %", f"{best['divergence']:.3%}", best["divergence"] <= 0.0025),
    ]  # fmt: skip


def _acceptable(row: dict[str, Any], budget: dict[str, Any]) -> bool:
    """Say whether a preset was measured, keeps to both limits, and was not rejected as a finalist."""
    most = budget["max_gradient_error"] * (budget["gradient_noise"] or float("inf"))
    fits = row["status"] == "ok" and row["divergence"] <= 0.0025 and row["gradient_error"] <= most
    return fits and not row["reason"].startswith("rejected")


def loaded(cwd: Path) -> list[Row]:
    """The rehearsal beside other work, with the short trials of the demo: what counts is that none is lost."""
    short = ("--trials", "10", "--steps", "8", "--warmup", "2", "--seeds", "2", "--budget", "6m")
    with load(LOAD):
        made = autoprec("search", "--json", "-q", *REHEARSAL, *short, "-o", "busy.yaml", SCRIPT, cwd=cwd, codes=(0, 3))
    trials = json.loads(made.stdout)["trials"]
    return [
        Row(f"the rehearsal beside a load of {LOAD}: trials lost (hung or otherwise)", "0",
            f"{trials['failed']} of {sum(trials.values())} in {made.cost}",
            trials["failed"] == 0 and trials["complete"] > 0)
    ]  # fmt: skip


def hooks(cwd: Path) -> list[Row]:
    (cwd / "empty.yaml").write_text("schema: autoprec.policy/1\n")
    plain_command = [sys.executable, SCRIPT, "--steps", "60"]
    hooked_command = [sys.executable, "-m", "autoprec", "run", "--policy", "empty.yaml", SCRIPT, "--steps", "60"]
    ratios, same = [], True
    for _ in range(5):
        plain, hooked = run(plain_command, cwd), run(hooked_command, cwd)
        ratios.append(steps_seconds(hooked.stdout) / steps_seconds(plain.stdout))
        same = same and losses(plain.stdout) == losses(hooked.stdout)
        print(f"    whole process: plain {plain.cpu_s:.2f} s, hooked {hooked.cpu_s:.2f} s CPU", file=sys.stderr)
    ratio = statistics.median(ratios)
    return [
        Row("`autoprec run`, empty policy, vs plain python: training loop", "<= 2 % slower",
            f"{ratio - 1:+.1%}", ratio <= 1.02),
        Row("their losses", "bit-identical as printed", "identical" if same else "different", same),
    ]  # fmt: skip


def losses(text: str) -> list[str]:
    return re.findall(r"loss (\d+\.\d+)", text)


def steps_seconds(text: str) -> float:
    """Seconds of the training loop, as the script itself prints them."""
    return float(re.findall(r"(\d+\.\d) s", text)[-1])


PARTS: dict[str, Callable[[Path], list[Row]]] = {
    "help": help_cost, "demo": demo, "answer": first_answer, "rehearsal": rehearsal, "loaded": loaded,
    "search": timed_search, "hooks": hooks, "install": install,
}  # fmt: skip


def describe_machine() -> str:
    import platform
    from importlib import metadata

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "?",
    )
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "optuna", "mlflow"))
    known = Path("/proc/cpuinfo").read_text()
    units = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in known]
    machine = f"{cpu}, {os.cpu_count()} cores ({', '.join(units)}), load {os.getloadavg()[0]:.1f}"
    return f"{machine}; Python {platform.python_version()}, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(part for part in PARTS if part != "install"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for part in arguments.only.split(","):
            print(f"... {part}", file=sys.stderr)
            folder = Path(scratch) / part
            folder.mkdir()
            rows += PARTS[part](folder)
    lines = ["| what | goal | measured | met |", "|---|---|---|---|"]
    lines += [f"| {row.what} | {row.goal} | {row.measured} | {'yes' if row.met else 'NO'} |" for row in rows]
    print("\n".join(lines))
    if arguments.out:
        head = [
            f"# Main job, {time.strftime('%Y-%m-%d')}",
            "",
            describe_machine(),
            "",
            f"`python benchmarks/search/main_job.py --only {arguments.only}`",
            "",
        ]
        arguments.out.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
