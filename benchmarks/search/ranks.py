"""Why the sensitivity table ranks some cases worse: how far what it is compared with agrees with itself.

    python benchmarks/search/ranks.py                             # every case of quality.py
    python benchmarks/search/ranks.py --cases conv-h100           # with a line for each of its layers
    python benchmarks/search/ranks.py --output NAME               # also write results/NAME.md

Random mixtures (ground_truth.py) are measured on one batch, as quality.py does, and again on the batch after it,
one training step later. ``table``: rank correlation of prediction and measurement, on the scan's own batches. ``next
batch``: that of the two measurements of the same mixtures, where no table is involved. ``range``: the upper over the
lower quartile of the measured errors; ``misfit``: standard deviation of ln(measured / predicted).

One measurement of a mixture has luck of its own: the errors of two layers may point the same way on this batch and
opposite ways on the next. ``dimensions``: one over the mean squared cosine between the errors of two layers, which is
how many dimensions random directions would have to have to be as orthogonal; the fewer, the more luck. ``expected, by
table`` and ``expected, by measurement``: rank correlation of a scan's table, and of mixtures measured on the scan's
first batch, with the mean error of these mixtures over the batches of the seven other seeds.
"""

from __future__ import annotations

import argparse
import datetime
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.search.cases import REPORTED
from benchmarks.search.ground_truth import RESULTS, SCAN_STEP, TRIAL_SEEDS, Case, squared_errors
from benchmarks.search.quality import spearman

CHECKS = 60


def measured(case: Case, seed: int) -> np.ndarray[Any, Any]:
    """Return the gradient errors ``[mixtures, 2]`` of the scan's random mixtures on two batches."""
    model, choices = case.model((seed,)), ["keep", *case.problem.choice_names]
    rows = case.checks(np.random.default_rng(seed), CHECKS)[1::2]
    reference = np.zeros((1, len(case.problem.groups) + len(case.problem.parameters)), dtype=np.int64)
    out = []
    for step in (SCAN_STEP, SCAN_STEP + 1):
        _, weights = model.train(reference, np.zeros(1, dtype=np.int64), choices, case.spec.steps, stop=step)
        out.append(np.sqrt(squared_errors(model, weights, step, rows, choices)))
    return np.array(out).T


def expected(case: Case) -> tuple[float, float, float]:
    """Return the dimensions of the errors, and how tables and single measurements rank what others measure on average.

    The mixtures are the same under all seeds here.
    """
    choices, groups = ["keep", *case.problem.choice_names], np.arange(len(case.problem.groups))
    rows = case.checks(np.random.default_rng(99), CHECKS)[1::2]
    reference = np.zeros((1, len(groups) + len(case.problem.parameters)), dtype=np.int64)
    alone = np.diag(1 + case.problem.allowed[:, 1:].argmax(1) + 1)  # the first choice below the baseline
    logs, cosines = [], []
    for seed in TRIAL_SEEDS:
        model, mine = case.model((seed,)), []
        for step in (SCAN_STEP, SCAN_STEP + 1):
            _, weights = model.train(reference, np.zeros(1, dtype=np.int64), choices, case.spec.steps, stop=step)
            mine.append(0.5 * np.log(squared_errors(model, weights, step, rows, choices)))
            changes = model.gradients(weights, step, alone, choices)
            changes -= model.gradients(weights, step, np.zeros_like(rows[:1]), choices)
            unit = (changes / changes.norm(dim=1, keepdim=True)).numpy()
            cosines.append(float(((unit @ unit.T)[~np.eye(len(groups), dtype=bool)] ** 2).mean()))
        logs.append(mine)
    found = np.array(logs)  # [seeds, batches, mixtures]
    tables = [scan.table.error2[groups, rows - 1].sum(1) for scan in case.scans]
    others = [np.delete(found, seed, axis=0).mean((0, 1)) for seed in TRIAL_SEEDS]
    by_table = np.mean([spearman(np.array(pair).T) for pair in zip(tables, others, strict=True)])
    by_one = np.mean([spearman(np.array(pair).T) for pair in zip(found[:, 0], others, strict=True)])
    return 1.0 / float(np.exp(np.mean(np.log(cosines)))), float(by_table), float(by_one)


def line(case: Case) -> str:
    """Return a case's row."""
    checks = [scan.checks[1::2] for scan in case.scans]
    table = np.mean([spearman(pairs) for pairs in checks])
    again = np.mean([spearman(measured(case, seed)) for seed in TRIAL_SEEDS])
    quartiles = [np.quantile(pairs[:, 1], (0.25, 0.75)) for pairs in checks]
    spread = np.exp(np.mean([np.log(high / low) for low, high in quartiles]))
    misfit = np.mean([np.log(pairs[:, 1] / pairs[:, 0]).std() for pairs in checks])
    dimensions, by_table, by_one = expected(case)
    cells = (f"{table:.3f}", f"{again:.3f}", f"{spread:.2f}", f"{misfit:.3f}", f"{dimensions:.0f}")
    return f"| {' | '.join((case.name, *cells, f'{by_table:.3f}', f'{by_one:.3f}'))} |"


def layers(case: Case) -> list[str]:
    """Return a row per layer and choice: its error alone, and how far the scans of eight seeds disagree on it."""
    lines = ["", "| layer | choice | error alone | standard deviation of its ln over the scans |", "|---|---|--:|--:|"]
    for g, group in enumerate(case.problem.groups):
        for c, choice in enumerate(case.problem.choice_names):
            errors = np.sqrt([scan.table.error2[g, c] for scan in case.scans])
            if np.isfinite(errors).all() and (errors > 0).all():
                logs = np.log(errors)
                lines.append(f"| {group.name} | {choice} | {np.exp(logs.mean()):.4f} | {logs.std(ddof=1):.2f} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(REPORTED))
    parser.add_argument("--output", default="", help="name of the result file")
    args = parser.parse_args(arguments)
    lines = [
        "| case | table | next batch | range | misfit | dimensions | expected, by table | expected, by measurement |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    print("\n".join(lines), flush=True)
    names = args.cases.split(",")
    for name in names:
        lines.append(line(Case.load(name)))
        print(lines[-1], flush=True)
    if "conv-h100" in names:
        lines += layers(Case.load("conv-h100"))
        print("\n".join(lines[len(names) + 2 :]))
    if args.output:
        title = f"# What limits the table's rank correlation, {datetime.date.today().isoformat()}\n\n"
        title += f"`python benchmarks/search/ranks.py`; {platform.machine()}, Python {platform.python_version()}\n\n"
        text = title + (__doc__ or "").split("\n\n", 2)[2] + "\n" + "\n".join(lines) + "\n"
        (RESULTS / f"{args.output}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
