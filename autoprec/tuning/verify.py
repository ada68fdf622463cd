"""Longer paired runs of a policy beside the reference and the presets it must beat."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autoprec.errors import AutoPrecError, NothingAcceptableError
from autoprec.policy import Policy
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe
from autoprec.trial.protocol import TrialResult, TrialSpec
from autoprec.tuning.decide.metrics import divergence, step_time
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.options import SearchOptions, fewer_steps
from autoprec.tuning.phases.record import record_step
from autoprec.tuning.setup import Setup
from autoprec.tuning.workers.local import HostPool

__all__ = ["Contender", "Verification", "contenders", "search_setup", "verify"]

#: What is told apart from timing noise, as a factor of speed, and what counts as saving memory.
FASTER, SMALLER = 1.05, 0.98


@dataclass(frozen=True, slots=True)
class Contender:
    """One policy over all paired seeds; ratios and divergences are fractions, memory is in bytes."""

    name: str
    speedups: tuple[float, ...]
    divergences: tuple[float, ...]
    memory_bytes: int
    step_time_ms: float
    failures: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        """Median speed-up over the reference of the same seed."""
        return statistics.median(self.speedups) if self.speedups else 0.0

    @property
    def divergence(self) -> float:
        """Mean divergence over the seeds."""
        return statistics.fmean(self.divergences) if self.divergences else float("inf")

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        out = asdict(self) | {"speedup": self.speedup}
        return out | {"divergence": self.divergence if self.divergences else None}


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome: the policy first, then what it was compared with.

    ``timed`` is False where the numerics are emulated: then speed says nothing about the policy's target.
    """

    ok: bool
    reason: str
    rows: tuple[Contender, ...]
    seeds: int
    steps: int
    noise_floor: float
    timed: bool
    reference: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self) | {"rows": [row.to_json() for row in self.rows]}


def search_setup(policy: Policy, pool: HostPool, label: str) -> Setup | None:
    """Return what a search for the policy's target would be of; None where it has no quantised recipe to compare.

    Raises:
        NothingAcceptableError: the script's training step could not be recorded.
    """
    if not any(recipe.scaled for recipe in policy.recipes.values()):
        return None
    graph = record_step(pool, label)
    options = SearchOptions(command=(label,), target=str(policy.evidence.get("target", "auto")))
    try:
        return Setup.of(options, pool.info(0), graph)
    except AutoPrecError:  # a target that is described elsewhere, or another device than this one
        return None


def contenders(policy: Policy, setup: Setup | None = None) -> dict[str, dict[str, Any]]:
    """Return the policy and the uniform presets people would run instead, by name.

    A preset of a search's name is that search's policy: layers that the target cannot run under the recipe (a head of
    8 outputs in FP8) keep the baseline.

    Args:
        policy: what is verified.
        setup: of a search on this script for the policy's target; without it presets take every layer.
    """

    def uniform(name: str, recipe: Recipe, activations: str) -> dict[str, Any]:
        return Policy.model_validate({"recipes": {name: recipe}, "default": name, "activations": activations}).to_dict()

    bf16 = BUILTIN_RECIPES["bf16"]
    out = {"policy": policy.to_dict(), "bf16 autocast": uniform("bf16", bf16, "bf16")}
    if policy.activations == "keep":
        out["all bf16"] = uniform("bf16", bf16, "keep")
    searched = {name: setup.problem.policy(params) for name, params in presets(setup.problem)} if setup else {}
    for name, recipe in policy.recipes.items():
        known = searched.get(f"all {name}")
        if recipe.scaled:
            out[f"all {name}"] = known.to_dict() if known else uniform(name, recipe, policy.activations)
    return out


