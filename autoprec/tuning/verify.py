"""Longer paired runs of a policy beside the reference and the presets it must beat.

Whether the policy is acceptable is judged by the rules of a search (:class:`autoprec.tuning.decide.decision.Rules`), so
that the answer of a search and its verification differ in what was measured only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from autoprec.trial.protocol import Probe, TrialResult, TrialSpec
from autoprec.tuning.decide.decision import Rules, Standing, gradient_limit
from autoprec.tuning.decide.metrics import divergence, signed_gap, step_time
from autoprec.tuning.decide.noise import Baseline, error_over_limit, uninformative
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.options import SearchOptions, fewer_steps
from autoprec.tuning.paired import baseline_of, perturbed_runs
from autoprec.tuning.phases.record import record_step
from autoprec.tuning.phases.sensitivity import scan_warmup
from autoprec.tuning.setup import Setup
from autoprec.tuning.study.run import error_text
from autoprec.tuning.workers.local import HostPool

#: What is told apart from timing noise, as a factor of speed, and what counts as saving memory.
FASTER, SMALLER = 1.05, 0.98
#: Where the limits of a policy's search are not known.
_USUAL = SearchOptions(command=("train.py",))
#: A gradient error below this is none.
TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Contender:
    """One policy over all paired seeds; ratios, divergences and errors are fractions, memory is in bytes.

    ``excess`` are the divergences with their sign (positive: a worse loss); ``rejection`` says why the policy is not
    acceptable, ``caveat`` what judged it where the loss could not (:mod:`autoprec.tuning.decide.decision`), ``unsure``
    that its seeds cannot tell whether the rejection is right. ``gradient_error`` is relative to the gradient, the
    geometric mean of ``gradient_errors``, one per seed in which it could be measured.
    """

    name: str
    speedups: tuple[float, ...]
    divergences: tuple[float, ...]
    memory_bytes: int
    step_time_ms: float
    failures: tuple[str, ...] = ()
    excess: tuple[float, ...] = ()
    gradient_error: float | None = None
    rejection: str = ""
    caveat: str = ""
    gradient_errors: tuple[float, ...] = ()
    unsure: bool = False

    @property
    def speedup(self) -> float:
        """Median speed-up over the reference of the same seed."""
        return statistics.median(self.speedups) if self.speedups else 0.0

    @property
    def divergence(self) -> float:
        return statistics.fmean(self.divergences) if self.divergences else float("inf")

    def to_json(self) -> dict[str, Any]:
        out = asdict(self) | {"speedup": self.speedup}
        return out | {"divergence": self.divergence if self.divergences else None}


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome: the policy first, then what it was compared with.

    ``verdict`` is ``holds`` (``ok``), ``fails``, or ``undecided`` where the seeds cannot tell. ``timed`` is False where
    speed says nothing about the policy's target, see :func:`is_timed`.
    ``first_seed`` is 0 where the script's own seed was run. ``limits`` are ``divergence``,
    ``gradient_error`` and ``gradient_noise``, the last two relative to the gradient, None where they are unknown.
    """

    verdict: str
    reason: str
    rows: tuple[Contender, ...]
    seeds: int
    steps: int
    noise_floor: float
    timed: bool
    first_seed: int = 0
    reference: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float | None] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.verdict == "holds"

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok} | asdict(self) | {"rows": [row.to_json() for row in self.rows]}


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
        known = searched.get(f"all {name}")
        if recipe.scaled:
            out[f"all {name}"] = known.to_dict() if known else uniform(name, recipe, policy.activations)
            out[f"all {name}"] |= run_by  # else a preset would lose to a faster backend, not to a better policy
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
    runs = _Runs(pool, policies, spec, max_divergence)
    for seed in range(first_seed, last := first_seed + seeds):
        if seed + 1 < last:
            pool.prepare(seed + 1)
        tell(f"seed {seed}: {runs.measure(seed)}")
        if seed:
            pool.release(seed)
    if not runs.reference_ms:
        failed = runs.failed
        short = failed is not None and failed.status == "too_short"
        raise NothingAcceptableError(
            f"the reference could not be run: {failed.reason if failed else 'no seed was asked for'}",
            fix=fewer_steps(len(failed.losses), spec.warmup)
            if failed and short
            else "make the script train as it is first",
        )
    rows = [_contender(name, pairs, runs.errors[name]) for name, pairs in runs.pairs.items()]
    noise = statistics.geometric_mean(runs.noises) if runs.noises else None
    why = uninformative(max_divergence, runs.baseline)
    limit = gradient_limit(noise, max_gradient_error, uninformative=why is not None)
    rows = _judged(rows, runs.baseline, max_divergence, limit, noise)
    verdict, reason = _verdict(rows, max_divergence, timed, runs.reference_memory)
    return Verification(
        verdict=verdict,
        reason=reason,
        rows=tuple(rows),
        seeds=seeds,
        steps=spec.steps,
        noise_floor=runs.baseline.floor,
        timed=timed,
        first_seed=first_seed,
        reference={"step_time_ms": statistics.median(runs.reference_ms)},
        limits={"divergence": max_divergence, "gradient_error": limit, "gradient_noise": noise},
    )


