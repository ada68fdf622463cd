"""The figures of benchmarks/transfer.py: predicted against measured on a 16 times larger model, Llama-70B, families."""

from __future__ import annotations

import argparse
import copy
import resource
import subprocess
import sys
import tempfile
import time
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
from autoprec.tuning.transfer.plan import Transfer, transfer
from autoprec.tuning.transfer.proxy import Proxy

__all__ = ["run_families", "run_llama", "run_transfer"]

Row = tuple[str, str, str]
LIMIT = 0.12  # of the mini-batch noise: the search's own
#: Policies per pair of models: the fastest within these shares of the noise, and uniform ones.
BUDGETS = (0.01, 0.03, 0.12, 0.25)
UNIFORM = ("bf16", "fp8_rowwise", "nvfp4_plain")
#: What grows -> (proxy, big model, seeds): 16 times the parameters of the blocks each.
PAIRS = {
    "gpt, deeper and wider": (Size("gpt", 32, 3, 256, 12), Size("gpt", 64, 12, 256, 12), 8),
    "vit, deeper and wider": (Size("vit", 32, 3, 256, 12), Size("vit", 64, 12, 256, 12), 2),
    "gpt, wider": (Size("gpt", 32, 3, 256, 12), Size("gpt", 128, 3, 256, 12), 2),
}
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
    """One pair of models under one seed."""

    ratios: tuple[float, ...]
    rank: float
    share: float
    divergence: float
    lost: float


def _ranks(values: list[float]) -> np.ndarray[Any, Any]:
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


def outcome(small: Size, large: Size, *, search_too: bool) -> Outcome:
    """Scan a proxy, transfer what it finds, and measure that on the big model; both costed at one width."""
    proxy, big = (Looked.at(size, scale=f"width={4096 // size.width},tokens=64") for size in (small, large))
    table = proxy.scan(1)
    policies = _policies(proxy)

    def carried(policy: Policy, *, fill: bool) -> Transfer:
        return transfer(policy, Proxy.of(policy, proxy.report, table), big.report, big.cost, fill=fill)

    moved = {name: carried(policy, fill=False) for name, policy in policies.items()}
    predicted = [found.predicted.error for found in moved.values()]
    measured = [big.trained.error(found.policy.to_dict()) for found in moved.values()]
    rank = float(np.corrcoef(_ranks(predicted), _ranks(measured))[0, 1])
    best = carried(policies[f"fastest within {LIMIT:g}"], fill=True)
    noise = big.trained.noise()
    share = big.trained.error(best.policy.to_dict()) / noise
    lost = float("nan")
    if search_too:
        big.scan(1)
        own = _fastest(big, LIMIT)
        if own is not None:
            chosen = big.problem.policy(big.problem.from_indices(own, {}))
            lost = _step_ms(big, best.policy) / _step_ms(big, chosen) - 1.0
    ratios = tuple(p / m for p, m in zip(predicted, measured, strict=True))
    return Outcome(ratios, rank, share, _divergence(big, best.policy), lost)


def run_transfer(options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Predicted against measured, time lost, and budgets kept, over pairs of models and seeds."""
    found: dict[str, list[Outcome]] = {}
    for name, (small, large, seeds) in PAIRS.items():
        for seed in range(min(seeds, options.seeds)):
            one = outcome(
                replace(small, seed=seed), replace(large, seed=seed), search_too=seed == 0 and small.kind == "gpt"
            )
            found.setdefault(name, []).append(one)
            print(f"{name} seed {seed}: {time.process_time():.0f} s CPU, {one}", file=sys.stderr, flush=True)
    every = [one for outcomes in found.values() for one in outcomes]
    ratios = np.array([ratio for one in every for ratio in one.ratios])
    inside = float(np.mean((ratios >= 0.7) & (ratios <= 1.4)))
    low, middle, high = np.percentile(ratios, (5, 50, 95))
    ranks, lost = [one.rank for one in every], [one.lost for one in every if one.lost == one.lost]
    worst = max(one.share for one in every)
    beyond = sum(one.share > LIMIT for one in every)
    apart = sum(one.divergence > 0.0025 for one in every)
    count = f"{len(every)} pairs of models"
    rows = [
        (
            "predicted / measured gradient error, 5 %, median, 95 %",
            f"{low:.2f}, {middle:.2f}, {high:.2f}",
            "0.7 to 1.4",
        ),
        (f"of {len(ratios)} transferred policies within 0.7 to 1.4", f"{inside:.0%}", "all"),
        ("rank correlation over policies, mean (least)", f"{np.mean(ranks):.3f} ({min(ranks):.3f})", ">= 0.9"),
        ("modelled step time lost against searching the big model", f"{max(lost):.1%} (worst)", "<= 2 %"),
        (f"beyond {LIMIT} of the big model's noise, of {count}", f"{beyond} (worst {worst:.3f})", "0 of 8"),
        (f"beyond 0.25 % divergence over {STEPS} paired steps, of {count}", str(apart), "0 of 8"),
    ]
    lines = ["", "| pair | predicted / measured, median | rank | share of noise, worst | lost | divergence, worst |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, outcomes in found.items():
        ratio = np.median([r for one in outcomes for r in one.ratios])
        rank, share = np.mean([o.rank for o in outcomes]), max(o.share for o in outcomes)
        apart_most = max(o.divergence for o in outcomes)
        cells = (f"{name}, {len(outcomes)} seeds", f"{ratio:.2f}", f"{rank:.3f}", f"{share:.3f}")
        lines.append("| " + " | ".join([*cells, f"{outcomes[0].lost:+.1%}", f"{apart_most:.2%}"]) + " |")
    return rows, lines


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
