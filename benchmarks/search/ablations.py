"""What each part of proposing and deciding is worth: one at a time is switched off, and whole searches are replayed.

    python benchmarks/search/ablations.py                       # every part; from the stored runs, trains what is new
    python benchmarks/search/ablations.py --parts tie,price     # some of them
    python benchmarks/search/ablations.py --output NAME         # also write results/NAME.md

A part is switched off by setting a constant, or replacing a function, of the product's code. Eight searches of every
case (finals.py) then decide again. Regret is against the best known front as it is stored, as in
quality.py, but a search that stays counts as all bf16. The difference is paired by case and trial seed; its
standard error is that over trial seeds, of the mean over cases. New policies are trained where none are stored.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import math
import platform
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import optuna

from autoprec.tuning.decide.sampler import posterior
from autoprec.tuning.decide.sampler.expectation import MODELLED
from benchmarks.search.cases import CASES, MAX_DIVERGENCE, REPORTED
from benchmarks.search.finals import best_preset, searched
from benchmarks.search.ground_truth import RESULTS, TRIAL_SEEDS, Case
from benchmarks.search.quality import fastest, judged_front

SAMPLER = "autoprec.tuning.decide.sampler"
EXPECTATION, POSTERIOR, PROPOSING = f"{SAMPLER}.expectation", f"{SAMPLER}.posterior", f"{SAMPLER}.sampler"
PRIOR = f"{SAMPLER}.prior"
AS_IT_IS = "as it is"


def only(kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Return the prior of the grid of spreads and misfits that the posterior is taken over, as far as it is kept."""
    return np.where(kept, posterior._LOG_PRIOR, -np.inf)


_NEAREST = min(posterior._SPREADS, key=lambda spread: abs(math.log(spread / posterior._SPREAD))) == posterior._SPREADS
_TINY = 1e-9
MISFIT = [(POSTERIOR, "_LOG_PRIOR", only(posterior._MISFIT == 1.0))]
CHOICES = (POSTERIOR, "_CHOICE", _TINY)
NOISE = [(POSTERIOR, "_SEED", 0.0), (POSTERIOR, "_OVERLAP", 0.0)]
#: part -> what is set: (module, name, value).
PARTS: dict[str, list[tuple[str, str, Any]]] = {
    AS_IT_IS: [],
    "spread estimated": [(POSTERIOR, "_LOG_PRIOR", only(_NEAREST))],
    "misfit estimated": [*MISFIT],
    "corrections of choices": [CHOICES],
    "corrections of entries": [(POSTERIOR, "_ENTRY", _TINY)],
    "shared seed noise": [*NOISE],
    "misfit and corrections of choices": [*MISFIT, CHOICES],
    "misfit, corrections of choices and shared seed noise": [*MISFIT, CHOICES, *NOISE],
    "corrections of choices and shared seed noise": [CHOICES, *NOISE],
    "these with a wider bound": [CHOICES, *NOISE, (EXPECTATION, "_Z95", 2.6)],
    "weight of the head": [(PRIOR, "HEAD_WEIGHT", 1.0)],
    "seed used before tells less": [(EXPECTATION, "_REUSED", 1.0)],
    "several numbers of seeds": [(EXPECTATION, "_MORE_SEEDS", (4,))],
    "smaller tie of presets": [(EXPECTATION, "MODELLED", MODELLED._replace(preset_tie=0.005))],
    "further seeds of what is run in doubt": [(EXPECTATION, "_DOUBT_SEEDS", 0)],
    "presets first": [(PROPOSING, "_AS_GOOD", 1.0)],
    "other budgets than the limit": [(PROPOSING, "_FACTORS", (1.0,))],
}


def endings(case: Case, best: float, preset: float, part: str) -> np.ndarray[Any, Any]:
    """Return regret, whether beyond the budget, runs, trials, whether adopted, gain over the best preset, per seed."""
    rows = []
    with contextlib.ExitStack() as stack:
        for module, name, value in PARTS[part]:
            stack.enter_context(mock.patch.object(importlib.import_module(module), name, value))
        for seed in TRIAL_SEEDS:
            end = searched(case, seed)
            time = case.time(end.row or case.baseline)
            beyond = end.mean > MAX_DIVERGENCE
            rows.append((time / best - 1, beyond, end.runs, end.trials, bool(end.row), preset / time - 1))
    return np.array(rows, dtype=np.float64)


def line(part: str, found: Sequence[np.ndarray[Any, Any]], known: Sequence[np.ndarray[Any, Any]]) -> str:
    """Return a row of the table, compared with the searches as they are ``known``."""
    moved = [new[:, 0] - old[:, 0] for new, old in zip(found, known, strict=True)]
    error = math.sqrt(sum(m.var(ddof=1) / len(m) for m in moved)) / len(moved)
    every = np.concatenate(found)
    each = " | ".join(f"{100 * f[:, 0].mean():.1f}" for f in found)
    difference = "" if part == AS_IT_IS else f"{100 * np.mean([m.mean() for m in moved]):+.2f} ± {100 * error:.2f}"
    return (
        f"| {part} | {each} | {100 * np.mean([f[:, 0].mean() for f in found]):.2f} | {difference} | "
        f"{every[:, 1].sum():.0f} of {every[:, 4].sum():.0f} | {every[:, 2].mean():.1f} | {every[:, 3].mean():.1f} |"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--cases", default=",".join(c for c in REPORTED if c != "conv-h100" and not CASES[c].blind))
    parser.add_argument("--output", default="", help="name of the result file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    cases = [Case.load(name) for name in args.cases.split(",")]
    bests = [fastest(case, judged_front(case, [], quick=True)[1]) for case in cases]
    presets = [best_preset(case) for case in cases]
    head = [
        f"| switched off | {' | '.join(case.name for case in cases)} | mean regret, % | difference | beyond | runs | "
        "trials |",
        f"|---|{'--:|' * (len(cases) + 5)}",
    ]
    print("\n".join(head), flush=True)
    lines, known = [], None
    for part in dict.fromkeys([AS_IT_IS, *(args.parts.split(",") if args.parts else PARTS)]):
        found = [endings(*of, part) for of in zip(cases, bests, presets, strict=True)]
        known = known or found
        lines.append(line(part, found, known))
        print(lines[-1], flush=True)
        for case in cases:
            case.save()
    if args.output:
        today = datetime.date.today().isoformat()
        title = f"# What the parts of a search are worth, {today}\n\n`python benchmarks/search/ablations.py`; "
        title += f"{platform.machine()}, Python {platform.python_version()}\n\n" + (__doc__ or "").split("\n\n", 2)[2]
        (RESULTS / f"{args.output}.md").write_text("\n".join([title, *head, *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