class _Runs:
    """The paired runs of one verification.

    Attributes:
        pairs: by policy, its run and the reference's of every usable seed.
        reference_ms: step times of the reference, two per seed.
        reference_memory: bytes of the first reference.
        baseline: what is known of the script itself.
        failed: the last reference that failed.
        errors: by policy, its relative gradient error under every seed where it could be measured.
        noises: the mini-batch gradient noise under every seed.
    """

    def __init__(self, pool: HostPool, policies: dict[str, dict[str, Any]], spec: TrialSpec, budget: float) -> None:
        self._pool, self._policies, self._spec, self._budget = pool, policies, spec, budget
        self.pairs: dict[str, list[tuple[TrialResult, TrialResult]]] = {name: [] for name in policies}
        self.reference_ms: list[float] = []
        self.reference_memory = 0
        self.baseline = Baseline()
        self.failed: TrialResult | None = None
        self.errors: dict[str, list[float]] = {name: [] for name in policies}
        self.noises: list[float] = []
        self._known = False

    def measure(self, seed: int) -> str:
        """Run everything under one seed; return what to tell of it."""
        reference = self._run(None, seed)
        if not reference.ok:
            self.failed = reference
            return f"the reference failed: {reference.status}: {reference.reason}"
        self.reference_memory = self.reference_memory or reference.memory_bytes
        order = list(self._policies)
        shift = len(self.pairs[order[0]]) % len(order)
        for name in (*order[shift:], *order[:shift]):
            run = self._run(self._policies[name], seed)
            if name == order[0]:
                _check_fit(run)
            self.pairs[name].append((run, reference))
        # a second reference after the candidates: a machine that drifted is seen, and both readings count
        again = self._run(None, seed)
        self.reference_ms += [step_time(r.step_ms, r.warmup) for r in (reference, again) if r.ok]
        self._perturb(seed, reference, again if again.ok else reference)
        self._gradient_errors(seed)
        return f"{', '.join(order)} measured"

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

        if not self._known:
            self.baseline = baseline_of(reference, again, perturbed_runs(run, reference, self._budget))
            self._known = True
        elif self.baseline.reach > self._budget:
            perturbed = run("bf16").losses
            own = self.baseline
            self.baseline = replace(
                own,
                benign=(*own.benign, divergence(perturbed, reference.losses)),
                benign_excess=(*own.benign_excess, signed_gap(perturbed, reference.losses)),
            )

    def _gradient_errors(self, seed: int) -> None:
        """Compare the gradients of all policies on one state and batch, the one that a search would take."""
        probes = [Probe(name, policy | {"execution": "keep"}) for name, policy in self._policies.items()]
        warmup = scan_warmup(self._spec.steps)
        scan = replace(
            self._spec, kind="sensitivity", warmup=warmup, steps=1, probes=tuple(probes), batches=2, anneal=False
        )
        result = self._pool.run(scan, seed)
        if not result.ok:
            return
        for row in result.payload["probes"]:
            if row.get("gradient_error") is not None and not row.get("nonfinite"):
                self.errors[str(row["id"])].append(float(row["gradient_error"]))
        if noise := result.payload.get("gradient_noise"):
            self.noises.append(float(noise))

    def _run(self, policy: dict[str, Any] | None, seed: int, perturb: str = "") -> TrialResult:
        return self._pool.run(replace(self._spec, policy=policy, perturb=perturb), seed)


