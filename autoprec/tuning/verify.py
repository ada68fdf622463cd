"""Longer paired runs of a policy beside the reference and the presets it must beat.

Policies are run under paired seeds, each beside that seed's reference, by what runs the finalists of a search
(:class:`~autoprec.tuning.phases.measuring.PairedSeeds`, :class:`~autoprec.tuning.phases.duels.Duels`), and judged by
the rules of a search (:class:`~autoprec.tuning.decide.decision.Rules`): only which policies and seeds differs.
"""

from __future__ import annotations

import math
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
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
from autoprec.support.plain import Document
from autoprec.support.units import counted, gap_text
from autoprec.trial.losses import MISMATCH
from autoprec.trial.protocol import TrainSpec, TrialResult
from autoprec.tuning.decide.decision import Rules, Standing
from autoprec.tuning.decide.noise import error_over_limit
from autoprec.tuning.decide.presets import presets, widest
from autoprec.tuning.decide.sampler.expectation import FEWEST_SEEDS
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import MAX_CHANGE, SearchOptions
from autoprec.tuning.paired import PairedRunner
from autoprec.tuning.phases.duels import Duels
from autoprec.tuning.phases.measuring import PairedSeeds
from autoprec.tuning.phases.record import record_step, tunable
from autoprec.tuning.phases.reference import measure_reference
from autoprec.tuning.phases.sensitivity import errors_of, probe_policies
from autoprec.tuning.setup import Setup
from autoprec.tuning.state import SearchState, rules_of
from autoprec.tuning.study.run import DUEL, Run, error_text, metrics_of
from autoprec.tuning.study.study import StudyStore, default_storage
from autoprec.tuning.workers.local import HostPool

#: What is told apart from timing noise, as a factor of speed, and what counts as saving memory.
FASTER, SMALLER = 1.05, 0.98
#: Where the limits of a policy's search are not known.
_USUAL = SearchOptions(command=("train.py",))
#: A gradient error below this is none.
TINY = 1e-9
#: A target that stands for a GPU of which nothing is known: presets have to be of some space.
_ANY_GPU = "h100"


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
        """Name of the policy."""
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
        """Lowest and highest speed-up: the 95 % interval of its duel, else those of all its seeds."""
        low, high = self.standing.low, self.standing.high
        if low is None or high is None:
            return min(self.speedups, default=0.0), max(self.speedups, default=0.0)
        return low, high

    @property
    def divergence(self) -> float:
        """Mean divergence of the runs that were measured; infinity where none was."""
        return statistics.fmean(run["divergence"] for run in self.measured) if self.measured else math.inf

    def to_json(self) -> Document:
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
    False where speed says nothing about the policy's target (:func:`is_timed`). ``first_seed`` is 0 where the script's
    own was run. ``limits`` are ``divergence`` (of ``metric``, or, empty, of the losses), ``gradient_error`` and
    ``gradient_noise``, the last two relative to the gradient, None where they are unknown.
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
    metric: str = ""

    def to_json(self) -> Document:
        """Return every field, the reason as text and as a code with its data."""
        out = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "why"}
        words = {"reason": str(self.why), "reasons": [self.why.to_json()]}
        return {"ok": self.verdict == "holds"} | out | words | {"rows": [row.to_json() for row in self.rows]}


def limits_of(
    policy: Policy, max_divergence: float | None, max_gradient_error: float | None, max_change: float | None = None
) -> Document:
    """Return the limits that hold for a policy: those asked for, else those of its search, else the usual ones.

    Args:
        policy: its evidence may hold them. One compared by a metric is so again, unless a limit of its loss is asked.
        max_divergence, max_gradient_error, max_change: asked for: fractions, the second of the gradient noise, the
            third of its metric; None for nothing.

    Raises:
        UsageError: one that was asked for is not above 0.
    """
    metric = policy.evidence.get("metric") if max_divergence is None else None
    by_metric = metric or max_change is not None
    given = {"max_change": max_change} if by_metric else {"max_divergence": max_divergence}
    if metric in MISMATCH:  # which has the loss beside it
        given["max_divergence"] = None
    limits: Document = {"metric": metric, "better": policy.evidence.get("better")} if metric else {}
    for name, asked in (given | {"max_gradient_error": max_gradient_error}).items():
        found, usual = policy.evidence.get(name), MAX_CHANGE if name == "max_change" else getattr(_USUAL, name)
        if asked is not None and not asked > 0:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} {asked:g} is not above 0", fix="leave it out to take the limit of the search")
        limits[name] = asked or (found if isinstance(found, float) and found > 0 else usual)
    return limits


def searched(policy: Policy, model: Document | None = None) -> str:
    """Return what a policy's search found of its losses and gradients, in words; empty where it was not searched.

    Args:
        model: the script's model; figures of another model are left out.
    """
    if model and _is_another(policy, model):
        return ""
    found = policy.evidence
    if not all(isinstance(found.get(name), (int, float)) for name in ("divergence", "seeds", "steps")):
        return ""
    text = gap_text(found["divergence"], found.get("metric") or "")
    if isinstance(error := found.get("gradient_error"), float):
        text += f", gradient error {error_text(error, found.get('gradient_noise'))}"
    return f"{text}, over {counted(found['seeds'], 'paired seed')} of {found['steps']} steps"


