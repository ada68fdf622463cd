"""Longer paired runs of a policy beside the reference and the presets it must beat.

Each policy is run once per paired seed beside that seed's reference, as the finalists of a search are, and its runs
(:class:`~autoprec.tuning.study.run.Run`) are judged by the rules of a search
(:class:`~autoprec.tuning.decide.decision.Rules`): a search and a verification differ in what was measured only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from autoprec.errors import (
    FIX,
    AutoPrecError,
    NothingAcceptableError,
    PolicyMismatchError,
    UnsupportedError,
    UsageError,
)
from autoprec.policy import LayerRule, Policy
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, KEEP, Recipe
from autoprec.support.units import counted
from autoprec.trial.intervals import FEWEST
from autoprec.trial.protocol import Probe, TrialResult, TrialSpec
from autoprec.tuning.decide.decision import Rules, Standing, gradient_limit
from autoprec.tuning.decide.metrics import Reference, divergence, score, signed_gap, step_time
from autoprec.tuning.decide.noise import Baseline, error_over_limit, uninformative
from autoprec.tuning.decide.presets import presets, widest
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.options import SearchOptions, fewer_steps
from autoprec.tuning.paired import baseline_of, perturbed_runs
from autoprec.tuning.phases.duels import can_be_exchanged, duel_run, timed_together, times_of, usual_seconds
from autoprec.tuning.phases.record import record_step
from autoprec.tuning.phases.sensitivity import errors_of, scan_warmup
from autoprec.tuning.setup import Setup
from autoprec.tuning.study.run import DUEL, Run, error_text, metrics_of
from autoprec.tuning.workers.local import HostPool

#: What is told apart from timing noise, as a factor of speed, and what counts as saving memory.
FASTER, SMALLER = 1.05, 0.98
#: Where the limits of a policy's search are not known.
_USUAL = SearchOptions(command=("train.py",))
#: A gradient error below this is none.
TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Contender:
    """One policy over all paired seeds.

    Attributes:
        runs: one per seed, and its duel, if any, as a search has them; ``gradient_error`` is that of its seed, where it
            could be measured.
        standing: what the rules of a search say of it.
        unsure: its seeds cannot tell whether the rejection is right.
    """

    runs: tuple[Run, ...]
    standing: Standing
    unsure: bool = False

    @property
    def name(self) -> str:
        return self.standing.name

    @property
    def measured(self) -> list[Run]:
        """The paired runs that were measured to their end."""
        return [run for run in self.runs if run.ok and run.kind != DUEL]

    @property
    def failures(self) -> tuple[str, ...]:
        """Why its other runs failed."""
        return tuple(f"{run.status}: {run.reason}" for run in self.runs if not run.ok)

    @property
    def speedups(self) -> tuple[float, ...]:
        """Speed-ups over the reference of the same seed."""
        return tuple(run["speedup"] for run in self.measured)

    @property
    def range(self) -> tuple[float, float]:
        """Between which speed-ups it lies: the 95 % interval of its duel, else those of all its seeds."""
        low, high = self.standing.low, self.standing.high
        if low is None or high is None:
            return min(self.speedups, default=0.0), max(self.speedups, default=0.0)
        return low, high

    @property
    def divergence(self) -> float:
        """Mean divergence of the runs that were measured; infinity where none was."""
        return statistics.fmean(run["divergence"] for run in self.measured) if self.measured else math.inf

    def to_json(self) -> dict[str, Any]:
        """Return ratios, divergences and gradient errors as fractions, memory in bytes."""
        one, measured = self.standing, self.measured
        return {
            "name": one.name,
            "speedup": one.speedup,
            "speedups": self.speedups,
            "interval": None if one.low is None else (one.low, one.high),
            "divergence": self.divergence if measured else None,
            "divergences": [run["divergence"] for run in measured],
            "excess": one.excess,
            "gradient_error": one.gradient_error,
            "gradient_errors": _errors(self.runs),
            "memory_bytes": int(one.memory_bytes),
            "step_time_ms": statistics.median(run["step_time_ms"] for run in measured) if measured else 0.0,
            "failures": self.failures,
            "rejection": str(one.rejection or ""),
            "caveat": str(one.caveat or ""),
            "unsure": self.unsure,
        }


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome: the policy first, then what it was compared with.

    ``verdict`` is ``holds``, ``fails``, or ``undecided`` where the seeds cannot tell, and ``why`` says so. ``timed`` is
    False where speed says nothing about the policy's target, see :func:`is_timed`.
    ``first_seed`` is 0 where the script's own seed was run. ``limits`` are ``divergence``,
    ``gradient_error`` and ``gradient_noise``, the last two relative to the gradient, None where they are unknown.
    """

    verdict: str
    why: Reason
    rows: tuple[Contender, ...]
    seeds: int
    steps: int
    noise_floor: float
    timed: bool
    first_seed: int = 0
    reference: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return every field, the reason as text and as a code with its data."""
        out = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "why"}
        words = {"reason": str(self.why), "reasons": [self.why.to_json()]}
        return {"ok": self.verdict == "holds"} | out | words | {"rows": [row.to_json() for row in self.rows]}


def limits_of(policy: Policy, max_divergence: float | None, max_gradient_error: float | None) -> tuple[float, float]:
    """Return the limits that hold for a policy: those asked for, else those of its search, else the usual ones.

    Raises:
        UsageError: one that was asked for is not above 0.
    """

    def one(name: str, asked: float | None) -> float:
        found = policy.evidence.get(name)
        if asked is not None and not asked > 0:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} {asked:g} is not above 0", fix="leave it out to take the limit of the search")
        return asked or (found if isinstance(found, float) and found > 0 else getattr(_USUAL, name))

    return one("max_divergence", max_divergence), one("max_gradient_error", max_gradient_error)


def searched(policy: Policy, model: dict[str, Any] | None = None) -> str:
    """Return what a policy's search found of its losses and gradients, in words; empty where it was not searched.

    Args:
        model: of the script; figures of another model are left out.
    """
    if model and _is_another(policy, model):
        return ""
    found = policy.evidence
    if not all(isinstance(found.get(name), (int, float)) for name in ("divergence", "seeds", "steps")):
        return ""
    text = f"divergence {found['divergence']:.3%}"
    if isinstance(error := found.get("gradient_error"), float):
        text += f", gradient error {error_text(error, found.get('gradient_noise'))}"
    return f"{text}, over {counted(found['seeds'], 'paired seed')} of {found['steps']} steps"


def first_fresh_seed(policy: Policy) -> int:
    """Return the first paired seed under which a policy's search did not run it; 0 where it was not searched."""
    known = policy.evidence.get("seeds")
    return max(0, known) if isinstance(known, int) else 0