def _contender(name: str, pairs: Sequence[tuple[TrialResult, TrialResult]], errors: Sequence[float]) -> Contender:
    good = [(run, reference) for run, reference in pairs if run.ok]
    times = [step_time(run.step_ms, run.warmup) for run, _ in good]
    return Contender(
        name=name,
        speedups=tuple(step_time(ref.step_ms, ref.warmup) / t for t, (_, ref) in zip(times, good, strict=True)),
        divergences=tuple(divergence(run.losses, ref.losses) for run, ref in good),
        memory_bytes=good[0][0].memory_bytes if good else 0,
        step_time_ms=statistics.median(times) if times else 0.0,
        failures=tuple(f"{run.status}: {run.reason}" for run, _ in pairs if not run.ok),
        excess=tuple(signed_gap(run.losses, ref.losses) for run, ref in good),
        gradient_error=statistics.geometric_mean(max(error, TINY) for error in errors) if errors else None,
        gradient_errors=tuple(errors),
    )


def _judged(
    rows: Sequence[Contender], baseline: Baseline, max_divergence: float, limit: float | None, noise: float | None
) -> list[Contender]:
    candidates = [
        Standing(
            row.name,
            row.speedup,
            (math.inf,) if row.failures else row.divergences,
            excess=row.excess,
            gradient_error=row.gradient_error,
        )
        for row in rows
    ]
    rules = Rules(max_divergence, baseline, max_gradient=limit, gradient_noise=noise)
    judged = [rules.judge(c) for c in candidates]
    chaotic = baseline.reach > max_divergence
    out = []
    for row, found in zip(rows, judged, strict=True):
        shares = [max(error, TINY) / limit for error in row.gradient_errors] if limit else []
        wrong = bool(shares) and error_over_limit(shares)[1] > 1.0
        unsure, why = _is_unsure(row, found, max_divergence, chaotic=chaotic), found.rejection
        if unsure and wrong and row.gradient_error is not None and limit is not None:  # of two reasons the sure one
            unsure = False
            why = Reason("gradient_error", {"error": row.gradient_error, "limit": limit, "noise": noise})
        out.append(replace(row, rejection=str(why or ""), caveat=str(found.caveat or ""), unsure=unsure))
    return out


def _is_unsure(row: Contender, judged: Standing, budget: float, *, chaotic: bool) -> bool:
    """Whether further seeds may take a rejection back, unless the gradient error is beyond its limit for sure."""
    if not judged.rejection or row.failures or (judged.final and not row.gradient_errors):
        return False
    if chaotic:  # what the loss says there is said for sure
        return not judged.by_loss
    # the bound lies as far below the mean as the upper one above it, in the logarithm
    return judged.upper is not None and judged.mean * judged.mean / judged.upper <= budget


def _verdict(rows: Sequence[Contender], max_divergence: float, timed: bool, reference_memory: int) -> tuple[str, str]:
    """Return (verdict, reason) for the first of the judged rows."""
    policy, others = rows[0], rows[1:]
    if policy.failures:
        return "fails", f"the policy failed in {len(policy.failures)} runs, first: {policy.failures[0]}"
    if policy.rejection:
        if not policy.unsure:
            return "fails", policy.rejection
        return "undecided", f"{policy.rejection}; so few seeds cannot tell that from chance: more --seeds can"
    held = f"divergence {policy.divergence:.3%}"
    within = f"; {policy.caveat}" if policy.caveat else f" within {max_divergence:.3%}"
    if not timed:
        return "holds", f"{held}{within}; speed not judged: this is not the policy's target"
    smaller = 0 < policy.memory_bytes < SMALLER * reference_memory  # what some policies are for
    if policy.speedup < 1 / FASTER and max(policy.speedups) < 1.0 and not smaller:
        return "fails", f"it is slower than the script as written: {policy.speedup:.2f}x, and saves no memory"
    faster = [
        row
        for row in others
        if row.divergences
        and not row.rejection
        and row.speedup > policy.speedup * FASTER
        and min(row.speedups) > max(policy.speedups)  # a policy that is that preset must not lose to it by chance
    ]
    if faster:
        return "fails", f"preset '{faster[0].name}' is faster ({faster[0].speedup:.2f}x against {policy.speedup:.2f}x)"
    return "holds", f"{policy.speedup:.2f}x at {held}{within}"
