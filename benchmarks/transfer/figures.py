"""The figures of transfer.py: predicted against measured on a 16 times larger model, Llama-70B, families."""

from __future__ import annotations

import argparse
import itertools
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autoprec.policy import Policy, save_policy
from autoprec.policy.solver import solve
from autoprec.policy.space import Choice
from autoprec.support.files import with_checksum, write_json
from autoprec.tuning.decide.problem import FloatTable, IntVector, Problem
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.transfer.correction import Correction
from autoprec.tuning.transfer.plan import Transfer, transfer
from autoprec.tuning.transfer.proxy import Proxy
from autoprec.tuning.transfer.spot import SpotCheck, corrected, judged, spot_probes
from benchmarks.transfer.models import BETWEEN, INSTANTS, ONCE, Looked, Size, Store

__all__ = ["run_families", "run_llama", "run_transfer"]

Row = tuple[str, str, str]
LIMIT = 0.12  # of the mini-batch noise: the search's own
#: Policies per pair of models: the fastest within these shares of the noise, and uniform ones.
BUDGETS = (0.01, 0.02, 0.04, 0.12, 0.25)
SMALLER = tuple(share for share in BUDGETS if share < LIMIT)
UNIFORM = ("bf16", "fp8_rowwise", "nvfp4_plain")
#: What grows -> (proxy, big model, seeds): 16 times the parameters of the blocks each.
PAIRS = {
    "gpt, deeper and wider": (Size("gpt", 32, 3), Size("gpt", 64, 12), 8),
    "vit, deeper and wider": (Size("vit", 32, 3), Size("vit", 64, 12), 3),
    "gpt, wider": (Size("gpt", 32, 3), Size("gpt", 128, 3), 3),
}
#: Seeds whose big model is scanned and searched as well.
SEARCHED = 1
STEPS = 8


def _times(found: Looked) -> FloatTable:
    recipes = found.problem.space.all_recipes

    def seconds(group: Any, choice: str) -> float:
        plan = Choice.parse(choice).plan(recipes)
        return sum(found.cost.layer_cost(name, plan, "bf16").seconds for name in group.layers)

    return found.problem.table(seconds)


def _fastest(found: Looked, share: float) -> IntVector | None:
    assert found.table is not None
    return solve(_times(found), found.table.error2, (share * (found.table.noise or 0.0)) ** 2)


def _policies(found: Looked) -> dict[str, Policy]:
    problem: Problem = found.problem
    out: dict[str, Policy] = {}
    for share in BUDGETS:
        index = _fastest(found, share)
        if index is not None:
            out[f"fastest within {share:g}"] = problem.policy(problem.from_indices(index, {}))
    for choice in UNIFORM:
        out[f"all {choice}"] = problem.policy(problem.params_of(choice))
    return out


#: Per budget: how much slower than the big model's own choice within it, what share of it is spent, and how many
#: groups the budget leaves slower than they could be in that choice (0: it does not bind).
Lost = dict[float, tuple[float, float, int]]


