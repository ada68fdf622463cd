"""The reference of each paired seed: the run everything is compared with, and the noise floor around it."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace

from autoprec.errors import NothingAcceptableError, ScriptError, UnknownNameError, UsageError
from autoprec.trial.losses import MISMATCH
from autoprec.trial.protocol import OUT_OF_TIME, STILL, HostInfo, TrialResult
from autoprec.tuning.decide.metrics import Reference, divergence, run_metrics, step_time, with_curves
from autoprec.tuning.decide.noise import tells_training, uninformative
from autoprec.tuning.options import SearchOptions, fewer_steps
from autoprec.tuning.paired import NOT_STARTED, OVERRUN, PairedRunner, baseline_of, other_work, perturbed_runs
from autoprec.tuning.phases.duels import usual_search_s
from autoprec.tuning.schedule import REFERENCE_RUNS, Pace, Schedule, describe, schedule
from autoprec.tuning.setup import Setup
from autoprec.tuning.state import SearchState, compared
from autoprec.tuning.study.run import MODELLED, Metric, Run, reference_name

#: Name of the benign perturbation in a study.
ROUNDED = "weights rounded once to bf16"
#: Policies that are measured whatever the budget says, each under two seeds.
FEWEST_RUNS = 2


def measure_reference(setup: Setup, runner: PairedRunner, state: SearchState, *, flat_because: str = "") -> Reference:
    """Run the reference twice and at least once benignly perturbed; it becomes seed 0's reference.

    The second run shows whether the script is deterministic; the perturbation (every weight rounded once to
    bfloat16) shows how large a loss gap means nothing. Where that comes near the budget, more perturbations (rounded up
    or down at random) tell it better. Where the order of its losses does not show that the script trains, one run more
    does, which does not train.

    A script that compiles its model is run once as it is, and then by block where that pays.

    Args:
        setup: what is searched.
        runner: runs trials beside the reference.
        state: what the search has learnt so far.
        flat_because: why its loss may not fall, as the recorded step shows; empty where that shows nothing.

    Raises:
        ScriptError: the reference itself fails in the script's own code.
        NothingAcceptableError: the script has fewer steps than asked for, or its loss is not finite.
    """
    began = runner.clock()
    whole = _run(setup, runner) if setup.host.compiled else None
    blocks = _by_block(setup, runner, whole) if whole is not None else None
    # the first run alone shows whether there are enough steps, and time for more of them
    first = blocks or whole or _run(setup, runner)
    state.seconds.reference_run_s = runner.clock() - began
    # steps that are timed have the machine to themselves; where times are modelled runs share it
    with runner.threads(runner.final_workers, "reference") as threads:
        again, rounded = (threads.submit(_run, setup, runner, label) for label in ("", "bf16"))
        second, known = again.result(), {"bf16": rounded.result()}
    budget = setup.options.tolerance
    noisy = perturbed_runs(lambda label: known.get(label) or _run(setup, runner, label), first, budget)
    baseline = replace(baseline_of(first, second, noisy), flat_because=flat_because)
    if not baseline.learnt and uninformative(budget, replace(baseline, learnt=True)) is None:
        still = runner.measure(runner.train_spec(setup.reference_policy(), perturb=STILL))
        moves = still.ok and tells_training(divergence(still.curve, first.curve), budget)
        baseline = replace(baseline, learnt=moves)
    deterministic = first.curve == second.curve
    if not deterministic:
        own = divergence(second.curve, first.curve)
        state.note(
            f"two trials of the unchanged script differ by {own:.3%}, which is part of the noise floor "
            "(whether it does so without AutoPrec, too, was not tried)"
        )
    reference = reference_of(setup, first, second, *noisy).with_noise(baseline, deterministic)
    if blocks is not None and whole is not None:
        written = reference_of(setup, whole).with_noise(baseline, deterministic)
        runner.by_block.calibrate(written, reference, blocks.blocks)
        reference = replace(reference, step_ms=written.step_ms, memory_bytes=written.memory_bytes)
        state.whole = written
    state.own = reference
    if first.metric is not None:
        state.note(f"{first.metric.name} is reported by {first.metric.source}")
    name = reference_name(setup.options.reference)
    noise = [("noise", f"{ROUNDED}{f', {k} more' if k else ''}", r) for k, r in enumerate(noisy)]
    stored = {(record.kind, record.name) for record in state.store.records if record.seed == 0}
    for kind, label, result in (("reference", name, first), *noise):
        if (kind, label) not in stored:
            record = own_record(setup, reference, result, state.store.next_number(), kind, label)
            state.store.add(record)
            state.listener.trial(record, 0, setup.options.trials, None, 0.0)
    _tell_uninformative(setup, state)
    return reference


def _by_block(setup: Setup, runner: PairedRunner, whole: TrialResult) -> TrialResult | None:
    """Run the reference by block where that pays; None where all runs compile as the script does."""
    if not runner.by_block.pays(whole):
        return None
    result = runner.measure(runner.train_spec(setup.reference_policy(), by_block=True))
    return result if runner.by_block.begin(result) else None


def _tell_uninformative(setup: Setup, state: SearchState) -> None:
    for budget, baseline in compared(setup.options, state.reference.baseline):
        why = uninformative(budget, baseline)
        if why is None:
            continue
        benign = " and by the gaps of benign changes" if baseline.noise_floor_upper > budget else ""
        which = "a divergence beyond the budget speaks against a policy; for it speaks only its"
        if why.code == "noise_beyond_budget":  # what stays within the budget all the same is judged by its loss
            which = "a policy whose divergence is not surely within the budget is judged by its"
        state.note(f"{which} gradient error{benign}: {why}")


def reference_of(setup: Setup, *results: TrialResult) -> Reference:
    """Return a reference from one or more runs that take equally long, on average.

    Where runs differ by 5 %, the fastest of three would be 4 % faster than an average run is, so times are averaged.
    The peak memory of a timed step is modelled where it could not be measured.
    """
    modelled = setup.steps.of_reference()
    measured = statistics.fmean(step_time(result.step_ms, result.warmup) for result in results)
    first, scale = results[0], setup.cost.scale
    return Reference(
        losses=first.losses,
        metric=first.metric,
        step_ms=measured if setup.measured else modelled.time_ms,
        memory_bytes=(first.memory_bytes if setup.measured else 0) or modelled.memory_bytes,
        samples=first.samples if setup.measured else round(first.samples * scale.tokens / scale.seq),
    )


def expected(setup: Setup, runner: PairedRunner, state: SearchState) -> list[str]:
    """Tell how long the search will take, from what the reference took, and how its trials are run to that end.

    Args:
        setup: what is searched.
        runner: runs trials beside the reference.
        state: what the search has learnt so far.
    """
    options, work, seconds = setup.options, runner.work, state.seconds
    steps, training_s = options.steps + options.warmup, work.training_s / max(work.starts, 1.0)
    step_s = training_s / steps if seconds.step_s is None else seconds.step_s
    step_s = state.reference.step_ms / 1e3 if setup.measured else step_s
    compile_s = seconds.compile_s or 0.0 if setup.measured else max(0.0, training_s - steps * step_s)
    blocks = setup.host.blocks if runner.by_block.active else 1
    pace = Pace(work.start_s, step_s, compile_s, blocks, seconds.cached_share)

    def counted(*, usual: bool) -> Schedule:
        return schedule(
            options,
            pace,
            pace if setup.measured and setup.target.is_cpu else pace.of_trials(measured=setup.measured),
            setup_s=setup.host.setup_s,
            host_s=None if setup.host.launch == "fork" else 0.0,  # what the first host found holds for them
            probes_at_once=runner.probes_at_once,
            workers=runner.workers,
            final_workers=runner.final_workers,
            turns=setup.takes_turns,
            threads=setup.threads,
            usual=usual,
            duels_s=usual_search_s(seconds.cached_compile_s or 0.0) if setup.measured else 0.0,
            closing_s=state.seconds_to_close(),
        )

    usual = counted(usual=True)
    state.needed_s = state.elapsed() + usual.rest_s
    lines = [describe(usual, counted(usual=False), options.budget_s, state.elapsed())]
    if options.workers > 1 and runner.on_one_gpu:
        lines.append(f"--workers {options.workers}: on one GPU trials run one at a time, as the reference does")
    return lines


def _run(setup: Setup, runner: PairedRunner, perturb: str = "") -> TrialResult:
    result = runner.measure(runner.train_spec(setup.reference_policy(), perturb=perturb))
    if result.ok and (result.metric is None or math.isfinite(divergence(result.curve, result.curve))):
        return result
    where = str(setup.host.model.get("class", "the script"))
    if result.status == OUT_OF_TIME:
        raise _too_short(setup.options, result.reason, where, runner.elapsed(), result.needed_s)
    if result.passed_over:
        fix = "search it without the first (a test of learning rates?), or have the script name the model that counts: "
        raise NothingAcceptableError(result.passed_over, where=where, fix=f"{fix}autoprec.register(model, optimizer)")
    if result.ok:
        what = f"the script's own {setup.options.metric} is not finite without any change by AutoPrec"
        raise NothingAcceptableError(what, where=where, fix="name a metric that is, or leave --metric out")
    if result.status == "unreported":
        raise _unreported(setup.options, result, where)
    if result.status == "too_short":
        steps = setup.options.steps + setup.options.warmup
        what = f"the script ended after {len(result.losses)} of {steps} training steps"
        raise NothingAcceptableError(what, where=where, fix=fewer_steps(len(result.losses), setup.options.warmup))
    if result.status == "diverged":
        what = f"the script's own loss is not finite without any change by AutoPrec: {result.reason}"
        raise NothingAcceptableError(what, where=where, fix="make the script train as it is first")
    if result.status == "unsupported":
        fix = "switch that off for the search; under the policy it finds the script may do so again"
        raise ScriptError(result.reason, where=where, fix=fix)
    raise ScriptError(
        f"the script failed while training as written: {result.status}: {result.reason}\n{result.tail}".rstrip(),
        where=where,
        fix="this run had no policy, and worked on a copy of its files; does the script train by itself? "
        "If it does, please report this with the output above",
    )


def _unreported(options: SearchOptions, result: TrialResult, where: str) -> UsageError:
    """Return the error of a search by a metric that the script does not report in its steps."""
    if options.metric in MISMATCH:  # which trials measure, and no script has to report
        fix = "more --steps, of which one follows each copy of the weights; docs/trials.md has what is compared"
        return UsageError(result.reason, where=where, fix=fix, code="unreported")
    names = result.metric.names if result.metric is not None else ()
    if options.metric in names:
        fix = "more --steps, so that it is reported among them: a run goes on for twice as many"
        return UsageError(f"{result.reason}, though at other times", where=where, fix=fix, code="unreported")
    if names:
        return UnknownNameError("metric", options.metric, names, where=where)
    fix = f"autoprec.report({options.metric if options.metric.isidentifier() else 'name'}=value), or more --steps"
    return UsageError(f"{result.reason}, nor anything else", where=where, fix=fix, code="unreported")


def check_time(options: SearchOptions, host: HostInfo, elapsed_s: float, start_s: float, *, starts: int) -> None:
    """End a search whose time budget would be used up before two steps of the reference are known.

    Args:
        elapsed_s: seconds since the search began.
        start_s: seconds that the script took until its first steps were seen.
        starts: how often a script whose trials are processes of their own is started anew until then.

    Raises:
        NothingAcceptableError: the time budget is too short.
    """
    if options.budget_s is None:
        return
    if host.launch == "process":
        each_s = host.setup_s
        next_s, why = starts * each_s, f"the script takes {each_s:.0f} s to start, as every trial of it does"
    else:  # what the first fork compiles, torch's cache holds for the others
        next_s = each_s = start_s - host.setup_s if host.compiled else 0.0
        why = f"the script takes {start_s:.0f} s until its first step is done"
    if next_s > max(0.0, OVERRUN * options.budget_s - elapsed_s):  # a fork of a plain script ends after one step more
        raise _too_short(options, why, str(host.model.get("class", "the script")), elapsed_s, each_s)


def not_started(options: SearchOptions, label: str, elapsed_s: float) -> NothingAcceptableError:
    """Return the error of a search whose time budget was used up before the script was at its first step.

    Args:
        options: the search's.
        label: names the script.
        elapsed_s: seconds since the search began.
    """
    return _too_short(options, NOT_STARTED, label, elapsed_s, 0.0)


def _too_short(options: SearchOptions, why: str, where: str, elapsed_s: float, run_s: float) -> NothingAcceptableError:
    # the reference runs three times, what people write by hand as often, and each gets a further seed; the rest is
    # gradient errors and the answer
    enough = options.with_budget_for(elapsed_s + (REFERENCE_RUNS + 2 * FEWEST_RUNS) * run_s)
    busy = other_work(max(1, options.workers))
    beside = f"; {busy}, and all of it takes longer for that" if busy else ""
    return NothingAcceptableError(
        f"a time budget of {options.budget_s or 0.0:.0f} s is too short: {why}{beside}",
        where=where,
        fix=f"go on with the study (or begin another one with fewer --steps):\n    {enough.resume_command()}",
    )


def own_record(
    setup: Setup, reference: Reference, result: TrialResult, number: int, kind: str, name: str, *, seed: int = 0
) -> Run:
    """Return a run of the script without a policy, benignly perturbed or not, as a record of its study.

    Args:
        setup: what is searched.
        reference: of the same paired seed.
        result: of the run.
        number: of the record.
        kind: ``reference`` or ``noise``.
        name: of the record.
        seed: the paired seed.
    """
    gap, error = divergence(result.curve, reference.curve), Metric(0.0, setup.source)
    metrics = run_metrics(reference, reference.step_ms, reference.memory_bytes, gap, error, source=setup.source)
    if not result.memory_bytes:
        metrics["memory_bytes"] = replace(metrics["memory_bytes"], source=MODELLED)
    run = Run(
        number=number,
        kind=kind,
        name=name,
        params={},
        policy={},
        status="ok",
        metrics=metrics,
        seed=seed,
        started=time.time() - result.wall_s,
        seconds=result.wall_s,
    )
    return with_curves(run, result, reference)
