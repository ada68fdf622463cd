"""AutoPrec's policy against what people set by hand, on a GPU: tokens per second, memory, divergence, search time.

    python benchmarks/gpu_end_to_end.py [--models gpt2-124m,llama-1.3b,vit-l] [--trials 40] [--out DIR] [--budget 480]

The reference is bf16 autocast with ``torch.compile``. The presets are torchao tensorwise / rowwise / auto-filter and
Transformer Engine delayed / current / block, each in a process of its own, in the same run. Parts that are done are
kept in ``DIR/parts`` and not run again, so that a lease that ends early is continued by calling it once more. Without
a GPU the tiny models rehearse the whole path, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "benchmarks" / "gpu" / "train_transformer.py"
#: How a run fails that lacks a package, which says nothing about the preset.
ABSENT = re.compile(r"No module named|is not installed|ModuleNotFoundError|ImportError")
PRESETS = ("bf16", "torchao-tensorwise", "torchao-rowwise", "torchao-auto", "te-delayed", "te-current", "te-block")


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def has_gpu() -> bool:
    check = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", check], env=environment(), check=False).returncode == 0


def run(command: list[str], timeout_s: float, cwd: Path) -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"not done after {timeout_s:.0f} s"
    return done.returncode, done.stdout, done.stderr


def training(
    model: str, precision: str, compiled: bool, steps: int, timeout_s: float, policy: str = ""
) -> dict[str, Any]:
    """Run the script once; return its own figures and losses."""
    words = [str(TRAIN), "--model", model, "--precision", precision, "--steps", str(steps)]
    words += ["--compile"] if compiled else []
    command = [sys.executable, *words]
    if policy:
        command = [sys.executable, "-m", "autoprec", "run", "--policy", policy, *words]
    code, out, err = run(command, timeout_s, ROOT)
    found = re.search(r"items_per_s ([\d.]+) step_ms ([\d.]+) memory_gb ([\d.]+)", out)
    if code or not found:
        return {"failed": (err.strip().splitlines() or ["no output"])[-1][:200]}
    losses = [float(value) for value in re.findall(r"loss ([\d.]+|nan|inf)", out)]
    rate, step, memory = map(float, found.groups())
    return {"items_per_s": rate, "step_ms": step, "memory_gb": memory, "losses": losses}


def search(model: str, compiled: bool, trials: int, timeout_s: float, folder: Path) -> dict[str, Any]:
    """Search a policy for the bf16 script; return the result and the seconds it took."""
    words = [str(TRAIN), "--model", model, "--precision", "bf16", "--steps", "100000"]
    words += ["--compile"] if compiled else []
    policy = folder / f"{model}.yaml"
    command = [sys.executable, "-m", "autoprec", "search", "--json", "-q", "--no-mlflow", "--force"]
    command += ["--trials", str(trials), "--budget", f"{timeout_s:.0f}s", "--study", model, "-o", str(policy), *words]
    if (folder / "autoprec-runs" / model / "study.db").exists():
        command.insert(4, "--resume")
    began = time.monotonic()
    code, out, err = run(command, timeout_s + 120, folder)
    if code:
        return {"failed": err.strip()[-400:], "seconds": time.monotonic() - began}
    return json.loads(out) | {"wall_s": time.monotonic() - began, "policy_file": str(policy)}


def gap(losses: list[float], reference: list[float]) -> float:
    pairs = list(zip(losses, reference, strict=False))[1:]
    return sum(abs(a - b) / b for a, b in pairs) / max(1, len(pairs))


class Parts:
    """Results by name, kept on disk, so that a second call continues the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = self._folder / f"{name}.json"
        if path.exists():
            return dict(json.loads(path.read_text()))
        print(f"... {name}", file=sys.stderr, flush=True)
        value = make()
        if not ABSENT.search(str(value.get("failed", ""))):  # a package may be there the next time
            path.write_text(json.dumps(value))
        return value


def table(model: str, rows: dict[str, dict[str, Any]], found: dict[str, Any]) -> list[str]:
    reference = rows["bf16"]
    lines = [f"### {model}", "", "| what | items/s | vs bf16 | memory GB | divergence |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | failed: {row['failed'][:90]} | | | |")
            continue
        speed = row["items_per_s"] / reference["items_per_s"] if "failed" not in reference else float("nan")
        distance = gap(row["losses"], reference["losses"]) if "failed" not in reference else float("nan")
        lines.append(f"| {name} | {row['items_per_s']:.0f} | {speed:.3f}x | {row['memory_gb']:.2f} | {distance:.3%} |")
    if "failed" in found:
        lines += ["", f"search failed after {found['seconds']:.0f} s: {found['failed'][-200:]}"]
    else:
        lines += ["", f"search: {found['wall_s']:.0f} s, {found['trials']['complete']} trials; {found['reason']}"]
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description="policies against presets on a GPU")
    parser.add_argument("--models", default="")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for each search")
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    gpu = has_gpu()
    models = (arguments.models or ("gpt2-124m,llama-1.3b,vit-l" if gpu else "tiny")).split(",")
    out = arguments.out or Path(tempfile.mkdtemp(prefix="gpu-end-to-end-"))
    parts = Parts(out.absolute() / "parts")
    lines = (
        [] if gpu else ["No GPU here: tiny models on the CPU rehearse the path; the figures say nothing of a GPU.", ""]
    )
    for model in models:
        rows = {
            precision: parts.get(
                f"{model}-{precision}", lambda m=model, p=precision: training(m, p, gpu, arguments.steps, 240.0)
            )
            for precision in arguments.presets.split(",")
        }
        found = parts.get(
            f"{model}-search", lambda m=model: search(m, gpu, arguments.trials, arguments.budget, out.absolute())
        )
        if "policy_file" in found:
            rows["AutoPrec"] = parts.get(
                f"{model}-autoprec",
                lambda m=model, f=found: training(m, "bf16", gpu, arguments.steps, 240.0, policy=f["policy_file"]),
            )
        lines += table(model, rows, found)
    print("\n".join(lines))
    (out / "end_to_end.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