def verify(
    pool: HostPool,
    policies: dict[str, dict[str, Any]],
    spec: TrialSpec,
    *,
    seeds: int,
    timed: bool,
    max_divergence: float,
    tell: Callable[[str], None],
) -> Verification:
    """Run reference and policies side by side under every paired seed.

    Args:
        pool: hosts by seed.
        policies: name -> document; the first one is verified, the others are compared.
        spec: steps, warm-up and backend of every run.
        seeds: paired seeds.
        timed: whether step times mean anything for the policy's target.
        max_divergence: the acceptable mean divergence, as a fraction.
        tell: receives one line per finished seed.

    Raises:
        NothingAcceptableError: the reference could not be run under any seed.
    """
    runs: dict[str, list[tuple[TrialResult, TrialResult]]] = {name: [] for name in policies}
    reference_ms: list[float] = []
    floor, reference_memory = 0.0, 0
    failed: TrialResult | None = None
    for seed in range(seeds):
        if seed + 1 < seeds:
            pool.prepare(seed + 1)
        reference = _run(pool, spec, None, seed)
        if not reference.ok:
            failed = reference
            tell(f"seed {seed}: the reference failed: {reference.status}: {reference.reason}")
            continue
        reference_memory = reference_memory or reference.memory_bytes
        if seed == 0:
            floor = divergence(_run(pool, spec, None, seed, perturb="bf16").losses, reference.losses)
        order = list(policies)
        shift = seed % len(order)
        for name in (*order[shift:], *order[:shift]):
            runs[name].append((_run(pool, spec, policies[name], seed), reference))
        # a second reference after the candidates: a machine that drifted is seen, and both readings count
        again = _run(pool, spec, None, seed)
        reference_ms += [step_time(r.step_ms, r.warmup) for r in (reference, again) if r.ok]
        tell(f"seed {seed}: {', '.join(order)} measured")
        if seed:
            pool.release(seed)
    if not reference_ms:
        short = failed is not None and failed.status == "too_short"
        raise NothingAcceptableError(
            f"the reference could not be run: {failed.reason if failed else 'no seed was asked for'}",
            fix=fewer_steps(len(failed.losses), spec.warmup)
            if failed and short
            else "make the script train as it is first",
        )
    rows = tuple(_contender(name, pairs) for name, pairs in runs.items())
    ok, reason = _judge(rows, max_divergence, floor, timed, reference_memory)
    return Verification(
        ok=ok,
        reason=reason,
        rows=rows,
        seeds=seeds,
        steps=spec.steps,
        noise_floor=floor,
        timed=timed,
        reference={"step_time_ms": statistics.median(reference_ms)},
    )


def _run(pool: HostPool, spec: TrialSpec, policy: dict[str, Any] | None, seed: int, perturb: str = "") -> TrialResult:
    document = spec.to_json() | {"policy": policy, "perturb": perturb}
    return pool.run(TrialSpec.from_json(document), seed)


def _contender(name: str, pairs: Sequence[tuple[TrialResult, TrialResult]]) -> Contender:
    good = [(run, reference) for run, reference in pairs if run.ok]
    times = [step_time(run.step_ms, run.warmup) for run, _ in good]
    return Contender(
        name=name,
        speedups=tuple(step_time(ref.step_ms, ref.warmup) / t for t, (_, ref) in zip(times, good, strict=True)),
        divergences=tuple(divergence(run.losses, ref.losses) for run, ref in good),
        memory_bytes=good[0][0].memory_bytes if good else 0,
        step_time_ms=statistics.median(times) if times else 0.0,
        failures=tuple(f"{run.status}: {run.reason}" for run, _ in pairs if not run.ok),
    )


def _judge(
    rows: Sequence[Contender], max_divergence: float, floor: float, timed: bool, reference_memory: int
) -> tuple[bool, str]:
    """Return (ok, reason) for the first row."""
    policy, others = rows[0], rows[1:]
    if policy.failures:
        return False, f"the policy failed in {len(policy.failures)} runs, first: {policy.failures[0]}"
    limit = max(max_divergence, floor)
    if policy.divergence > limit:
        return False, f"divergence {policy.divergence:.3%} is above {limit:.3%}"
    if not timed:
        return True, f"divergence {policy.divergence:.3%} within {limit:.3%}; speed not judged (emulated numerics)"
    smaller = 0 < policy.memory_bytes < SMALLER * reference_memory  # what some policies are for
    if policy.speedup < 1 / FASTER and max(policy.speedups) < 1.0 and not smaller:
        return False, f"it is slower than the script as written: {policy.speedup:.2f}x, and saves no memory"
    faster = [
        row
        for row in others
        if row.divergences
        and row.divergence <= limit
        and row.speedup > policy.speedup * FASTER
        and min(row.speedups) > max(policy.speedups)  # a policy that is that preset must not lose to it by chance
    ]
    if faster:
        return False, f"preset '{faster[0].name}' is faster ({faster[0].speedup:.2f}x against {policy.speedup:.2f}x)"
    return True, f"{policy.speedup:.2f}x at divergence {policy.divergence:.3%} (limit {limit:.3%})"
