"""Does a policy that was found on a small model hold on a large one? The law of its gradient error, and the figures.

    python benchmarks/transfer/transfer.py --only law             # gradient errors by size: about five minutes
    python benchmarks/transfer/transfer.py --only transfer        # predicted against measured, 16 times larger
    python benchmarks/transfer/transfer.py --only llama,families  # Llama-70B from its config; 26 Hugging Face families
    python benchmarks/transfer/transfer.py --output benchmarks/results/DATE_transfer.md

``law``: widths, depths, tokens per step and ages of a tiny GPT and a tiny ViT are varied one at a time around one
model; each *family* (a role in all blocks) is put under each recipe on the same weights and batch. What is reported is
how the relative error of the whole gradient changes, which power of the size predicts it best, and how far off that is.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from autoprec.graph.roles import places
from benchmarks.transfer.figures import run_families, run_llama, run_transfer
from benchmarks.transfer.models import CHOICES, Looked, Size, Store

Row = tuple[str, str, str]
#: kind -> ``width=128`` -> ``role|choice`` -> relative gradient error
Points = dict[str, dict[str, dict[str, float]]]
#: fitted power, its residual, the residual of every rule
Fit = tuple[float, float, dict[str, float]]
AXES: dict[str, tuple[int, ...]] = {
    "width": (32, 64, 128, 256),
    "depth": (2, 4, 8),
    "tokens": (128, 512, 2048),
    "age": (30, 90),
}
KINDS = ("gpt", "vit")
#: Powers of a size that a law may have; the best of them is named, the fitted one is printed beside it.
RULES = {"constant": 0.0, "x^(-1/4)": -0.25, "1/sqrt(x)": -0.5, "1/x": -1.0, "x^(1/4)": 0.25, "sqrt(x)": 0.5}
SEEDS = 2
#: MXFP8 with powers of two as scales errs as row-wise scaling does where nothing underflows: one of them is asked.
LAW_CHOICES = tuple(choice for choice in CHOICES if choice != "mxfp8")


def family_errors(size: Size, store: Store) -> dict[str, float]:
    """Return ``role|choice`` -> relative gradient error of the role in all blocks, and ``noise``."""
    found = Looked.at(size, store=store)
    place = places(found.report.tunable)
    families: dict[str, list[str]] = {}
    for group in found.problem.groups:
        families.setdefault(place[group.layers[0]].role, []).append(group.name)
    out = {"noise": found.noise()}
    for role, groups in families.items():
        for choice in LAW_CHOICES:
            offered = [g.name for g in found.problem.groups if g.name in groups and choice in g.choices]
            if offered:
                document = found.document(dict.fromkeys(offered, choice))
                out[f"{role}|{choice}"] = found.error(document)
    return out


def measured_errors(size: Size, store: Store, seeds: int) -> dict[str, float]:
    """Return :func:`family_errors`, geometric mean over seeds."""
    runs = [family_errors(replace(size, seed=seed), store) for seed in range(seeds)]
    return {key: float(np.exp(np.mean([math.log(max(run[key], 1e-12)) for run in runs]))) for key in runs[0]}


def law_points(store: Store, seeds: int) -> Points:
    """Return ``gpt`` -> ``width=128`` -> errors; the model in the middle of every axis is measured once."""
    out: Points = {}
    for kind in (*KINDS, "gpt, not scaled"):
        rows = out[kind] = {}
        middle = Size(kind[:3], scaled=kind in KINDS)
        base = measured_errors(middle, store, seeds)
        for axis, values in AXES.items() if middle.scaled else (("width", AXES["width"]),):
            for value in values:
                same = getattr(middle, axis) == value
                rows[f"{axis}={value}"] = (
                    base if same else measured_errors(replace(middle, **{axis: value}), store, seeds)
                )
                print(f"{kind} {axis}={value}: {time.process_time():.0f} s CPU", file=sys.stderr, flush=True)
    return out


def power_of(points: dict[str, dict[str, float]], axis: str, key: str, unit: str = "") -> Fit:
    """Return the fitted power of one axis, its residual, and that of each rule (root mean square, in logs).

    ``unit`` names what the error is divided by at every size, the mini-batch noise.
    """
    rows = [(value, points[f"{axis}={value}"]) for value in AXES[axis]]
    x = np.log([value for value, _ in rows])
    y = np.log([row[key] / (row[unit] if unit else 1.0) for _, row in rows])
    slope = float(np.polyfit(x, y, 1)[0])

    def residual(power: float) -> float:
        left = y - power * x
        return float(np.sqrt(np.mean((left - left.mean()) ** 2)))

    return slope, residual(slope), {name: residual(power) for name, power in RULES.items()}


def summary(points: Points, kinds: Sequence[str], axis: str, what: str) -> Row:
    """Return the rule that predicts errors (or noise, or error in units of it) along an axis best, over all roles."""
    unit = "noise" if what == "error / noise" else ""
    fits = [
        power_of(points[kind], axis, key, unit)
        for kind in kinds
        for key in points[kind][f"{axis}={AXES[axis][0]}"]
        if (key == "noise") == (what == "noise")
    ]
    means = {name: math.exp(math.sqrt(float(np.mean([fit[2][name] ** 2 for fit in fits])))) for name in RULES}
    best = min(means, key=means.__getitem__)
    powers = np.percentile([fit[0] for fit in fits], (10, 50, 90))
    found = f"{best}: within {means[best]:.2f}x; constant: {means['constant']:.2f}x"
    return f"{what} against {axis} ({', '.join(kinds)})", found, "powers {:+.2f}, {:+.2f}, {:+.2f}".format(*powers)


def law_lines(points: Points) -> tuple[list[Row], list[str]]:
    """Return the summary per axis and the table per role and recipe."""
    rows = [summary(points, KINDS, axis, what) for axis in AXES for what in ("error", "noise", "error / noise")]
    rows += [summary(points, ["gpt, not scaled"], "width", what) for what in ("error", "noise", "error / noise")]
    heads = " | ".join(f"{axis}: power (residual)" for axis in AXES)
    lines = ["", "Error in units of the noise, per role and recipe:", "", f"| model | role | recipe | {heads} |"]
    lines += ["|---" * (3 + len(AXES)) + "|"]
    for kind in KINDS:
        for key in points[kind]["width=64"]:
            role, _, choice = key.partition("|")
            if choice:
                fits = [power_of(points[kind], axis, key, "noise") for axis in AXES]
                cells = " | ".join(f"{slope:+.2f} ({math.exp(left):.2f}x)" for slope, left, _ in fits)
                lines.append(f"| {kind} | {role} | {choice} | {cells} |")
    return rows, lines


def run_law(options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Measure the points of the law."""
    return law_lines(law_points(Store(options.store), min(SEEDS, options.seeds)))


PARTS: dict[str, Callable[[argparse.Namespace], tuple[list[Row], list[str]]]] = {
    "law": run_law,
    "transfer": run_transfer,
    "llama": run_llama,
    "families": run_families,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--seeds", type=int, default=8, help="at most so many per model or pair of models")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no further pair of models after these")
    parser.add_argument("--store", type=Path, help="keep what was measured in this file, and read it from there")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    lines: list[str] = []
    for name in options.only.split(","):
        began = time.process_time()
        more, further = PARTS[name](options)
        rows, lines = rows + more, [*lines, *further, "", f"- {name}: {time.process_time() - began:.0f} s of CPU"]
    version = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one thread"
    text = [
        f"# Transfer, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python benchmarks/transfer/transfer.py --only {options.only}`",
    ]
    text += [f"on a shared machine; {version}", "", "| what | measured | goal |", "|---|---|---|"]
    text += [*(f"| {a} | {b} | {c} |" for a, b, c in rows), *lines, ""]
    print("\n".join(text))
    if options.output:
        options.output.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