def first_fresh_seed(policy: Policy) -> int:
    """Return the first paired seed under which a policy's search did not run it; 0 where it was not searched."""
    known = policy.evidence.get("seeds")
    return max(0, known) if isinstance(known, int) else 0


def refuse_another_model(policy: Policy, pool: HostPool, backend: str) -> None:
    """Try one step under a policy that was found on another model: what does not fit is refused before all runs.

    Args:
        policy: the policy to verify.
        pool: hosts.
        backend: who multiplies.

    Raises:
        PolicyMismatchError, UnsupportedError: it cannot be applied here.
    """
    if _is_another(policy, pool.info().model):
        _check_fit(pool.host().run(TrainSpec(policy=policy.to_dict(), steps=1, warmup=0, backend=backend)))


def _is_another(policy: Policy, model: Document) -> bool:
    made_for = policy.to_dict().get("model")
    return made_for is not None and any(made_for[key] != model.get(key) for key in ("class", "parameters"))


def _check_fit(one: TrialResult | Run) -> None:
    kind = {"mismatch": PolicyMismatchError, "unsupported": UnsupportedError}.get(one.status)
    if kind is not None:
        what, _, fix = one.reason.partition(FIX)
        raise kind(f"the policy does not fit this script: {what}", fix=fix)


def setup_of(policy: Policy, pool: HostPool, options: SearchOptions) -> Setup:
    """Return the setup of a search for the policy's target in which everything is measured on this device.

    Args:
        policy: the policy to verify.
        pool: hosts.
        options: the script's command and the limits.

    Raises:
        ScriptError: the script's training step could not be recorded.
        NothingAcceptableError: it has nothing that can be tuned.
        AutoPrecError: it is neither on a device, nor for one, that is known.
    """
    script = shlex.join(options.command)
    graph, asked = tunable(record_step(pool.host().run, script), script), policy.evidence.get("target", options.target)
    for target in (str(asked), options.target, _ANY_GPU):
        try:
            return replace(Setup.of(replace(options, target=target), pool.info(), graph), measured=True)
        except AutoPrecError as error:  # a target that is described elsewhere, or another device than this one
            failed = error
    raise failed


def is_timed(policy: Policy, device: str) -> bool:
    """Say whether step times on a device tell anything of a policy: not if it is emulated there, or for a GPU."""
    emulated = any(recipe.scaled and recipe.format != "int8" for recipe in policy.recipes.values())  # CPUs multiply it
    return device != "cpu" or (not emulated and policy.evidence.get("target", "cpu") in ("cpu", "auto"))


def contenders(
    policy: Policy, setup: Setup | None = None, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Document]:
    """Return the policy and the uniform presets people would run instead, by name; one that it is itself is left out.

    A preset of a search's name is that search's policy: layers that the target cannot run under the recipe (a head of
    8 outputs in FP8) keep the baseline.

    Args:
        setup: of a search on this script for the policy's target; without it presets take every layer.
        tell: receives a line for each preset that is left out.
    """

    def uniform(name: str, recipe: Recipe, activations: str) -> Document:
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


