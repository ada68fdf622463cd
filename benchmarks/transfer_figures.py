"""The figures of benchmarks/transfer.py: predicted against measured on a 16 times larger model, Llama-70B, families."""

from __future__ import annotations

import argparse
import copy
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
from transfer_models import Looked, Size

from autoprec.policy import Policy, save_policy
from autoprec.policy.solver import solve
from autoprec.policy.space import Choice
from autoprec.support.files import with_checksum, write_json
from autoprec.tuning.decide.problem import FloatTable, IntVector, Problem
from autoprec.tuning.transfer.plan import Transfer, rendered, transfer
from autoprec.tuning.transfer.proxy import Proxy
from autoprec.tuning.transfer.spot import spot_probes

__all__ = ["run_families", "run_llama", "run_transfer"]

Row = tuple[str, str, str]
LIMIT = 0.12  # of the mini-batch noise: the search's own
#: Policies per pair of models: the fastest within these shares of the noise, and uniform ones.
BUDGETS = (0.01, 0.02, 0.04, 0.12, 0.25)
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


@dataclass(frozen=True)
class Outcome:
    """One pair of models under one seed, per policy: predicted, from segments measured on the big model, measured.

    ``lost`` is, per budget of :data:`BUDGETS`, the modelled step time above what the big model's own scan and solver
    find within it, and how many of its groups that solution leaves slower than they could be (0: the budget does not
    bind).
    """

    names: tuple[str, ...]
    predicted: tuple[float, ...]
    spotted: tuple[float, ...]
    measured: tuple[float, ...]
    share: float
    divergence: float
    lost: dict[float, tuple[float, int]]

    @property
    def ratios(self) -> list[float]:
        """Predicted over measured, per policy."""
        return [p / m for p, m in zip(self.predicted, self.measured, strict=True)]

    @property
    def spot_ratios(self) -> list[float]:
        """What seven passes over segments of the big model predict, over measured: uniform policies."""
        return [p / m for p, m in zip(self.spotted, self.measured, strict=True) if p == p]

    @property
    def rank(self) -> float:
        """Rank correlation of predicted and measured over the policies."""
        return float(np.corrcoef(_ranks(self.predicted), _ranks(self.measured))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    return np.argsort(np.argsort(values)).astype(float)


def _divergence(big: Looked, policy: Policy) -> float:
    """Return the mean relative loss gap over a few more steps, paired with the same steps as written."""
    from autoprec.applying.policy import Policy as Applied
    from autoprec.policy import policy_from_dict

    plain, other = copy.deepcopy(big.trained), copy.deepcopy(big.trained)
    applied = policy_from_dict(policy.to_dict(), cls=Applied)
    applied.apply(other.model, backend="emulated")
    first = big.trained.size.age
    exact, found = plain.train(STEPS, first), other.train(STEPS, first)
    return float(np.mean([abs(a - b) / abs(a) for a, b in zip(exact, found, strict=True)]))


def _step_ms(big: Looked, policy: Policy) -> float:
    from autoprec.policy import resolve

    plans = resolve(policy, [layer.name for layer in big.report.tunable], strict=False)
    return big.cost.estimate(plans, activations=policy.activations).time_ms


def _spotted(big: Looked, found: Transfer) -> float:
    """Return the error that the passes of a spot check, the whole policy's own apart, say the policy has."""
    _, asked = spot_probes(found.policy, big.report, 8)
    plain = found.policy.model_copy(update={"activations": "keep"})
    names, recipes = [layer.name for layer in big.report.layers], found.policy.recipes
    squares, off = 0.0, []
    for segment in asked:
        alone = rendered(plain, names, dict.fromkeys(segment.layers, segment.choice), recipes)
        error = big.trained.error(alone.to_dict(), batches=1)
        squares += error**2
        expected = found.predicted.segments.get(segment.name, 0.0)
        off += [error / expected] if expected > 0 else []
    known = {segment.name for segment in asked}
    rest = sum(error**2 for name, error in found.predicted.segments.items() if name not in known)
    return float(np.sqrt(squares + rest * (np.median(off) if off else 1.0) ** 2))


def _lost(big: Looked, moved: dict[float, Transfer]) -> dict[float, tuple[float, int]]:
    """Search the big model itself and compare step times, budget by budget."""
    big.scan(1)
    times = _times(big)
    out = {}
    for share, found in moved.items():
        own = _fastest(big, share)
        if own is None:
            continue
        chosen = big.problem.policy(big.problem.from_indices(own, {}))
        slower = int((times[np.arange(len(own)), own] > times.min(1) * (1 + 1e-9)).sum())
        out[share] = (_step_ms(big, found.policy) / _step_ms(big, chosen) - 1.0, slower)
    return out


def outcome(small: Size, large: Size, *, search_too: bool) -> Outcome:
    """Scan a proxy, transfer what it finds, and measure that on the big model; both costed at one width."""
    proxy, big = (Looked.at(size, scale=f"width={4096 // size.width},tokens=64") for size in (small, large))
    table = proxy.scan(2)
    policies = _policies(proxy)

    def carried(policy: Policy, *, fill: bool, limit: float = LIMIT) -> Transfer:
        known = Proxy.of(policy, proxy.report, table)
        return transfer(policy, known, big.report, big.cost, fill=fill, max_gradient_error=limit)

    moved = {name: carried(policy, fill=False) for name, policy in policies.items()}
    best = carried(policies[f"fastest within {LIMIT:g}"], fill=True)
    within = {share: policies.get(f"fastest within {share:g}") for share in BUDGETS if search_too}
    at = {share: carried(one, fill=True, limit=share) for share, one in within.items() if one is not None}
    return Outcome(
        names=tuple(moved),
        predicted=tuple(found.predicted.error for found in moved.values()),
        spotted=tuple(_spotted(big, found) if name.startswith("all ") else np.nan for name, found in moved.items()),
        measured=tuple(big.trained.error(found.policy.to_dict()) for found in moved.values()),
        share=big.trained.error(best.policy.to_dict()) / big.trained.noise(),
        divergence=_divergence(big, best.policy),
        lost=_lost(big, at),
    )


def _inside(ratios: Sequence[float]) -> str:
    """Return the share of ratios within the goal, and their 5 %, 50 % and 95 % points."""
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


def _averaged(outcomes: Sequence[Outcome]) -> list[float]:
    """Return predicted over measured of the uniform policies, geometric means over seeds: the law without the seeds."""
    names = [name for name in outcomes[0].names if name.startswith("all ")]
    logs = {name: [np.log(o.ratios[o.names.index(name)]) for o in outcomes if name in o.names] for name in names}
    return [float(np.exp(np.mean(values))) for values in logs.values()]


def run_transfer(options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Predicted against measured, time lost, and budgets kept, over pairs of models and seeds."""
    found: dict[str, list[Outcome]] = {}
    began = time.monotonic()
    for seed in range(options.seeds):
        for name, (small, large, seeds) in PAIRS.items():
            if seed >= seeds or (time.monotonic() - began > 60 * options.minutes and found):
                continue
            one = outcome(replace(small, seed=seed), replace(large, seed=seed), search_too=seed < SEARCHED)
            found.setdefault(name, []).append(one)
            print(f"{name} seed {seed}: {time.process_time():.0f} s CPU, {one}", file=sys.stderr, flush=True)
    every = [one for outcomes in found.values() for one in outcomes]
    ratios = [ratio for one in every for ratio in one.ratios]
    ranks = [one.rank for one in every]
    bound = [time for one in every for time, slower in one.lost.values() if slower]
    worst, apart = max(one.share for one in every), sum(one.divergence > 0.0025 for one in every)
    count = f"{len(every)} pairs of models"
    ours = f"predicted / measured gradient error of {len(ratios)} policies"
    rows = [
        (f"{ours}: within 0.7 to 1.4; 5 %, 50 %, 95 %", _inside(ratios), "all"),
        ("the same, averaged over seeds", _inside([r for o in found.values() for r in _averaged(o)]), "all"),
        ("the same, after the spot check's passes", _inside([r for o in every for r in o.spot_ratios]), "all"),
        (
            "measured, between two seeds of one big model",
            _inside([r for o in found.values() for r in _between_seeds(o)]),
            "-",
        ),
        ("rank correlation over policies, mean (least)", f"{np.mean(ranks):.3f} ({min(ranks):.3f})", ">= 0.9"),
        (
            f"step time lost against searching the big model, {len(bound)} budgets that bind: mean (worst)",
            f"{np.mean(bound):.1%} ({max(bound):.1%})",
            "<= 2 %",
        ),
        (f"beyond {LIMIT} of the big model's noise, of {count}", _beyond(every, worst), "0 of 8"),
        (f"beyond 0.25 % divergence over {STEPS} paired steps, of {count}", str(apart), "0 of 8"),
    ]
    return rows, _pair_lines(found)


def _beyond(every: Sequence[Outcome], worst: float) -> str:
    return f"{sum(one.share > LIMIT for one in every)} (worst {worst:.3f})"


def _pair_lines(found: dict[str, list[Outcome]]) -> list[str]:
    lines = ["", "| pair | predicted / measured, median | rank | share of noise, worst | divergence, worst |"]
    lines += ["|---|---|---|---|---|"]
    for name, outcomes in found.items():
        ratio = np.median([r for one in outcomes for r in one.ratios])
        rank, share = np.mean([o.rank for o in outcomes]), max(o.share for o in outcomes)
        cells = (f"{name}, {len(outcomes)} seeds", f"{ratio:.2f}", f"{rank:.3f}", f"{share:.3f}")
        lines.append("| " + " | ".join([*cells, f"{max(o.divergence for o in outcomes):.2%}"]) + " |")
    lines += ["", "Step time lost per budget (share of the noise), and groups that the budget slows there:", ""]
    lines += ["| pair | " + " | ".join(f"{share:g}" for share in BUDGETS) + " |", "|---" * (len(BUDGETS) + 1) + "|"]
    for name, outcomes in found.items():
        for seed, one in enumerate(outcomes[:SEARCHED]):
            cells = [f"{one.lost[s][0]:+.1%} ({one.lost[s][1]})" if s in one.lost else "-" for s in BUDGETS]
            lines.append(f"| {name}, seed {seed} | " + " | ".join(cells) + " |")
    return lines


def _write_study(folder: Path) -> Path:
    """Write the study of a tiny GPT as a search leaves it."""
    found = Looked.at(Size("gpt", 64, 3))
    table = found.scan(1)
    policy = _policies(found)[f"fastest within {LIMIT:g}"]
    write_json(folder / "graph.json", found.report.to_json(), indent=None)
    write_json(folder / "sensitivity.json", with_checksum(table.to_json()), indent=None)
    (folder / "study.db").touch()
    return save_policy(policy.model_copy(update={"evidence": {"target": "b200"}}), folder / "policy.yaml")


def run_llama(_options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Time the command for Llama-70B, its plan for many GPUs included."""
    with tempfile.TemporaryDirectory() as folder:
        path = _write_study(Path(folder))
        command = [sys.executable, "-m", "autoprec", "transfer", str(path), "--to", "llama3-70b", "--seq", "4096"]
        command += ["--gpus", "8,64,1024", "--tensor-parallel", "8", "-o", "big.yaml"]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
        wall = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    rows = [
        ("Llama-70B from its config to a policy with its plan", f"{wall:.1f} s", "<= 60 s"),
        ("the same: peak memory of the process", f"{peak:.2f} GB", "<= 2 GB"),
    ]
    return rows, ["", "```text", *done.stdout.rstrip().splitlines(), "```"]


def run_families(_options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Count the Hugging Face families of benchmarks/graph_zoo_hf.py whose every tunable layer has a role."""
    from graph_zoo_hf import MODELS

    from autoprec.graph.recorder import record_step
    from autoprec.tuning.transfer.counterparts import counterparts
    from autoprec.tuning.transfer.roles import places

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