def refuse_another_model(policy: Policy, pool: HostPool, seed: int, backend: str) -> None:
    """Try one step under a policy that was found on another model: what does not fit is refused before all runs.

    Raises:
        PolicyMismatchError, UnsupportedError: it cannot be applied here.
    """
    found = pool.info(seed).model
    if _is_another(policy, found):
        _check_fit(pool.run(TrialSpec(policy=policy.to_dict(), steps=1, warmup=0, backend=backend), seed))


def _is_another(policy: Policy, model: dict[str, Any]) -> bool:
    made_for = policy.to_dict().get("model")
    return made_for is not None and any(made_for[key] != model.get(key) for key in ("class", "parameters"))


def _check_fit(result: TrialResult) -> None:
    kind = {"mismatch": PolicyMismatchError, "unsupported": UnsupportedError}.get(result.status)
    if kind is not None:
        what, _, fix = result.reason.partition(FIX)
        raise kind(f"the policy does not fit this script: {what}", fix=fix)


def search_setup(policy: Policy, pool: HostPool, label: str, seed: int = 0) -> Setup | None:
    """Return what a search for the policy's target would be of; None where it has no quantised recipe to compare.

    Raises:
        NothingAcceptableError: the script's training step could not be recorded.
    """
    if not any(recipe.scaled for recipe in policy.recipes.values()):
        return None
    graph = record_step(pool, label, seed)
    options = SearchOptions(command=(label,), target=str(policy.evidence.get("target", "auto")))
    try:
        return Setup.of(options, pool.info(seed), graph)
    except AutoPrecError:  # a target that is described elsewhere, or another device than this one
        return None