@dataclass(frozen=True)
class Outcome:
    """One pair of models under one seed, per policy: predicted, measured, and predicted anew after a spot check.

    ``once`` is predicted from the proxy asked at one step only, ``moments`` are what ``measured`` is the mean of: the
    error at each step and batch. ``share`` (of the noise) and ``divergence`` are of the policy that the default budget
    gives, ``checked`` is its share after what the spot check makes of it. ``lost`` and ``lost_after`` compare modelled
    step times with what the big model's own scan and solver find, per budget of :data:`BUDGETS`, before and after a
    spot check of the transferred policy.
    """

    names: tuple[str, ...]
    predicted: tuple[float, ...]
    once: tuple[float, ...]
    after: tuple[float, ...]
    measured: tuple[float, ...]
    moments: tuple[tuple[float, ...], ...]
    share: float
    checked: float
    divergence: float
    lost: Lost
    lost_after: Lost

    def ratios(self, which: str = "predicted") -> list[float]:
        """Predicted over measured, per policy."""
        return [p / m for p, m in zip(getattr(self, which), self.measured, strict=True)]

    @property
    def rank(self) -> float:
        """Rank correlation of predicted and measured over the policies."""
        return float(np.corrcoef(_ranks(self.predicted), _ranks(self.measured))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    return np.argsort(np.argsort(values)).astype(float)


def _step_ms(big: Looked, policy: Policy) -> float:
    from autoprec.policy import resolve

    plans = resolve(policy, [layer.name for layer in big.report.tunable], strict=False)
    return big.cost.estimate(plans, activations=policy.activations).time_ms


def _checked(big: Looked, found: Transfer) -> tuple[Policy, SpotCheck]:
    """Return what a spot check of eight passes makes of a transferred policy, on weights and batches of its own."""
    evidence = {"transferred_from": {"segments": dict(found.predicted.segments)}}
    policy = found.policy.model_copy(update={"evidence": evidence})
    probes, asked = spot_probes(policy, big.report, 8)
    rows = [{"id": probe.id, "gradient_error": big.error(probe.policy, BETWEEN)} for probe in probes]
    check = judged([{"probes": rows, "gradient_noise": big.noise()}], policy, asked, LIMIT)
    return (policy if check.within else corrected(policy, big.report, check)[0]), check


def _spotted(big: Looked, found: Transfer) -> Correction:
    return _checked(big, found)[1].correction


def _lost(big: Looked, moved: dict[float, Transfer]) -> Lost:
    """Compare step times with what the big model's own scan finds, budget by budget."""
    times, out = _times(big), {}
    for share, found in moved.items():
        own = _fastest(big, share)
        if own is not None:
            chosen = big.problem.policy(big.problem.from_indices(own, {}))
            slower = int((times[np.arange(len(own)), own] > times.min(1) * (1 + 1e-9)).sum())
            spent = big.error(found.policy.to_dict()) / (share * big.noise())
            out[share] = (_step_ms(big, found.policy) / _step_ms(big, chosen) - 1.0, spent, slower)
    return out


def outcome(small: Size, large: Size, *, search_too: bool, store: Store) -> Outcome:
    """Scan a proxy, transfer what it finds, and measure that on the big model; both costed at one width."""
    proxy, big = (
        Looked.at(size, scale=f"width={4096 // size.width},tokens=64", store=store) for size in (small, large)
    )
    once = proxy.scan(ONCE)
    table = proxy.scan()
    policies = _policies(proxy)

    def carried(
        policy: Policy,
        *,
        errors: SensitivityTable = table,
        fill: bool = False,
        limit: float = LIMIT,
        correction: Correction | None = None,
    ) -> Transfer:
        known = Proxy.of(policy, proxy.report, errors)
        more = {"fill": fill, "max_gradient_error": limit, "correction": correction}
        return transfer(policy, known, big.report, big.cost, **more)

    moved = {name: carried(policy) for name, policy in policies.items()}
    best = carried(policies[f"fastest within {LIMIT:g}"], fill=True)
    lost, lost_after = {}, {}
    if search_too:
        big.scan()
        within = {share: policies[name] for share in BUDGETS if (name := f"fastest within {share:g}") in policies}
        at = {share: carried(one, fill=True, limit=share) for share, one in within.items()}
        again = {
            share: carried(within[share], fill=True, limit=share, correction=_spotted(big, one))
            for share, one in at.items()
        }
        lost, lost_after = _lost(big, at), _lost(big, again)
    return Outcome(
        names=tuple(moved),
        predicted=tuple(found.predicted.error for found in moved.values()),
        once=tuple(carried(policies[name], errors=once).predicted.error for name in moved),
        after=tuple(
            carried(policies[name], correction=_spotted(big, found)).predicted.error for name, found in moved.items()
        ),
        measured=tuple(big.error(found.policy.to_dict()) for found in moved.values()),
        moments=tuple(
            tuple(big.error(found.policy.to_dict(), [instant]) for instant in INSTANTS) for found in moved.values()
        ),
        share=big.error(best.policy.to_dict()) / big.noise(),
        checked=big.error(_checked(big, best)[0].to_dict()) / big.noise(),
        divergence=big.divergence(best.policy.to_dict(), STEPS),
        lost=lost,
        lost_after=lost_after,
    )


def _inside(ratios: Sequence[float]) -> str:
    """Return the share of ratios within the goal, and their 5 %, 50 % and 95 % points."""
    if not ratios:
        return "-"
    found = np.array(ratios)
    inside = np.mean((found >= 0.7) & (found <= 1.4))
    return "{:.0%}; {:.2f}, {:.2f}, {:.2f}".format(inside, *np.percentile(found, (5, 50, 95)))


def _between_seeds(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the ratios of measured errors between two seeds of one big model: what nobody can predict."""
    return [
        one.measured[i] / other.measured[j]
        for one, other in itertools.permutations(outcomes, 2)
        for i, name in enumerate(one.names)
        for j, same in enumerate(other.names)
        if name == same and name.startswith("all ")
    ]


def run_transfer(options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Predicted against measured, time lost, and budgets kept, over pairs of models and seeds."""
    found: dict[str, list[Outcome]] = {}
    store = Store(options.store)
    began = time.monotonic()
    for seed in range(options.seeds):
        for name, (small, large, seeds) in PAIRS.items():
            if seed >= seeds or (time.monotonic() - began > 60 * options.minutes and found):
                continue
            sizes = [replace(size, seed=seed) for size in (small, large)]
            one = outcome(*sizes, search_too=seed < SEARCHED, store=store)
            found.setdefault(name, []).append(one)
            print(f"{name} seed {seed}: {time.process_time():.0f} s CPU, {one}", file=sys.stderr, flush=True)
    every = [one for outcomes in found.values() for one in outcomes]
    ranks = [one.rank for one in every]
    apart = sum(one.divergence > 0.0025 for one in every)
    count = f"{len(every)} pairs of models"
    ours = f"predicted / measured gradient error of {sum(len(one.names) for one in every)} policies"
    rows = [
        (f"{ours}: within 0.7 to 1.4; 5 %, 50 %, 95 %", _inside([r for o in every for r in o.ratios()]), "all"),
        ("the same, the proxy asked at one step only", _inside([r for o in every for r in o.ratios("once")]), "-"),
        ("the same, after a spot check of 8 passes", _inside([r for o in every for r in o.ratios("after")]), "all"),
        (
            "measured, between two steps of one big model, ten apart or more",
            _inside([a / b for o in every for row in o.moments for a, b in itertools.permutations(row, 2)]),
            "-",
        ),
        (
            "measured, between two seeds of one big model",
            _inside([r for o in found.values() for r in _between_seeds(o)]),
            "-",
        ),
        ("rank correlation over policies, mean (least)", f"{np.mean(ranks):.3f} ({min(ranks):.3f})", ">= 0.9"),
        *(
            _lost_row(f"step time lost against searching the big model{when}, {budgets}", lost, which)
            for budgets, which in ((f"default budget ({LIMIT})", (LIMIT,)), ("smaller ones", SMALLER))
            for when, lost in (
                ("", [one.lost for one in every]),
                (" after a spot check", [o.lost_after for o in every]),
            )
        ),
        (f"beyond {LIMIT} of the big model's noise, of {count}", _beyond([o.share for o in every]), "0 of 8"),
        ("the same, after the spot check has settled it", _beyond([o.checked for o in every]), "0 of 8"),
        (f"beyond 0.25 % divergence over {STEPS} paired steps, of {count}", str(apart), "0 of 8"),
    ]
    return rows, _pair_lines(found)


def _lost_row(what: str, found: Sequence[Lost], budgets: Sequence[float]) -> Row:
    rows = [lost[share] for lost in found for share in budgets if share in lost]
    times, over = [time for time, _, _ in rows], sum(spent > 1.0 for _, spent, _ in rows)
    text = f"{np.mean(times):.1%} ({max(times):.1%}); {over} of {len(rows)} beyond the budget" if rows else "-"
    return f"{what}: mean (worst)", text, "<= 2 %"


def _beyond(shares: Sequence[float]) -> str:
    return f"{sum(share > LIMIT for share in shares)} (worst {max(shares):.3f})"


def _pair_lines(found: dict[str, list[Outcome]]) -> list[str]:
    lines = ["", "| pair | predicted / measured, median | rank | share of noise, worst | divergence, worst |"]
    lines += ["|---|---|---|---|---|"]
    for name, outcomes in found.items():
        ratio = np.median([r for one in outcomes for r in one.ratios()])
        rank, share = np.mean([o.rank for o in outcomes]), max(o.share for o in outcomes)
        cells = (f"{name}, {len(outcomes)} seeds", f"{ratio:.2f}", f"{rank:.3f}", f"{share:.3f}")
        lines.append("| " + " | ".join([*cells, f"{max(o.divergence for o in outcomes):.2%}"]) + " |")
    lines += ["", "Step time lost per budget (a share of the noise), what was spent of the budget, and how many groups"]
    lines += ["it leaves slower than they could be; *after*: a spot check of eight passes.", ""]
    lines += ["| pair | " + " | ".join(f"{share:g}" for share in BUDGETS) + " |", "|---" * (len(BUDGETS) + 1) + "|"]
    for name, outcomes in found.items():
        for seed, one in enumerate(outcomes[:SEARCHED]):
            for when, lost in (("", one.lost), (", after", one.lost_after)):
                cells = ["{:+.1%}, {:.2f}, {}".format(*lost[s]) if s in lost else "-" for s in BUDGETS]
                lines.append(f"| {name}, seed {seed}{when} | " + " | ".join(cells) + " |")
    return lines


def _write_study(folder: Path) -> Path:
    """Write the study of a tiny GPT as a search leaves it."""
    found = Looked.at(Size("gpt", 64, 3))
    table = found.scan(ONCE)
    policy = _policies(found)[f"fastest within {LIMIT:g}"]
    write_json(folder / "graph.json", found.report.to_json(), indent=None)
    write_json(folder / "sensitivity.json", with_checksum(table.to_json()), indent=None)
    (folder / "study.db").touch()
    return save_policy(policy.model_copy(update={"evidence": {"target": "b200"}}), folder / "policy.yaml")


def run_llama(_options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Time the command for Llama-70B."""
    with tempfile.TemporaryDirectory() as folder:
        path = _write_study(Path(folder))
        command = [sys.executable, "-m", "autoprec", "transfer", str(path), "--to", "llama3-70b", "--seq", "4096"]
        command += ["-o", "big.yaml"]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
        wall = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    rows = [
        ("Llama-70B from its config to a policy", f"{wall:.1f} s", "<= 60 s"),
        ("the same: peak memory of the process", f"{peak:.2f} GB", "<= 2 GB"),
    ]
    return rows, ["", "```text", *done.stdout.rstrip().splitlines(), "```"]


def run_families(_options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Count the Hugging Face families of benchmarks/graph/zoo_hf.py whose every tunable layer has a role."""
    from autoprec.graph.recorder import record_step
    from autoprec.graph.roles import places
    from autoprec.tuning.transfer.counterparts import counterparts
    from benchmarks.graph.zoo_hf import MODELS

    mapped, lines = 0, [""]
    for name, build in MODELS.items():
        model, inputs = build()
        report = record_step(model, lambda model=model, inputs=inputs: model(**inputs).loss.backward())
        found = places(report.tunable)
        unknown = [layer for layer, place in found.items() if not place.role]
        alone = counterparts(found, found, {}).alone
        mapped += not unknown and not alone
        if unknown or alone:
            lines.append(f"- {name}: no role for {', '.join(unknown[:5])}")
    goal = ("Hugging Face families whose roles are mapped without a hint", f"{mapped} of {len(MODELS)}", ">= 24")
    return [goal], lines
