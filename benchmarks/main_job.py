"""Every figure of the main job, by the commands a user types: the search, the rehearsal, the verdict, the hooks.

    python benchmarks/main_job.py [--only help,search,rehearsal,stay,hooks] [--out benchmarks/results/<date>_<what>.md]

Prints one row per figure: goal, measured, and whether the goal was met. Losses stay in the table. Run it on a quiet
machine: it times whole processes.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = str(ROOT / "examples" / "train_gpt.py")
SCALE = "width=16,depth=4,tokens=32"


@dataclass(frozen=True)
class Row:
    what: str
    goal: str
    measured: str
    met: bool


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_WAIT_POLICY": "PASSIVE"}


def autoprec(*words: str, cwd: Path, check: bool = True) -> tuple[str, float]:
    """Run one command; return (stdout, wall seconds)."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "autoprec", *words], cwd=cwd, env=environment(), capture_output=True, text=True
    )
    seconds = time.monotonic() - began
    if check and done.returncode:
        raise SystemExit(f"autoprec {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout, seconds


def cpu_seconds(command: list[str], cwd: Path) -> tuple[float, str]:
    """Return (user + system CPU seconds of the process and its children, stdout)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def help_cost(cwd: Path) -> list[Row]:
    costs = [cpu_seconds([sys.executable, "-m", "autoprec", "--help"], cwd)[0] for _ in range(7)]
    cost = statistics.median(costs) * 1000
    return [Row("`autoprec --help`, CPU time", "<= 150 ms", f"{cost:.0f} ms", cost <= 150)]


def timed_search(cwd: Path) -> list[Row]:
    out, seconds = autoprec("search", "--json", "-q", SCRIPT, cwd=cwd)
    result = json.loads(out)
    timings, trials = result["timings"], result["trials"]
    start = 1000 * timings["start_s_sum"] / timings["starts"]
    overhead = 1 - timings["training_s"] / seconds
    rows = [
        Row("search of train_gpt.py on this CPU, >= 30 trials + finalists, wall", "<= 180 s",
            f"{seconds:.0f} s, {trials['complete']} trials", seconds <= 180 and trials["complete"] >= 30),
        Row("share of that wall time not spent in training steps", "<= 15 %", f"{overhead:.1%}", overhead <= 0.15),
        Row("start of one CPU trial, ask to first training step", "<= 200 ms", f"{start:.0f} ms", start <= 200),
    ]  # fmt: skip
    out, _ = autoprec("verify", "--json", "-q", "--policy", "policy.yaml", SCRIPT, cwd=cwd, check=False)
    verified = json.loads(out)
    policy, presets = verified["rows"][0], verified["rows"][1:]
    best = max((row for row in presets if row["divergences"]), key=lambda row: row["speedup"])
    spread = (max(policy["speedups"]) - min(policy["speedups"])) / policy["speedup"]
    met = policy["speedup"] >= 1.8 and policy["divergence"] <= 0.0025
    rows.append(
        Row("policy vs script, re-timed by `autoprec verify`", ">= 1.8x at <= 0.25 %",
            f"{policy['speedup']:.2f}x at {policy['divergence']:.3%}", met)
    )  # fmt: skip
    rows.append(
        Row("policy vs the uniform bf16 preset, same run", "not slower beyond noise",
            f"{policy['speedup'] / best['speedup']:.3f}x of {best['name']} (spread {spread:.1%})",
            policy["speedup"] >= best["speedup"] * (1 - max(spread, 0.02)))
    )  # fmt: skip
    return rows


def rehearsal(cwd: Path) -> list[Row]:
    out, seconds = autoprec(
        "search", "--json", "-q", "--target", "h100", "--cost-scale", SCALE, "-o", "h100.yaml", SCRIPT, cwd=cwd
    )
    result = json.loads(out)
    best = result["best"]
    feasible = [
        row for row in result["presets"]
        if row["status"] == "ok" and row["divergence"] <= 0.0025
        and row["gradient_error"] <= result["budget"]["max_gradient_error"] * result["budget"]["gradient_noise"]
    ]  # fmt: skip
    preset = max(feasible, key=lambda row: row["speedup"], default={"speedup": 1.0, "name": "none"})
    policy = (cwd / "h100.yaml").read_text()
    formats = set(re.findall(r"format: (\w+)", policy))
    return [
        Row(f"the same search as a rehearsal for h100 ({SCALE}), wall", "<= 240 s", f"{seconds:.0f} s", seconds <= 240),
        Row("its policy: mixed FP8, modelled speed-up >= best feasible preset's", ">= 1.000",
            f"{best['speedup'] / preset['speedup']:.3f} of '{preset['name']}', formats {sorted(formats)}",
            best["speedup"] >= preset["speedup"] * 0.999 and "fp8" in formats),
        Row("its finalists' divergence", "<= 0.25 %", f"{best['divergence']:.3%}", best["divergence"] <= 0.0025),
    ]  # fmt: skip


def too_small(cwd: Path) -> list[Row]:
    out, seconds = autoprec("search", "--json", "-q", "--target", "h100", "-o", "stay.yaml", SCRIPT, cwd=cwd)
    result = json.loads(out)
    met = result["verdict"] == "stay" and seconds < 60
    return [Row("--target h100 at the model's own shapes", "stay, < 60 s",
                f"{result['verdict']}, {seconds:.0f} s: {result['reason'][:90]}", met)]  # fmt: skip


def hooks(cwd: Path) -> list[Row]:
    (cwd / "empty.yaml").write_text("schema: autoprec.policy/1\n")
    plain_command = [sys.executable, SCRIPT, "--steps", "60"]
    hooked_command = [sys.executable, "-m", "autoprec", "run", "--policy", "empty.yaml", SCRIPT, "--steps", "60"]
    ratios, same = [], True
    for _ in range(5):
        plain, left = cpu_seconds(plain_command, cwd)
        hooked, right = cpu_seconds(hooked_command, cwd)
        ratios.append(steps_seconds(right) / steps_seconds(left))
        same = same and losses(left) == losses(right)
        print(f"    whole process: plain {plain:.2f} s, hooked {hooked:.2f} s CPU", file=sys.stderr)
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
    "help": help_cost, "search": timed_search, "rehearsal": rehearsal, "stay": too_small, "hooks": hooks,
}  # fmt: skip


def describe_machine() -> str:
    import platform
    from importlib import metadata

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "?",
    )
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "optuna", "mlflow"))
    return f"{cpu}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for part in arguments.only.split(","):
            print(f"... {part}", file=sys.stderr)
            rows += PARTS[part](Path(scratch))
    lines = ["| what | goal | measured | met |", "|---|---|---|---|"]
    lines += [f"| {row.what} | {row.goal} | {row.measured} | {'yes' if row.met else 'NO'} |" for row in rows]
    print("\n".join(lines))
    if arguments.out:
        head = [
            f"# Main job, {time.strftime('%Y-%m-%d')}",
            "",
            describe_machine(),
            "",
            f"`python benchmarks/main_job.py --only {arguments.only}`",
            "",
        ]
        arguments.out.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