def is_timed(policy: Policy, device: str) -> bool:
    """Say whether step times on a device tell anything of a policy: not if it is emulated there, or for a GPU."""
    emulated = any(recipe.scaled for recipe in policy.recipes.values())
    return device != "cpu" or (not emulated and policy.evidence.get("target", "cpu") in ("cpu", "auto"))


def contenders(
    policy: Policy, setup: Setup | None = None, tell: Callable[[str], None] = lambda _: None
) -> dict[str, dict[str, Any]]:
    """Return the policy and the uniform presets people would run instead, by name; one that it is itself is left out.

    A preset of a search's name is that search's policy: layers that the target cannot run under the recipe (a head of
    8 outputs in FP8) keep the baseline.

    Args:
        setup: of a search on this script for the policy's target; without it presets take every layer.
        tell: receives a line for each preset that is left out.
    """

    def uniform(name: str, recipe: Recipe, activations: str) -> dict[str, Any]:
        return Policy.model_validate({"recipes": {name: recipe}, "default": name, "activations": activations}).to_dict()

    bf16 = BUILTIN_RECIPES["bf16"]
    out = {"policy": policy.to_dict(), "bf16 autocast": uniform("bf16", bf16, "bf16")}
    if policy.activations == "keep":
        out["all bf16"] = uniform("bf16", bf16, "keep")
    backends = policy.evidence.get("backends")
    run_by = {"evidence": {"backends": backends}} if backends else {}
    searched = {name: setup.problem.policy(params) for name, params in presets(setup.problem)} if setup else {}
    for name, recipe in policy.recipes.items():
        if recipe.scaled:
            known = widest(name, searched)
            label = known or f"all {name}"
            out[label] = searched[known].to_dict() if known else uniform(name, recipe, policy.activations)
            out[label] |= run_by  # else a preset would lose to a faster backend, not to a better policy
    for name in [name for name in out if name != "policy" and _what_runs(out[name]) == _what_runs(out["policy"])]:
        tell(f"the policy is the preset '{name}', which is not run beside it")  # it would win or lose by chance
        del out[name]
    return out


