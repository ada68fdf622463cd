"""The tables of the horizon study, from its rows (benchmarks/long_run/long_run.py)."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from scipy import stats

from autoprec.tuning.decide.decision import Rules, Standing, gradient_limit
from autoprec.tuning.decide.metrics import divergence
from autoprec.tuning.decide.noise import Baseline
from benchmarks.long_run.guard import guard_lines
from benchmarks.long_run.policies import POLICIES

__all__ = ["Row", "outcomes", "report"]

BUDGET, LIMIT = 0.0025, 0.12  # the defaults of a search
PROBED = "step 10"
Row = dict[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


class Outcome:
    """One policy on one model, over the seeds that were run: its early figures and its end."""

    def __init__(
        self, task: str, name: str, rows: list[Row], references: dict[int, Row], errors: dict[int, Row]
    ) -> None:
        self.task, self.name, self.case = task, name, POLICIES.get(name)
        self.seeds = [row["seed"] for row in rows]
        ends = [references[seed]["validation"] for seed in self.seeds]
        self.gaps = [
            (row["validation"] - end) / end if finished(row) else math.inf for row, end in zip(rows, ends, strict=True)
        ]
        self.divergences = [divergence(row["trial"], references[row["seed"]]["trial"]) + row["penalty"] for row in rows]
        self.penalty = statistics.fmean(row["penalty"] for row in rows)
        seen = [errors[seed]["policies"] for seed in self.seeds if seed in errors]
        self.errors = {age: [found[age].get(name, math.nan) for found in seen] for age in (seen[0] if seen else {})}

    @property
    def gap(self) -> float:
        return statistics.fmean(self.gaps)

    @property
    def error(self) -> float:
        """Mean gradient error over noise where a search measures it."""
        return statistics.fmean(self.errors[PROBED]) if PROBED in self.errors else math.nan

    @property
    def divergence(self) -> float:
        return statistics.fmean(self.divergences)

    @property
    def statistic(self) -> float:
        """What acceptance depends on: the worse of both early figures, each in units of its limit."""
        return max(self.divergence / BUDGET, self.error / LIMIT)

    def half_width(self, spread: float) -> float:
        """Half of the 95 % interval of the mean gap; the spread of paired benign gaps stands for too few seeds."""
        own = statistics.stdev(self.gaps) if len(self.gaps) > 1 and math.isfinite(self.gap) else 0.0
        return 1.96 * max(own, spread) / math.sqrt(len(self.gaps))


def finished(row: Row) -> bool:
    return len(row["series"]["losses"]) >= row["steps"] and math.isfinite(row["validation"])


def outcomes(rows: list[Row]) -> dict[str, list[Outcome]]:
    """Return every policy that was run, by model; ``perturbed`` is among them."""
    found: dict[str, list[Outcome]] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        references = {row["seed"]: row for row in own if row["what"] == "reference"}
        errors = {row["seed"]: row for row in own if row["what"] == "errors"}
        by_name: dict[str, list[Row]] = defaultdict(list)
        for row in own:
            if row["what"] in ("perturbed", *POLICIES) and row["seed"] in references and row["seed"] in errors:
                by_name[row["what"]].append(row)
        found[task] = [Outcome(task, name, got, references, errors) for name, got in by_name.items()]
    return found


def accepted(found: list[Outcome], noise: float) -> dict[str, str]:
    """Return why a search would reject each policy over the seeds that were run; empty where it would not."""
    benign = next((o for o in found if o.name == "perturbed"), None)
    baseline = Baseline(benign.divergence, tuple(benign.divergences)) if benign else Baseline()
    candidates = [
        Standing(o.name, 1.0, tuple(o.divergences), gradient_error=o.error * noise)
        for o in found
        if o.name != "perturbed"
    ]
    rules = Rules(BUDGET, baseline, max_gradient=gradient_limit(noise, LIMIT), gradient_noise=noise)
    return {c.name: str(rules.judge(c).rejection or "") for c in candidates}


def correlation(pairs: Sequence[tuple[float, float]]) -> str:
    usable = [(a, b) for a, b in pairs if not math.isnan(a)]
    if len(usable) < 4:
        return "-"
    cap = [(min(a, 1e9), min(b, 1e9)) for a, b in usable]
    return f"{stats.spearmanr(*zip(*cap, strict=True)).statistic:.2f}"


def report(rows: list[Row]) -> str:
    by_task = outcomes(rows)
    parts, everything = [], []
    bad_accepted, worse_accepted, count = [], [], 0
    for task, found in by_task.items():
        references = [row["validation"] for row in rows if row["task"] == task and row["what"] == "reference"]
        spread = spread_of(rows, task)
        benign = next((o for o in found if o.name == "perturbed"), None)
        paired = math.sqrt(statistics.fmean(g * g for g in benign.gaps)) if benign else math.nan
        noise = next(row["noise"][PROBED] for row in rows if row["task"] == task and row["what"] == "errors")
        why = accepted(found, noise)
        lines = []
        for o in sorted(found, key=lambda o: o.gap):
            refused = o.case is not None and o.case.refused
            offered = "accepted" if o.case is None or o.case.offered else "accepted; not offered since"
            verdict = "benign" if o.case is None else "refused by the schema" if refused else why[o.name] or offered
            worse = o.gap > spread
            lines.append(
                (
                    o.name + (" (bad)" if o.case and o.case.bad else ""),
                    f"{o.divergence:.3%}" + (f" (state {o.penalty:.1%})" if o.penalty else ""),
                    f"{o.error:.3f}",
                    f"{o.gap:+.2%} ± {o.half_width(paired):.2%}" if math.isfinite(o.gap) else "diverged",
                    str(len(o.gaps)),
                    "worse" if worse else "",
                    verdict,
                )
            )
            if o.case is None:
                continue
            everything.append(o)
            if o.case.offered and not refused and not why[o.name]:
                count += 1
                worse_accepted += [f"{task}: {o.name}"] if worse else []
                ended = f"{task}: {o.name}, which ends {o.gap:+.2%} ± {o.half_width(paired):.2%}"
                bad_accepted += [ended] if o.case.bad else []
        head = ("policy", "short divergence", "gradient error / noise", "final gap", "seeds", "end", "a search says")
        seeds = f"seed-to-seed spread of the reference {spread:.2%} (standard deviation over {len(references)} seeds)"
        parts.append(f"### {task}\n\n{seeds}; benign perturbation, paired: {paired:.2%}\n\n{table(head, lines)}")
        parts.append(_correlations(task, [o for o in found if o.case]))
    parts.append(
        f"Offered and accepted: {count} policies; of these worse than the reference beyond the seed-to-seed spread: "
        f"{len(worse_accepted)} ({', '.join(worse_accepted) or '-'}); known to be bad elsewhere: {len(bad_accepted)} "
        f"({', '.join(bad_accepted) or '-'})."
    )
    pooled = [(o.statistic, o.gap / spread_of(rows, o.task)) for o in everything]
    parts.append(
        "All models together, the final gap in units of the reference's spread: Spearman "
        f"{correlation(pooled)} (its size: {correlation([(a, abs(b)) for a, b in pooled])})."
    )
    parts.append(_ends_in_bf16(everything))
    parts += [_limits(by_task, rows), _drift(rows), guard_lines(rows)]
    return "\n\n".join(parts)


def spread_of(rows: list[Row], task: str) -> float:
    """Return the standard deviation of the reference's final loss over its seeds, relative; infinite for one seed."""
    ends = [row["validation"] for row in rows if row["task"] == task and row["what"] == "reference"]
    return statistics.stdev(ends) / statistics.fmean(ends) if len(ends) > 1 else math.inf


