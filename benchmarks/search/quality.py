"""How good is the search? Ours against every alternative on real training runs.

    python benchmarks/search/quality.py                          # every case, from the stored runs; trains what is new
    python benchmarks/search/quality.py --quick                  # two seeds per case, nothing but what is stored
    python benchmarks/search/quality.py --cases moe-b200 --run ours,ilp   # run strategies again
    python benchmarks/search/quality.py --run ours,missing       # ours again, and what was never run
    python benchmarks/search/quality.py --front 1                # look longer for the true front
    python benchmarks/search/quality.py --output NAME            # also write results/NAME.md and NAME.json
    python benchmarks/search/quality.py --stop --cases gpt-b200   # does "at most x % left" hold?
    python benchmarks/search/quality.py --output NAME --resume   # leave out the cases that NAME.json already has

Every (strategy, seed) is an Optuna study of 30 trials that sees the noise of its own seed; what it asked is scored by
the mean over fresh seeds (ground_truth.py, truth.py). ``search`` is the whole search as the product runs it, which ends
when nothing is worth a run (finals.py). The cases are in cases.py. Tables and logs lie in
benchmarks/results/search_quality_<case>.npz, and are stored as they grow: a run that was cut goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna

from benchmarks.search.cases import CASES, MAX_DIVERGENCE, REPORTED
from benchmarks.search.finals import Ending, best_preset, ended, searched
from benchmarks.search.ground_truth import RESULTS, TRIAL_SEEDS, TRUTH_SEEDS, Case
from benchmarks.search.quality_table import HEAD, goals, show
from benchmarks.search.runs import play
from benchmarks.search.strategies import STRATEGIES
from benchmarks.search.truth import Point, Worth, corner, judge, judged, long_run, picked, refine_run, settle, volume

TRIALS = 30
#: Trial seeds of a strategy that is dear: a GP over categoricals takes half a second per trial and more.
FEW_SEEDS = {"gp": 2}
#: What ``--run missing`` runs where it is not stored.
COMPARED = ("ours", "ilp", "one-pass", "tpe", "nsga2", "gp")
#: Whose trials are raced to a decision, beside the whole searches.
DECIDED = ("search",)


def score(case: Case, log: Sequence[bytes], worth: Worth, front: Sequence[Point]) -> tuple[float, float]:
    """Return (hypervolume ratio, regret of the fastest within the budget) of what was asked, by judge seeds."""
    mine = judged(case, picked(case, log, worth))
    return volume(case, mine) / volume(case, front), fastest(case, mine) / fastest(case, front) - 1


def fastest(case: Case, points: Sequence[Point]) -> float:
    return min((t for t, d in points if d <= MAX_DIVERGENCE), default=corner(case)[0])


def logs_of(case: Case, found: dict[str, list[Ending]]) -> dict[str, list[list[bytes]]]:
    """Return what every run of every strategy asked, the whole searches first."""
    out = {"search": [list(ending.asked) for ending in found["search"]]}
    return out | {n: [list(log)[:TRIALS] for log in case.logs[n]] for n in STRATEGIES if n in case.logs}


def rows_of(
    case: Case, logs: dict[str, list[list[bytes]]], worth: Worth, front: Sequence[Point]
) -> list[dict[str, Any]]:
    """Return mean and standard error per strategy: hypervolume and regret of what was asked."""
    rows = []
    for name, runs in logs.items():
        spent = case.logs.get(f"ms:{name}")
        scores = np.array([score(case, log, worth, front) for log in runs])
        error = scores.std(0, ddof=1) / math.sqrt(len(scores)) if len(scores) > 1 else np.full(2, np.nan)
        rows.append(
            {
                "strategy": name,
                "seeds": len(runs),
                "trials": float(np.mean([len(log) for log in runs])),
                "ms": float(spent.mean()) if spent is not None else None,
                "scores": [*scores.mean(0).tolist(), *error.tolist()],
            }
        )
    return rows


def comparisons(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return where ours is not better than an alternative beyond the standard error of the difference."""
    ours = next((row["scores"] for row in rows if row["strategy"] == "ours"), None)
    out = []
    for row in rows if ours else ():
        if row["strategy"] in ("ours", "search") or ours is None:
            continue
        theirs = row["scores"]
        for k, what in ((0, "hypervolume"), (1, "regret")):
            gain = (ours[k] - theirs[k]) * (1 if k == 0 else -1)
            if not gain > math.hypot(ours[k + 2], theirs[k + 2]):
                out.append(f"{what} against {row['strategy']} ({gain:+.3f})")
    return out


