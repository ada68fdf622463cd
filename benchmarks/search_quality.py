"""How good is the search? Ours against every alternative on real training runs.

    python benchmarks/search_quality.py --output NAME   # all strategies, 8 seeds; NAME.md and .json in results/
    python benchmarks/search_quality.py --strategies ours,ilp --seeds 2

Every (strategy, seed) is an Optuna study; all advance in lockstep, and each round's new assignments are trained as one
batch of replicas. Results are kept in benchmarks/results/search_quality_<case>.npz, so a second run replays them.
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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
import torch
from ground_truth import CASES, RESULTS, Case
from replicas import Replicas
from search_strategies import DETERMINISTIC, STRATEGIES, sampler

from autoprec.search.decision import Candidate, choose
from autoprec.search.pareto import hypervolume, nondominated
from autoprec.search.presets import presets
from autoprec.search.records import TrialRecord
from autoprec.search.shortlist import shortlist
from autoprec.search.solver import solve

BUDGETS, MAX_DIVERGENCE, PRESETS = (30, 60, 120), 0.0025, 6
#: (seeds, trials) at most; a GP over categoricals takes seconds per trial.
LIMITS = {"gp": (1, 30), **dict.fromkeys(("random", "tpe", "tpe-mv", "nsga2"), (99, 60))}


@dataclass
class Run:
    """One strategy under one seed."""

    strategy: str
    seed: int
    study: optuna.Study
    trials: int
    log: list[tuple[float, float, bytes]] = field(default_factory=list)
    pending: Any = None
    cpu_s: float = 0.0


def start(case: Case, strategy: str, seed: int, trials: int) -> Run:
    """Open a study with the same presets for everyone."""
    chosen = sampler(strategy, case.problem, case.prior, seed, MAX_DIVERGENCE, trials)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=chosen)
    for _, params in presets(case.problem, PRESETS):
        study.enqueue_trial(params)
    return Run(strategy, seed, study, trials)


def advance(case: Case, runs: Sequence[Run]) -> None:
    """Let every run ask once, train what is new in one batch, tell."""
    live = [run for run in runs if len(run.log) < run.trials]
    for run in live:
        began = time.process_time()
        run.pending = run.study.ask(case.problem.distributions())
        run.cpu_s += time.process_time() - began
    rows = [case.problem.indices(run.pending.params) for run in live]
    for run, row, gap in zip(live, rows, case.divergence(rows), strict=True):
        began = time.process_time()
        step = case.time(row)
        run.pending.set_user_attr("metrics", {"step_time_ms": step, "divergence": gap})
        # Optuna's samplers get the logarithm: on the raw scale they never look below the worst
        run.study.tell(run.pending, [step, math.log10(max(gap, 1e-7))])
        run.cpu_s += time.process_time() - began
        run.log.append((step, gap, np.asarray(row, dtype=np.uint8).tobytes()))


def true_front(case: Case, rounds: int) -> list[tuple[float, float, bytes]]:
    """Return the best known front: everything measured, then single changes around it until none improves."""
    points = {row: (case.time(np.frombuffer(row, dtype=np.uint8)), gap) for row, gap in case.table.items()}
    for _ in range(rounds):
        rows = list(points)
        kept = [rows[i] for i in nondominated([points[r] for r in rows])]
        near = [r for r in kept if points[r][1] < 2 * MAX_DIVERGENCE]
        candidates = {c for r in near for c in neighbours(case, r)} - set(points)
        order = sorted(candidates, key=lambda r: case.time(np.frombuffer(r, dtype=np.uint8)))[
            :: max(1, len(candidates) // 256)
        ]
        if not order:
            break
        fresh = np.array([np.frombuffer(r, dtype=np.uint8) for r in order])
        points |= {
            r: (case.time(np.frombuffer(r, dtype=np.uint8)), d)
            for r, d in zip(order, case.divergence(fresh), strict=True)
        }
    rows = list(points)
    return [(*points[rows[i]], rows[i]) for i in nondominated([points[r] for r in rows])]


def neighbours(case: Case, row: bytes) -> list[bytes]:
    """Return all single changes of an assignment."""
    out = []
    for g, c in zip(*np.nonzero(case.problem.allowed), strict=True):
        changed = np.frombuffer(row, dtype=np.uint8).copy()
        if changed[g] != c:
            changed[g] = c
            out.append(changed.tobytes())
    return out


def score(
    points: Sequence[tuple[float, float, bytes]], front: Sequence[tuple[float, float, bytes]], slowest: float
) -> tuple[float, float]:
    """Return (hypervolume ratio, regret of the fastest within the budget)."""
    worst = math.log10(0.05)

    def area(p: Sequence[tuple[float, float, bytes]]) -> float:
        return hypervolume([(t, math.log10(max(d, 1e-7))) for t, d, _ in p], (slowest * 1.02, worst))

    best = min(t for t, d, _ in front if d <= MAX_DIVERGENCE)
    found = min((t for t, d, _ in points if d <= MAX_DIVERGENCE), default=slowest)
    return area(points) / area(front), found / best - 1


def table_of(runs: Sequence[Run], front: Sequence[tuple[float, float, bytes]], slowest: float) -> list[dict[str, Any]]:
    """Return mean and standard error per strategy and budget."""
    rows = []
    for strategy in dict.fromkeys(run.strategy for run in runs):
        mine = [run for run in runs if run.strategy == strategy]
        row: dict[str, Any] = {"strategy": strategy, "seeds": len(mine)}
        row["ms_per_trial"] = 1e3 * float(np.mean([run.cpu_s / max(1, len(run.log)) for run in mine]))
        for budget in BUDGETS:
            scores = np.array([score(r.log[:budget], front, slowest) for r in mine if r.trials >= budget]).reshape(
                -1, 2
            )
            if len(scores):
                error = scores.std(0, ddof=1) / math.sqrt(len(scores)) if len(scores) > 1 else np.zeros(2)
                row[str(budget)] = [*scores.mean(0).tolist(), *error.tolist()]
        rows.append(row)
    return rows


def finalists(case: Case, runs: Sequence[Run], fresh: int = 16) -> dict[str, Any]:
    """Decide as the product does (4 paired seeds, upper bound), then ask 16 fresh seeds whether the budget holds."""
    picked = {}
    for run in (r for r in runs if r.strategy == "ours"):
        records = [record(case, k, *entry) for k, entry in enumerate(run.log)]
        best = shortlist(case.problem, case.scan, records, max_divergence=MAX_DIVERGENCE)
        picked[run.seed] = [run.log[r.number] for r in best]
    paired = under_seeds(case, [row for best in picked.values() for _, _, row in best], range(1, 5))
    chosen = []
    for best in picked.values():
        candidates = [Candidate(str(i), 1e3 / t, tuple(paired[row]), tag=row) for i, (t, _, row) in enumerate(best)]
        decision = choose(candidates, max_divergence=MAX_DIVERGENCE, timing_noise=0.0)
        if decision.index is not None:
            chosen.append(candidates[decision.index].tag)
    again = under_seeds(case, chosen, range(100, 100 + fresh))
    means = [float(np.mean(again[row])) for row in chosen]
    return {"decided": len(means), "violated": sum(m > MAX_DIVERGENCE for m in means), "means": means}


def record(case: Case, number: int, step: float, gap: float, row: bytes) -> TrialRecord:
    """Return a logged trial as the record the search keeps."""
    params = case.problem.from_indices(np.frombuffer(row, dtype=np.uint8), {})
    metrics = {"step_time_ms": step, "divergence": gap}
    return TrialRecord(number, "search", f"trial {number}", params, {}, "ok", metrics=metrics)


def under_seeds(case: Case, rows: Sequence[bytes], seeds: range) -> dict[bytes, list[float]]:
    """Return the divergence of assignments under other seeds (weights and data)."""
    unique = sorted(set(rows))
    if not unique:
        return {}
    batch = np.array([np.frombuffer(row, dtype=np.uint8) for row in unique])
    columns = [case.measure(batch, Replicas(case.model.kind, seed)) for seed in seeds]
    return {row: [column[i] for column in columns] for i, row in enumerate(unique)}


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the rank correlation of pairs."""
    ranks = [np.argsort(np.argsort(column)) for column in zip(*pairs, strict=True)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def run_case(name: str, strategies: Sequence[str], seeds: int, rounds: int) -> dict[str, Any]:
    """Run one case and return its figures."""
    case = Case.load(name)
    runs = []
    for strategy in strategies:
        most, trials = LIMITS.get(strategy, (99, max(BUDGETS)))
        count = 1 if strategy in DETERMINISTIC else min(seeds, most)
        runs += [start(case, strategy, seed, trials) for seed in range(count)]
    for round_ in range(max(BUDGETS)):
        advance(case, runs)
        if round_ % 5 == 4:
            case.save()
            print(f"{name}: trial {round_ + 1}, {case.trained} trained, {case.cpu_s:.0f} s CPU", flush=True)
    front = true_front(case, rounds)
    case.save()
    slowest = max(case.time(np.full(len(case.problem.groups), c)) for c in range(len(case.problem.choice_names)))
    relaxed = solve(case.prior.time_ms, case.prior.error2, math.inf)
    return {
        "case": name,
        "groups": len(case.problem.groups),
        "choices": list(case.problem.choice_names),
        "table_size": len(case.table),
        "front": [(t, d) for t, d, _ in front],
        "slowest_ms": slowest,
        "fastest_ms": case.time(relaxed),
        "scan_spearman": spearman(case.checks),
        "rows": table_of(runs, front, slowest),
        "finalists": finalists(case, runs) if "ours" in strategies else {},
    }


def show(result: dict[str, Any]) -> str:
    """Return a result as a Markdown table."""
    lines = [f"### {result['case']}: {result['groups']} groups x {len(result['choices'])} choices", ""]
    lines.append(
        f"true front: {len(result['front'])} points out of {result['table_size']} trained assignments; "
        f"scan's rank correlation {result['scan_spearman']:.3f}; finalists {result['finalists']}"
    )
    lines += [
        "",
        "| strategy | seeds | "
        + " | ".join(f"HV @{b}" for b in BUDGETS)
        + " | "
        + " | ".join(f"regret @{b}" for b in BUDGETS)
        + " | ms/trial |",
    ]
    lines.append("|---|---|" + "---|" * (2 * len(BUDGETS) + 1))
    for row in result["rows"]:
        cells = [row.get(str(b)) for b in BUDGETS]
        volume = [f"{c[0]:.3f} ± {c[2]:.3f}" if c else "-" for c in cells]
        regret = [f"{c[1]:.1%} ± {c[3]:.1%}" if c else "-" for c in cells]
        lines.append(
            f"| {row['strategy']} | {row['seeds']} | "
            + " | ".join([*volume, *regret])
            + f" | {row['ms_per_trial']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--front-rounds", type=int, default=1)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    results = [run_case(c, args.strategies.split(","), args.seeds, args.front_rounds) for c in args.cases.split(",")]
    text = "\n".join(show(result) for result in results)
    print(text)
    if args.output:
        today = datetime.date.today().isoformat()
        machine = platform.processor() or platform.machine()
        versions = f"{machine}, torch {torch.__version__}, optuna {optuna.__version__}"
        head = f"# Search quality, {today}\n\n{versions}\n\n"
        (RESULTS / f"{args.output}.md").write_text(head + text)
        (RESULTS / f"{args.output}.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
