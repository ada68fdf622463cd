"""Every quantity that AutoPrec takes from elsewhere, next to its original, and whether the bits are equal.

    python benchmarks/numerics/originals.py [--markdown]

Originals that are packages are called: torch and torchao, which the dev extra installs, and two that it does not,
``pip install ml_dtypes==0.6.0 bitsandbytes==0.50.2`` (without them their rows are left out, and a line says so); of
those that need a GPU or their own torch the formula is transcribed, its place named in the row. A row says how many
values were compared and is one of: bit-equal; within the original's own rounding (the limit and the largest difference
are given); or different, with the reason. The exit code is 1 where a row is different without a reason.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import platform
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from autoprec import Policy
from autoprec.numerics.linear import LinearExecution
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.numerics import originals_numerics, originals_state  # noqa: F401  (they add their comparisons)
from benchmarks.numerics.originals_rows import COMPARISONS, Row, normal, version


# --- what follows from it ---------------------------------------------------------------------------------------------
def recovers(length: int) -> bool:
    """Say whether a NaN batch under delayed scaling leaves the next step the scale it would have had."""
    plan = {"format": "fp8", "scaling": {"granularity": "tensor", "scale": "delayed", "amax_history_len": length}}
    seen = []
    for bad in (False, True):
        layer, weight = LinearExecution(LayerPlan.uniform(Recipe.model_validate(plan))), nn.Parameter(normal(16, 32))
        for step in range(5):
            if step == 3 and bad:
                layer(torch.full((8, 32), math.nan, requires_grad=True), weight, None).sum().backward()
            layer(normal(8, 32, seed=step).requires_grad_(), weight, None).sum().backward()
        seen.append([float(layer.state(weight.device)[f"fprop.{name}.scale"]) for name in ("input", "weight")])
    return seen[0] == seen[1]


def resumes(recipe: str) -> bool:
    """Say whether a run that is saved and resumed half-way has the losses of one that is not."""

    def start() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        policy = Policy(recipes={"r": BUILTIN_RECIPES[recipe]}, default="r")
        policy.apply(model)
        return model, policy.wrap_optimizer(optimizer, model)

    def steps(model: nn.Linear, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            x = normal(16, 32, seed=step) * (1 + step % 3)
            loss = (model(x) - x.roll(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = start()
    steps(model, optimizer, 0, 10)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed, other = start()
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    return steps(model, optimizer, 10, 20) == steps(resumed, other, 10, 20)


def figures() -> Iterator[str]:
    """Yield what users notice of it, one line each."""
    lengths = (1, 2, 16, 64, 256, 1024)
    at_once = sum(map(recovers, lengths))
    yield f"NaN batch under delayed scaling: {at_once} of {len(lengths)} histories (1 to 1024) recover at once"
    recipes = [name for name, recipe in BUILTIN_RECIPES.items() if recipe.scaled]
    same = sum(map(resumes, recipes))
    yield f"saved and resumed: losses bit-identical under {same} of {len(recipes)} recipes with scales"


def compare() -> list[Row]:
    """Run every comparison."""
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in COMPARISONS:
            rows += list(run())
    return rows


def main() -> int:
    """Print the table and what it comes to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    markdown = parser.parse_args().markdown
    torch.set_num_threads(1)
    rows = compare()
    cells = [("quantity", "original", "values", "result", "difference")]
    for row in rows:
        note = (
            "" if row.verdict == "bit-equal" else f"{row.difference:.1e} of {row.limit:.1e}: {row.reason or 'rounding'}"
        )
        cells.append((row.quantity, row.original, str(row.ours.numel()), row.verdict, note))
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    for number, line in enumerate(cells):
        text = [cell if markdown else cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print(("| " + " | ".join(text) + " |") if markdown else "  ".join(text).rstrip())
        if markdown and number == 0:
            print("|---|---|---:|---|---|")
    equal = sum(row.verdict == "bit-equal" for row in rows)
    within = sum(row.verdict == "within rounding" for row in rows)
    other = len(rows) - equal - within
    print(f"\n{len(rows)} comparisons: {equal} bit-equal, {within} within the original's rounding, {other} different")
    for line in figures():
        print(line)
    for package in ("ml_dtypes", "bitsandbytes"):
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed: its rows are left out")
    print(f"python {platform.python_version()}, {version('torch')}, {version('torchao')}, {platform.machine()}")
    return 1 if any(row.verdict == "DIFFERENT" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