def _what_runs(document: Document) -> tuple[Any, ...]:
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
    setup: Setup,
    policies: dict[str, Document],
    folder: Path,
    *,
    first_seed: int = 0,
    timed: bool,
    tell: Callable[[str], None],
) -> Verification:
    """Run reference and policies side by side under paired seeds, as a search runs its finalists.

    Seeds go where they may change the verdict (:func:`may_decide`): all policies run under the first one and are timed
    in duels, further seeds are the policy's and those of presets that are ahead of it.

    Args:
        pool: hosts, numbered from 0 for the first seed.
        policies: name -> document; the first one is verified, the others are compared.
        folder: for what the runs leave behind.
        first_seed: which of the script's paired seeds the first one is; 0 is the script's own.
        timed: whether step times mean anything for the policy's target.
        tell: receives one line per finished seed.

    Raises:
        ScriptError, NothingAcceptableError: the reference could not be run under the first seed.
        PolicyMismatchError, UnsupportedError: the policy cannot be applied to this script's model.
    """
    options = setup.options
    runs: dict[str, list[Run]] = {name: [] for name in policies}
    noises: list[float] = []
    with closing(StudyStore(default_storage(folder), "verify", ("step_time_ms",), resume=False)) as store:
        state = SearchState(store, Listeners(), options, time.monotonic())
        runner = PairedRunner(setup, pool, state, may_compile_blocks=False)
        measure_reference(setup, runner, state)
        paired = PairedSeeds(setup, runner, state)
        duels, rows = Duels(setup, runner, state), list[Contender]()
        for seed in range(options.seeds):
            names = may_decide(rows, timed=timed) if seed else list(policies)
            if not names:
                break
            if seed + 1 < options.seeds:
                pool.prepare(seed + 1)
            asked = {name: policies[name] for name in names}
            measured = _under_seed(paired, asked, seed)
            errors, seen = _gradient_errors(setup, runner, state, asked, seed) if measured else ({}, [])
            noises += seen
            for name, run in measured.items():
                runs[name].append(run.with_metrics(metrics_of({"gradient_error": errors.get(name, math.nan)})))
            why = paired.unusable.get(seed)
            tell(f"seed {first_seed + seed}: {why or ', '.join(asked) + ' measured'}")
            if seed:
                pool.release(seed)
            while not seed and timed and duels.time([own[0] for own in runs.values() if own]):
                pass  # some at a time
            noise = statistics.geometric_mean(noises) if noises else None  # as the seeds so far showed it
            rules, timings = rules_of(options, paired.baseline, noise), duels.known()
            rows = [judge(rules, name, [*own, *filter(None, [timings.get(name)])]) for name, own in runs.items()]
    verdict, reason = decide(rows, rules, timed=timed, reference_memory=state.reference.memory_bytes)
    return Verification(
        verdict=verdict,
        why=reason,
        rows=tuple(rows),
        seeds=len(rows[0].standing.divergences),
        steps=options.steps,
        noise_floor=paired.baseline.floor,
        timed=timed,
        first_seed=first_seed,
        reference={"step_time_ms": statistics.median(one.step_ms for one in paired.references.values())},
        limits={
            "divergence": options.tolerance,
            "gradient_error": rules.max_gradient,
            "gradient_noise": rules.gradient_noise,
        },
        metric=options.metric,
    )


def may_decide(rows: Sequence[Contender], *, timed: bool) -> list[str]:
    """Return the names of those whose next paired seed may change the verdict, the first of ``rows`` being verified.

    That is the policy, until it has surely failed, and every preset that seems to be ahead of it by more than timing
    noise: whether that is acceptable decides. Of the others the speed is enough.
    """
    policy = rows[0]
    lost = policy.failures or (policy.standing.rejection and not policy.unsure)
    if lost and len(policy.standing.divergences) >= FEWEST_SEEDS:
        return []
    ahead = policy.standing.speedup * FASTER
    return [policy.name, *(row.name for row in rows[1:] if timed and row.standing.speedup > ahead)]


def _under_seed(paired: PairedSeeds, policies: Mapping[str, Document], seed: int) -> dict[str, Run]:
    """Run every policy under a seed, beginning with another one each time; nothing where its reference fails."""
    names, found = list(policies), {}
    shift = seed % len(names)
    for name in (*names[shift:], *names[:shift]):
        run = paired.measure(Run(0, "finalist", name, {}, policies[name], "", seed=seed), math.nan, by_block=False)
        if run is None:
            return {}
        if name == names[0]:
            _check_fit(run)
        found[name] = run
    return found


def _gradient_errors(
    setup: Setup, runner: PairedRunner, state: SearchState, policies: Mapping[str, Document], seed: int
) -> tuple[dict[str, float], list[float]]:
    """Return the gradient errors of policies under a seed, and the gradient's noise, as far as they can be measured."""
    try:
        scan = probe_policies(setup, runner, state, policies, seed)
    except NothingAcceptableError:
        return {}, []
    return errors_of(scan), [scan.gradient_noise] if scan.gradient_noise else []


def judge(rules: Rules, name: str, runs: Sequence[Run]) -> Contender:
    """Return a policy with what the rules of a search say of its runs, one per paired seed.

    Args:
        rules: the rules of a search.
        name: the policy's name.
        runs: one per paired seed, and its duel, if any.
    """
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
    if rules.loss is not None and one.loss is not None and one.rejection is one.loss.rejection:
        return _is_unsure(one.loss, rules.loss, failed=failed, known=known)
    if rules.baseline.noise_floor_upper > rules.max_divergence:  # what the loss says there is said for sure
        return not one.by_loss
    # the bound lies as far below the mean as the upper one above it, in the logarithm
    return one.upper is not None and one.mean * one.mean / one.upper <= rules.max_divergence


def decide(rows: Sequence[Contender], rules: Rules, *, timed: bool, reference_memory: float) -> tuple[str, Reason]:
    """Return (verdict, reason) for the first of the judged rows, beside the others.

    Args:
        rows: the policy that is verified, and what it is compared with.
        rules: the rules of a search.
        timed: whether step times mean anything.
        reference_memory: bytes of a step of the script as written.
    """
    policy, one = rows[0], rows[0].standing
    if policy.failures:
        return "fails", Reason("failed", {"runs": len(policy.failures), "first": policy.failures[0]})
    if one.rejection is not None:
        if not policy.unsure:
            return "fails", one.rejection
        return "undecided", Reason("too_few_seeds", {"why": one.rejection})
    held = {"divergence": one.mean, "limit": rules.max_divergence, "caveat": one.caveat} | rules.baseline.named
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
