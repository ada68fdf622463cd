"""Does the law of gradient errors hold on sizes it was not fitted on?

    python benchmarks/transfer/halves.py                                                # from the stored points
    python benchmarks/transfer/halves.py --measure --points points.json                 # measures them anew: 40 minutes

Every role of a tiny GPT and a tiny ViT runs under four recipes, at seven sizes and three seeds. Powers of width and
depth are fitted on the four small sizes; then the errors of uniform policies at the three large ones are predicted from
(32, 3): each role's error there, times the law, added in squares. The powers that ``autoprec transfer`` uses were
rounded with all sizes in sight, and are judged in the same table: their row is not a test on unseen sizes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from autoprec.tuning.transfer.law import ERROR_POWERS  # noqa: E402

POINTS = ROOT / "benchmarks" / "results" / "2026-11-22_transfer_halves.json"
SMALL, LARGE = ((32, 3), (64, 3), (32, 6), (64, 6)), ((64, 12), (32, 12), (128, 3))
KINDS, SEEDS, BASE = ("gpt", "vit"), (0, 1, 2), (32, 3)
RECIPES = ("bf16", "fp8_rowwise", "fp8_tensorwise", "nvfp4_plain")
ALL = "all"  # not a role: the whole model under one recipe
Row = dict[str, Any]
Powers = tuple[float, float]  # of width and depth


def measured(kind: str, width: int, depth: int, seed: int) -> Row:
    """Return the gradient errors of one model: ``role|recipe`` for each role alone and for all layers together."""
    from autoprec.graph.roles import places
    from benchmarks.transfer.models import ONCE, Looked, Size

    looked = Looked.at(Size(kind, width, depth, seed=seed))
    place, roles = places(looked.report.tunable), dict[str, list[Any]]()
    for group in looked.problem.groups:
        roles.setdefault(place[group.layers[0]].role, []).append(group)
    errors: dict[str, float] = {}
    for recipe in RECIPES:
        everything: dict[str, str] = {}
        for role, groups in roles.items():
            given = {group.name: recipe for group in groups if recipe in group.choices}
            if given:
                errors[f"{role}|{recipe}"] = looked.error(looked.document(given), ONCE)
                everything |= given
        errors[f"{ALL}|{recipe}"] = looked.error(looked.document(everything), ONCE)
    return {"kind": kind, "width": width, "depth": depth, "seed": seed, "errors": errors}


def measure(path: Path) -> None:
    rows = json.loads(path.read_text()) if path.exists() else []
    done = {(r["kind"], r["width"], r["depth"], r["seed"]) for r in rows}
    for seed, kind, size in itertools.product(SEEDS, KINDS, SMALL + LARGE):
        if (kind, *size, seed) not in done:
            rows.append(measured(kind, *size, seed))
            path.write_text(json.dumps(rows))
            print(kind, *size, seed, file=sys.stderr, flush=True)


def fitted(rows: list[Row]) -> Powers:
    """Return the least-squares powers of width and depth over roles and recipes, each with a level of its own."""
    sizes, errors = [], []
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind and (row["width"], row["depth"]) in SMALL]
        for key in own[0]["errors"]:
            if key.partition("|")[0] in (ALL, "embedding"):
                continue
            x = np.log([[row["width"], row["depth"]] for row in own])
            y = np.log([row["errors"][key] for row in own])
            sizes.append(x - x.mean(0))
            errors.append(y - y.mean())
    width, depth = np.linalg.lstsq(np.concatenate(sizes), np.concatenate(errors), rcond=None)[0]
    return float(width), float(depth)


def ratio(small: Mapping[str, float], large: Row, recipe: str, powers: Powers) -> float:
    """Return predicted over measured error of one recipe everywhere."""
    wider, deeper = large["width"] / BASE[0], large["depth"] / BASE[1]
    total = 0.0
    for key, error in small.items():
        role, _, name = key.partition("|")
        if name == recipe and role != ALL:
            total += (error * wider ** powers[0] * deeper ** powers[1]) ** 2
    return math.sqrt(total) / float(large["errors"][f"{ALL}|{recipe}"])


def judged(rows: list[Row], powers: Powers, *, averaged: bool) -> list[float]:
    found = {(row["kind"], row["width"], row["depth"], row["seed"]): row for row in rows}
    out = []
    for kind, size, recipe in itertools.product(KINDS, LARGE, RECIPES):
        ratios = [ratio(found[kind, *BASE, seed]["errors"], found[kind, *size, seed], recipe, powers) for seed in SEEDS]
        out += [math.exp(float(np.mean(np.log(ratios))))] if averaged else ratios
    return out


def report(rows: list[Row]) -> str:
    width, depth = ERROR_POWERS["width"], ERROR_POWERS["depth"]
    lines = []
    for label, powers in (
        ("no law: errors as they are", (0.0, 0.0)),
        ("fitted on the small sizes alone", fitted(rows)),
        ("used by `autoprec transfer` (rounded, all sizes in sight)", (width, depth)),
        ("without the power of the depth", (width, 0.0)),
    ):
        for averaged in (False, True):
            ratios = np.array(judged(rows, powers, averaged=averaged))
            within = float(np.mean((ratios >= 0.7) & (ratios <= 1.4)))
            spread = ", ".join(f"{q:.2f}" for q in np.percentile(ratios, (5, 50, 95)))
            what = "mean of 3 seeds" if averaged else "one seed"
            lines.append((label, what, f"{powers[0]:+.2f}, {powers[1]:+.2f}", f"{within:.0%}", spread))
    names = ("law", "scan", "powers of width, depth", "predicted / measured in 0.7 to 1.4", "5 %, 50 %, 95 %")
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ("---",) * len(names), *lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=Path, default=POINTS, help="JSON file of the measured errors")
    parser.add_argument("--measure", action="store_true", help="measure what the file lacks")
    options = parser.parse_args()
    if options.measure:
        measure(options.points)
    print(report(json.loads(options.points.read_text())))


if __name__ == "__main__":
    main()