def decisions(case: Case, strategy: str, seeds: Sequence[int]) -> list[Ending]:
    """Return what was decided under trial seeds: by whole searches, or by racing another strategy's first trials."""
    if strategy == "search":
        return [searched(case, seed) for seed in seeds]
    return [ended(case, list(log), seed) for seed, log in zip(seeds, case.logs[strategy], strict=False)]


def fastest_fresh(case: Case, rows: Sequence[bytes]) -> float:
    """Return the time of the fastest row whose mean under the 48 fresh seeds is within the budget.

    The best known front is judged by fewer, and what many policies share of the luck of these is in all of them.
    """
    for row in sorted(rows, key=case.time):
        if case.judged(row) <= 2 * MAX_DIVERGENCE and case.fresh(row) <= MAX_DIVERGENCE:
            return case.time(row)
    return math.nan


def endings(case: Case, found: Sequence[Ending], front: Sequence[Point], sure: float) -> dict[str, Any]:
    """Compare what was decided with fresh seeds, with the best there is, and with the best acceptable preset."""
    best, preset = fastest(case, front), best_preset(case)
    adopted = [e for e in found if e.row]
    regrets = [case.time(e.row) / best - 1 for e in adopted]
    return {
        "regret_fresh": float(np.mean([case.time(e.row) / sure - 1 for e in adopted])) if adopted else math.nan,
        "runs": len(found),
        "adopted": len(adopted),
        "violated": sum(e.mean > MAX_DIVERGENCE for e in adopted),
        "regret": float(np.mean(regrets)) if regrets else math.nan,
        "over_preset": [preset / case.time(e.row) - 1 for e in adopted] if math.isfinite(preset) else [],
        "means": [e.mean for e in adopted],
        "trials": float(np.mean([e.trials for e in found])),
        "measured": float(np.mean([e.runs for e in found])),
        "converged": sum(e.converged for e in found),
    }