def _ends_in_bf16(found: list[Outcome]) -> str:
    """Return what the last 15 % in bf16 leave of the final gap of NVFP4, over all models."""
    names = ("nvfp4, ends bf16", "nvfp4, ends bf16, last 15 % bf16")
    if not {o.name for o in found}.issuperset(names):
        return "NVFP4 was not run."
    gaps = [statistics.fmean(o.gap for o in found if o.name == name) for name in names]
    return f"NVFP4, ends in bf16: mean final gap {gaps[0]:+.2%}; with the last 15 % of the run in bf16 {gaps[1]:+.2%}."


def _correlations(task: str, found: list[Outcome]) -> str:
    """Return how each early figure ranks the size of the final gap."""
    size = [(o, abs(o.gap)) for o in found]
    rows = [
        ("accept statistic", correlation([(o.statistic, g) for o, g in size])),
        ("short divergence alone", correlation([(o.divergence, g) for o, g in size])),
    ]
    ages = found[0].errors if found else {}
    rows += [
        (f"gradient error / noise, {age}", correlation([(statistics.fmean(o.errors[age]), g) for o, g in size]))
        for age in ages
    ]
    signed = correlation([(o.statistic, o.gap) for o, _ in size])
    return table((f"{task}: rank correlation with the size of the final gap", "Spearman"), rows) + (
        f"\n\nWith the signed gap: {signed}."
    )


def _limits(by_task: dict[str, list[Outcome]], rows: list[Row]) -> str:
    """Return, per limit of the gradient error, how many policies it lets through and how many of them end worse."""
    lines = []
    for limit in (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0):
        through, worse, worst = 0, 0, 0.0
        for task, found in by_task.items():
            spread = spread_of(rows, task)
            for o in found:
                if o.case and not o.case.state and o.error <= limit:
                    through += 1
                    worse += o.gap > spread
                    worst = max(worst, o.gap)
        lines.append((f"{limit:g}", str(through), str(worse), f"{worst:+.2%}" if math.isfinite(worst) else "diverged"))
    head = ("gradient error / noise up to", "policies (GEMMs only)", "end beyond the spread", "worst final gap")
    return "### Which limit keeps the end within the spread\n\n" + table(head, lines)


def _drift(rows: list[Row]) -> str:
    """Return how the sensitivities of single layers change along the reference run."""
    lines = []
    for row in rows:
        if row["what"] != "errors" or not row["layers"]:
            continue
        first = row["layers"][PROBED]
        for recipe, layers in first.items():
            cells = []
            for found in row["layers"].values():
                pairs = [(layers[name], found[recipe][name]) for name in layers]
                growth = statistics.geometric_mean(b / a for a, b in pairs)
                cells.append(f"{correlation(pairs)} ({growth:.2f}x)")
            lines.append((row["task"], recipe, *cells))
    if not lines:
        return ""
    ages = [age for row in rows if row["what"] == "errors" and row["layers"] for age in row["layers"]]
    head = ("model", "recipe", *dict.fromkeys(ages))
    title = f"### Drift: layers ranked at an age as at {PROBED} (Spearman), and their errors over noise to those then"
    return f"{title}\n\n{table(head, lines)}"