def _what_runs(document: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a policy does, whatever it calls its recipes and however it says "all layers"."""
    policy = Policy.model_validate(document)
    recipes: dict[str, Recipe | None] = {KEEP: None, **policy.recipes}
    rules = []
    for rule in (*policy.layers, LayerRule(match="*", recipe=policy.default)):
        rules.append((rule.match, [recipes[rule.gemms.get(gemm, rule.recipe)] for gemm in GEMMS]))
        if rule.match == "*":
            break
    rest = policy.model_dump(exclude={"recipes", "layers", "default", "model", "evidence", "guard"})
    return rules, rest


def verify(
    pool: HostPool,
    policies: dict[str, dict[str, Any]],
    spec: TrialSpec,
    *,
    seeds: int,
    first_seed: int = 0,
    timed: bool,
    max_divergence: float,
    max_gradient_error: float = _USUAL.max_gradient_error,
    tell: Callable[[str], None],
) -> Verification:
    """Run reference and policies side by side under every paired seed.

    Args:
        policies: name -> document; the first one is verified, the others are compared.
        spec: steps, warm-up and backend of every run.
        seeds: paired seeds.
        first_seed: the first of them; 0 is the script's own.
        timed: whether step times mean anything for the policy's target.
        max_divergence: the acceptable mean divergence, as a fraction.
        max_gradient_error: the acceptable gradient error, in units of the mini-batch gradient noise.
        tell: receives one line per finished seed.

    Raises:
        NothingAcceptableError: the reference could not be run under any seed.
        PolicyMismatchError, UnsupportedError: the policy cannot be applied to this script's model.
    """
    runs = _Runs(pool, policies, spec, max_divergence, duels=timed)
    for seed in range(first_seed, last := first_seed + seeds):
        if seed + 1 < last:
            pool.prepare(seed + 1)
        tell(f"seed {seed}: {runs.measure(seed)}")
        if seed:
            pool.release(seed)
    if not runs.references:
        failed = runs.failed
        short = failed is not None and failed.status == "too_short"
        raise NothingAcceptableError(
            f"the reference could not be run: {failed.reason if failed else 'no seed was asked for'}",
            fix=fewer_steps(len(failed.losses), spec.warmup)
            if failed and short
            else "make the script train as it is first",
        )
    noise = statistics.geometric_mean(runs.noises) if runs.noises else None
    why = uninformative(max_divergence, runs.baseline)
    limit = gradient_limit(noise, max_gradient_error, uninformative=why is not None)
    rules = Rules(max_divergence, runs.baseline, max_gradient=limit, gradient_noise=noise)
    rows = [judge(rules, name, own) for name, own in runs.by_policy.items()]
    verdict, reason = decide(rows, rules, timed=timed, reference_memory=runs.references[0].memory_bytes)
    return Verification(
        verdict=verdict,
        why=reason,
        rows=tuple(rows),
        seeds=seeds,
        steps=spec.steps,
        noise_floor=runs.baseline.floor,
        timed=timed,
        first_seed=first_seed,
        reference={"step_time_ms": statistics.median(one.step_ms for one in runs.references)},
        limits={"divergence": max_divergence, "gradient_error": limit, "gradient_noise": noise},
    )


class _Runs:
    """The paired runs of one verification.

    Attributes:
        by_policy: its run under every usable seed, by name.
        references: runs of the script as written, two per seed.
        failed: the last reference that failed.
        noises: the mini-batch gradient noise under every seed.
    """

    def __init__(
        self, pool: HostPool, policies: dict[str, dict[str, Any]], spec: TrialSpec, budget: float, *, duels: bool
    ) -> None:
        self._duels = duels
        self._pool, self._policies, self._spec, self._budget = pool, policies, spec, budget
        self.by_policy: dict[str, list[Run]] = {name: [] for name in policies}
        self.references: list[Reference] = []
        self._own, self._further = Baseline(), list[tuple[float, float]]()
        self.failed: TrialResult | None = None
        self.noises: list[float] = []

    @property
    def baseline(self) -> Baseline:
        """What is known of the script itself."""
        return self._own.over_seeds(self._further)

    def measure(self, seed: int) -> str:
        """Run everything under one seed; return what to tell of it."""
        first = self._run(None, seed)
        if not first.ok:
            self.failed = first
            return f"the reference failed: {first.status}: {first.reason}"
        names, results = list(self._policies), {}
        shift = len(self.references) // 2 % len(names)
        for name in (*names[shift:], *names[:shift]):
            results[name] = self._run(self._policies[name], seed)
            if name == names[0]:
                _check_fit(results[name])
        # a second reference after the candidates: a machine that drifted is seen, and both readings count
        second = self._run(None, seed)
        again = second if second.ok else first
        self._perturb(seed, first, again)
        if self._duels and not self.references and not self._pool.info(seed).compiled:
            self._duel(seed, _reference(first).step_ms)
        self.references += [_reference(result) for result in (first, second) if result.ok]
        errors = self._gradient_errors(seed)
        for name, result in results.items():
            plan = Run(0, "finalist", name, {}, self._policies[name], "ok", seed=seed)
            run = score(plan, result, _reference(first), estimate=None, error=math.nan)
            self.by_policy[name].append(run.with_metrics(metrics_of({"gradient_error": errors.get(name, math.nan)})))
        return f"{', '.join(names)} measured"

    def _perturb(self, seed: int, reference: TrialResult, again: TrialResult) -> None:
        """Learn the script's own noise under the first seed; under the others, too, where it is beyond the budget."""

        def run(label: str) -> TrialResult:
            result = self._run(None, seed, perturb=label)
            if not result.ok:
                raise NothingAcceptableError(
                    f"the reference with its weights rounded to bf16 failed: {result.status}: {result.reason}",
                    fix="nothing can be compared with a script whose noise is unknown; run with -v",
                )
            return result

        if not self.references:
            self._own = baseline_of(reference, again, perturbed_runs(run, reference, self._budget))
        elif self._own.reach > self._budget:
            losses = run("bf16").losses
            self._further.append((divergence(losses, reference.losses), signed_gap(losses, reference.losses)))

    def _gradient_errors(self, seed: int) -> dict[str, float]:
        """Compare the gradients of all policies on one state and batch, the one that a search would take."""
        probes = [Probe(name, policy | {"execution": "keep"}) for name, policy in self._policies.items()]
        warmup = scan_warmup(self._spec.steps)
        scan = replace(
            self._spec, kind="sensitivity", warmup=warmup, steps=1, probes=tuple(probes), batches=2, anneal=False
        )
        result = self._pool.run(scan, seed)
        if not result.ok:
            return {}
        if noise := result.payload.get("gradient_noise"):
            self.noises.append(float(noise))
        return errors_of(result.payload)

    def _duel(self, seed: int, reference_ms: float) -> None:
        """Time the policies beside the reference in one process, as a search does with what its answer rests on.

        Not where the script compiles its model: each of them would compile it once more.
        """
        exchanged = {name: policy for name, policy in self._policies.items() if can_be_exchanged(policy)}
        spec, within = replace(self._spec, policy=None), usual_seconds(len(exchanged))
        rounds, _ = timed_together(lambda asked: self._pool.run(asked, seed), spec, exchanged, within)
        for name, policy in exchanged.items():
            if len(times := times_of(rounds, name)) >= FEWEST:
                self.by_policy[name].append(duel_run(name, policy, times, reference_ms))

    def _run(self, policy: dict[str, Any] | None, seed: int, perturb: str = "") -> TrialResult:
        return self._pool.run(replace(self._spec, policy=policy, perturb=perturb), seed)


def _reference(result: TrialResult) -> Reference:
    return Reference(result.losses, step_time(result.step_ms, result.warmup), result.memory_bytes, result.samples)


def judge(rules: Rules, name: str, runs: Sequence[Run]) -> Contender:
    """Return a policy with what the rules of a search say of its runs, one per paired seed."""
    errors, limit = [max(error, TINY) for error in _errors(runs)], rules.gradient_limit
    error = statistics.geometric_mean(errors) if errors else None
    found = rules.judge(Standing.of(name, runs, error))
    wrong = bool(errors) and limit is not None and error_over_limit([one / limit for one in errors])[1] > 1.0
    unsure = _is_unsure(found, rules, failed=not all(run.ok for run in runs), known=bool(errors))
    if unsure and wrong:  # of two reasons the sure one
        unsure = False
        why = Reason("gradient_error", {"error": error, "limit": limit, "noise": rules.gradient_noise})
        found = replace(found, rejection=why)
    return Contender(tuple(runs), found, unsure)


def _errors(runs: Sequence[Run]) -> tuple[float, ...]:
    """Return the gradient errors of the seeds under which they could be measured."""
    return tuple(error for run in runs if (error := run.get("gradient_error")) is not None and math.isfinite(error))


def _is_unsure(one: Standing, rules: Rules, *, failed: bool, known: bool) -> bool:
    """Whether further seeds may take a rejection back, unless the gradient error is beyond its limit for sure."""
    if not one.rejection or failed or (one.final and not known):
        return False
    if rules.baseline.reach > rules.max_divergence:  # what the loss says there is said for sure
        return not one.by_loss
    # the bound lies as far below the mean as the upper one above it, in the logarithm
    return one.upper is not None and one.mean * one.mean / one.upper <= rules.max_divergence


def decide(rows: Sequence[Contender], rules: Rules, *, timed: bool, reference_memory: float) -> tuple[str, Reason]:
    """Return (verdict, reason) for the first of the judged rows, beside the others."""
    policy, one = rows[0], rows[0].standing
    if policy.failures:
        return "fails", Reason("failed", {"runs": len(policy.failures), "first": policy.failures[0]})
    if one.rejection is not None:
        if not policy.unsure:
            return "fails", one.rejection
        return "undecided", Reason("too_few_seeds", {"why": one.rejection})
    held = {"divergence": one.mean, "limit": rules.max_divergence, "caveat": one.caveat}
    if not timed:
        return "holds", Reason("holds", held)
    smaller = 0 < one.memory_bytes < SMALLER * reference_memory  # what some policies are for
    if one.speedup < 1 / FASTER and policy.range[1] < 1.0 and not smaller:
        return "fails", Reason("slower_than_script", {"speedup": one.speedup})
    for row in rows[1:]:
        ahead = row.standing.rejection is None and row.standing.speedup > one.speedup * FASTER
        if ahead and row.range[0] > policy.range[1]:  # not by chance
            faster = {"name": row.name, "speedup": row.standing.speedup, "own": one.speedup}
            return "fails", Reason("preset_faster", faster)
    return "holds", Reason("holds", held | {"speedup": one.speedup})