def spearman(pairs: np.ndarray[Any, Any]) -> float:
    """Return the rank correlation of pairs ``[N, 2]``."""
    ranks = [np.argsort(np.argsort(pairs[:, k])) for k in range(2)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def grow(case: Case, names: Sequence[str], front: int) -> None:
    """Run strategies and the long run for the true front; store after each."""
    seeds = case.spec.seeds.runs
    if "missing" in names:
        names = [*(n for n in names if n != "missing"), *(n for n in COMPARED if n not in {*names, *case.logs})]
    if names:  # in lockstep, so that many replicas train at once
        play(case, {name: (min(seeds, FEW_SEEDS.get(name, seeds)), TRIALS) for name in names})
        case.save()
    for name in [n for n in STRATEGIES if n in case.logs]:
        for seed, log in enumerate(case.logs[name]):
            refine_run(case, list(log)[:TRIALS], seed)
        _note(case, f"truth of {name}")
    if front:
        long_run(case, front)
        case.save()
    judged_front(case, [list(log) for n in STRATEGIES if n in case.logs for log in case.logs[n]])
    _note(case, "judged")


def judged_front(case: Case, logs: Sequence[Sequence[bytes]], *, quick: bool = False) -> tuple[Worth, list[Point]]:
    """Measure the best known front, and what was picked of every log; return what rows are worth, and the front."""
    if not quick:
        settle(case)
    worth = Worth(case, noise_of(case))  # only now: all that the truth seeds will ever say was measured
    best = picked(case, case.values, worth)
    judge(case, [row for log in logs for row in picked(case, log[:TRIALS], worth)], worth, best)
    return worth, judged(case, best)


def _note(case: Case, what: str) -> None:
    case.save()
    print(f"{case.name}: {what}: {case.trained} trained, {case.cpu_s:.0f} s CPU", flush=True)


def result_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run what was asked for one case and return its figures."""
    case = Case.load(name)
    if not args.quick:
        grow(case, [s for s in args.run.split(",") if s], args.front)
    seeds = list(TRIAL_SEEDS)[: 2 if args.quick else None]
    found = {s: decisions(case, s, seeds) for s in DECIDED if s == "search" or s in case.logs}
    logs = logs_of(case, found)
    if not args.quick:
        _note(case, "decisions")
        for seed, log in enumerate(logs["search"]):
            refine_run(case, log, seed)
    worth, front = judged_front(case, [log for runs in logs.values() for log in runs], quick=args.quick)
    best = picked(case, case.values, worth)
    sure = math.nan if args.quick else fastest_fresh(case, best)
    decided = {s: endings(case, endings_, front, sure) for s, endings_ in found.items()}
    if not args.quick:
        _note(case, "judged")
    rows = rows_of(case, logs, worth, front)
    return {
        "case": name,
        "blind": case.spec.blind,
        "groups": len(case.problem.groups),
        "choices": list(case.problem.choice_names),
        "parameters": {n: list(v) for n, v in case.problem.parameters.items()},
        "steps": case.spec.steps,
        "assignments": len(case.values),
        "trained": sum(int(np.isfinite(v).sum()) for v in case.values.values()),
        "new": case.trained,
        "front": front,
        "even": [spearman(scan.checks[0::2]) for scan in case.scans],
        "mixed": [spearman(scan.checks[1::2]) for scan in case.scans],
        "noise": noise_of(case),
        "rows": rows,
        "not_better": comparisons(rows),
        "endings": decided,
    }


def noise_of(case: Case) -> float:
    """Return the standard deviation of ln(divergence) from seed to seed, typical over assignments; 0.36 if unknown."""
    first, end, enough = TRUTH_SEEDS.start, TRUTH_SEEDS.stop, min(8, case.spec.seeds.front[-1][0])
    known = [values[first:end] for row, values in case.values.items() if case.seeds_of(row) >= enough]
    spreads = [np.nanstd(np.log(values), ddof=1) for values in known]
    return float(np.median(spreads)) if spreads else 0.36


def stop(name: str) -> tuple[int, int]:
    """Print whether what whole searches said to be left at most holds; return (how often it does, how many said it).

    Left is the fastest policy within the budget under the 48 fresh seeds against what was adopted; a search that stays
    counts as one that adopted the 16-bit run. Policies that no stored run has are trained.
    """
    case = Case.load(name)
    worth, _ = judged_front(case, [])
    fastest_ms = fastest_fresh(case, picked(case, case.values, worth))
    found = [ending for ending in decisions(case, "search", list(TRIAL_SEEDS)) if ending.converged]
    left = [max(0.0, case.time(ending.row or case.baseline) / fastest_ms - 1) for ending in found]
    bounds = [ending.bound for ending in found]
    holds = sum(x <= bound for x, bound in zip(left, bounds, strict=True))
    figures = f"{np.mean(left):.2%} left, {np.mean(bounds):.2%} said" if found else "none converged"
    print(f"{name}: {figures} on average; the bound holds in {holds} of {len(found)} searches", flush=True)
    return holds, len(found)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(REPORTED), help=f"of {', '.join(CASES)}")
    parser.add_argument("--run", default="", help=f"missing, or strategies of {', '.join(STRATEGIES)}")
    parser.add_argument("--front", type=int, default=0, help="rounds of the long run for the true front")
    parser.add_argument("--quick", action="store_true", help="two seeds per case, and nothing is stored")
    parser.add_argument("--stop", action="store_true", help="does what a search says to be left hold? Stores nothing")
    parser.add_argument("--grow", action="store_true", help="only run strategies and store them")
    parser.add_argument("--output", default="", help="name of the result files")
    parser.add_argument("--resume", action="store_true", help="keep the cases that the result file already has")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if args.stop:
        holds = np.sum([stop(name) for name in args.cases.split(",")], axis=0)
        print(f"the bound holds in {holds[0]} of {holds[1]} searches")
        return
    path = RESULTS / f"{args.output}.json"
    results = json.loads(path.read_text()) if args.resume and args.output and path.exists() else []
    for name in args.cases.split(","):
        began = time.process_time()
        if any(result["case"] == name for result in results):
            continue
        if args.grow:
            grow(Case.load(name), [s for s in args.run.split(",") if s], args.front)
            continue
        results.append(result_of(name, args))
        print(show(results[-1]) + f"\n({time.process_time() - began:.0f} s of CPU)\n", flush=True)
        if args.output:
            path.write_text(json.dumps(results, indent=1))
    if args.grow:
        return
    text = goals(results) + "\n".join(show(result) for result in results)
    print(text)
    if args.output:
        today = datetime.date.today().isoformat()
        versions = f"{platform.machine()}, Python {platform.python_version()}, optuna {optuna.__version__}"
        head = f"# Search quality, {today}\n\n`python benchmarks/search/quality.py`; {versions}\n\n{HEAD}\n"
        path.with_suffix(".md").write_text(head + text)


if __name__ == "__main__":
    main()
