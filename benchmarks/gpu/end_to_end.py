"""AutoPrec's policy against what people set by hand, on a GPU: tokens per second, memory, divergence, search time.

    python benchmarks/gpu/end_to_end.py [--models gpt2-124m,llama-1.3b,vit-l] [--trials 40] [--out DIR] [--budget 480]

The reference is bf16 autocast with ``torch.compile``. The presets are torchao tensorwise / rowwise / auto-filter and
Transformer Engine delayed / current / block, each in a process of its own, in the same run. Parts that are done are
kept in ``DIR/parts`` and not run again, so that a lease that ends early is continued by calling it once more. With
``--eager --verify`` the reference is not compiled, and what is adopted is verified under further seeds. Without a GPU
the tiny models rehearse the whole path, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.figures import gap
from benchmarks.gpu.parts import PRESETS, ROOT, TRAIN, Parts, environment, write_whole


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
    command = [sys.executable, "-m", "autoprec", "search", "--json", "--no-mlflow", "--force"]
    command += ["--trials", str(trials), "--budget", f"{timeout_s:.0f}s", "--study", model, "-o", str(policy), *words]
    if (folder / "autoprec-runs" / model / "study.db").exists():
        command.insert(4, "--resume")
    began = time.monotonic()
    code, out, err = run(command, timeout_s + 120, folder)
    if code:
        return {"failed": err.strip()[-400:], "seconds": time.monotonic() - began}
    return json.loads(out) | {"wall_s": time.monotonic() - began, "policy_file": str(policy), "progress": err[-8000:]}


def verified(model: str, compiled: bool, steps: int, timeout_s: float, policy: str) -> dict[str, Any]:
    """Run ``autoprec verify`` on what a search adopted: two paired seeds beside the reference and the presets."""
    words = [str(TRAIN), "--model", model, "--precision", "bf16", "--steps", "100000"]
    words += ["--compile"] if compiled else []
    command = [sys.executable, "-m", "autoprec", "verify", "-q", "--policy", policy, "--seeds", "2"]
    began = time.monotonic()
    code, out, err = run([*command, "--steps", str(steps), *words], timeout_s, ROOT)
    if code not in (0, 1):
        return {"failed": (err.strip().splitlines() or ["no output"])[-1][:200]}
    return {"holds": code == 0, "output": out[-3000:], "seconds": time.monotonic() - began}


def table(model: str, rows: dict[str, dict[str, Any]], found: dict[str, Any]) -> list[str]:
    reference = rows.get("bf16", {"failed": "not run"})
    lines = [f"### {model}", "", "| what | items/s | vs bf16 | memory GB | divergence |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | failed: {row['failed'][:90]} | | | |")
            continue
        speed = row["items_per_s"] / reference["items_per_s"] if "failed" not in reference else float("nan")
        distance = gap(row["losses"], reference["losses"]) if "failed" not in reference else float("nan")
        lines.append(f"| {name} | {row['items_per_s']:.0f} | {speed:.3f}x | {row['memory_gb']:.2f} | {distance:.3%} |")
    if not found:
        lines += ["", "search: not done"]
    elif "failed" in found:
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
    parser.add_argument("--eager", action="store_true", help="the script as it is without torch.compile")
    parser.add_argument("--verify", action="store_true", help="verify what is adopted under further seeds, too")
    arguments = parser.parse_args()
    gpu = has_gpu()
    compiled = gpu and not arguments.eager
    models = (arguments.models or ("gpt2-124m,llama-1.3b,vit-l" if gpu else "tiny")).split(",")
    out = arguments.out or Path(tempfile.mkdtemp(prefix="gpu-end-to-end-"))
    parts = Parts(out.absolute() / "parts")
    lines = (
        [] if gpu else ["No GPU here: tiny models on the CPU rehearse the path; the figures say nothing of a GPU.", ""]
    )
    for model in models:
        before = list(lines)
        for rows, found, held in measured(parts, model, compiled, arguments, out.absolute()):
            lines = [*before, *table(model, rows, found)]
            lines += ["```", held.get("output", held.get("failed", "")).strip(), "```", ""] if held else []
            write_whole(out / f"{'-'.join(models)}.md", "\n".join(lines))  # what is known if the rest takes too long
    print("\n".join(lines))


def measured(
    parts: Parts, model: str, compiled: bool, arguments: argparse.Namespace, out: Path
) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Yield rows by name, the search and its verification after each that is added, what matters most first.

    bf16, the search and its policy come before the presets that it is compared with: the time may run out.
    """
    rows: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    held: dict[str, Any] = {}
    presets = arguments.presets.split(",")

    def row(name: str, precision: str, policy: str = "") -> dict[str, Any]:
        return parts.get(
            f"{model}-{name}", lambda: training(model, precision, compiled, arguments.steps, 240.0, policy)
        )

    for name in ("bf16", "search", "AutoPrec", *(name for name in presets if name != "bf16")):
        if name == "search":
            found = parts.get(
                f"{model}-search", lambda: search(model, compiled, arguments.trials, arguments.budget, out)
            )
        elif name != "AutoPrec":
            rows[name] = row(name, name)
        elif "policy_file" in found:
            # the archive may have been unpacked elsewhere since the search
            rows[name] = row("autoprec", "bf16", str(out / Path(found["policy_file"]).name))
        yield rows, found, held
    if arguments.verify and "policy_file" in found:
        policy = str(out / Path(found["policy_file"]).name)
        held = parts.get(f"{model}-verify", lambda: verified(model, compiled, arguments.steps, 400.0, policy))
        yield rows, found, held


if __name__ == "__main__":
    main()
