"""``autoprec search --dry-run``: what a search would try on this script, and how long that would take.

The script is started, one step is recorded and two short runs are timed: one as written and one under the first preset
of the target, which costs what a trial costs. Everything else is counted. No study is begun and nothing is written.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from autoprec.cli.console import print_json
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.recording import record, run_failed, running, tunable
from autoprec.support.units import counted, memory_text, span_text
from autoprec.tuning.options import RUNS

if TYPE_CHECKING:
    from autoprec.graph.report import GraphReport
    from autoprec.trial.driver.runner import TrialRunner
    from autoprec.trial.protocol import HostInfo, TrialSpec
    from autoprec.tuning.options import SearchOptions
    from autoprec.tuning.schedule import Pace, Schedule
    from autoprec.tuning.setup import Setup

#: Options that say what is acceptable, and when a search ends.
LIMITS = ("max_divergence", "max_gradient_error", "max_memory", "budget_s", "trials", "objective")
#: Steps of the runs that are timed: they need not last as long as a trial.
_TIMED_STEPS = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """What a search would do; times in seconds, each ``*_s`` an estimate from the runs that were timed.

    ``expected`` is of a search that never converges: a search ends when nothing left is worth a trial, and after
    ``--budget``. ``usual_s`` is what searches take that end as they usually do; ``limited`` says why less would be
    tried than the space offers; ``gpu_terms`` what a run on a GPU takes besides its steps, empty elsewhere.
    """

    target: str
    source: str
    launch: str
    model: dict[str, Any]
    groups: dict[str, tuple[str, ...]]
    choices: tuple[str, ...]
    policies: float
    presets: tuple[str, ...]
    bound: str
    limited: str
    expected: Schedule
    reference_s: float
    trial_s: float
    gpu_terms: str
    usual_s: float
    output: str
    budget_s: float | None
    limits: dict[str, Any]

    @property
    def total_s(self) -> float:
        """Return the seconds of a search that never converges, cut to the budget where there is one."""
        return min(self.expected.total_s, self.budget_s or math.inf)

    def to_json(self) -> dict[str, Any]:
        out, expected = asdict(self), self.expected
        del out["expected"]
        counts = {"trials": expected.trials, "finalist_runs": expected.runs, "setup_s": expected.reference_s}
        parts = {name: getattr(expected, name) for name in ("scan_s", "trials_s", "finalists_s", "closing_s")}
        return out | counts | parts | {"total_s": self.total_s}


def _timed(runner: TrialRunner, spec: TrialSpec, label: str, policy: str = "") -> float:
    """Return the seconds of a whole run, from a few of its steps; ``policy`` names what it runs under."""
    few = replace(spec, steps=min(spec.steps, _TIMED_STEPS), warmup=1)
    result = runner.run(few)
    if not result.ok:
        raise run_failed(result, label, "a run could not be timed", policy=policy)
    return result.wall_s * (spec.steps + spec.warmup) / (few.steps + few.warmup)


def make_plan(asked: SearchOptions, phases: Phases) -> Plan:
    """Look at a script and count what a search of it would do.

    Raises:
        ScriptError: the script failed as it is written.
        AutoPrecError: it failed under a preset.
        NothingAcceptableError: there is nothing to tune, or it has fewer steps than a trial takes.
    """
    from autoprec.trial.protocol import TrialSpec
    from autoprec.tuning.checks import check_early
    from autoprec.tuning.decide.presets import presets
    from autoprec.tuning.schedule import CLOSING_S, GPU_TERMS, schedule

    check_early(asked)
    with running(asked.command, phases) as (runner, host, label):
        report = tunable(record(runner, label, phases))
        setup, bound, limited = _looked_at(asked, report, host)
        problem, source = setup.problem, setup.source
        names = dict(presets(problem))
        seed = None if host.launch == "fork" else 0
        spec = TrialSpec(steps=asked.steps, warmup=asked.warmup, seed=seed)
        phases.begin("timing a run of the script as written")
        reference_s = _timed(runner, spec, label)
        phases.begin("timing a run under a preset")
        last = [*names][-1]
        document = problem.policy(names[last]).to_dict()
        backend = asked.backend if source == "measured" else "emulated"
        trial_s = max(
            reference_s, _timed(runner, replace(spec, policy=document, backend=backend), label, f"the preset '{last}'")
        )
    passes = len(names) + sum(len(group.choices) for group in problem.groups)
    on_gpu = source == "measured" and not setup.target.is_cpu
    paces = _paces(reference_s, trial_s, asked.steps + asked.warmup, on_gpu=on_gpu)
    asked = replace(asked, trials=int(min(asked.trials, problem.size())))  # none is run twice
    how: dict[str, Any] = {"setup_s": host.setup_s, "closing_s": CLOSING_S}
    how["passes"] = min(passes, max(60, asked.trials))
    expected, usual = schedule(asked, *paces, **how), schedule(asked, *paces, usual=True, **how)
    return Plan(
        target=setup.target.name,
        source=source,
        launch=host.launch,
        model={"class": report.model["class"], "parameters": report.model["parameters"]},
        groups={group.name: group.layers for group in problem.groups},
        choices=problem.choice_names,
        policies=problem.size(),
        presets=tuple(names)[: asked.trials],
        bound=bound,
        limited=limited,
        expected=expected,
        reference_s=reference_s,
        trial_s=trial_s,
        gpu_terms=GPU_TERMS if on_gpu else "",
        usual_s=min(usual.total_s, asked.budget_s or usual.total_s),
        output=asked.output,
        budget_s=asked.budget_s,
        limits={name: getattr(asked, name) for name in LIMITS} | {"max_memory": setup.options.memory_limit},
    )


def _paces(reference_s: float, trial_s: float, steps: int, *, on_gpu: bool) -> tuple[Pace, Pace]:
    """Return what runs take as written and under a policy, of one of each that was timed from its start.

    All of it is told per step. On a GPU the second has compiled the casts, for all that follow.
    """
    from autoprec.tuning.schedule import CASTS_S, Pace

    casts_s = min(CASTS_S, trial_s - reference_s) if on_gpu else 0.0
    return Pace(0.0, reference_s / steps), Pace(0.0, (trial_s - casts_s) / steps, once_s=casts_s)


def _looked_at(asked: SearchOptions, report: GraphReport, host: HostInfo) -> tuple[Setup, str, str]:
    """Return what a search would be of, what could be gained, and why that is all; the last is empty for most."""
    from autoprec.tuning.setup import Setup
    from autoprec.tuning.sixteen_bit import only_sixteen_bit
    from autoprec.tuning.target import calibration_here

    setup = Setup.of(asked, host, report, calibration_here(asked, host.device))
    verdict = setup.verdict()
    narrow = only_sixteen_bit(setup, verdict)
    bound = f"{verdict.kind}: {verdict.reason}"
    if narrow is not None:
        return narrow, bound, "only 16-bit policies would be tried (--force searches the whole space)"
    if verdict.kind == "stay" and not asked.force:
        return setup, bound, "the search would end here, without a trial (--force searches)"
    return setup, bound, ""


def _policies(count: float) -> str:
    """Return how many policies a space has, for a person."""
    if count == 1:
        return "1 policy"
    if count >= 1e15:
        return "more policies than could ever be tried"
    return f"{count:,.0f} policies" if count < 1e6 else f"{count:.3g} policies"


def _limits(plan: Plan) -> str:
    """Return every limit that a policy has to keep, as people write it: what was meant can be seen before it counts."""
    most = plan.limits
    memory = f"memory {memory_text(most['max_memory'])}" if most["max_memory"] else "memory without a limit"
    return (
        f"mean loss gap {100 * most['max_divergence']:g} %, gradient error {most['max_gradient_error']:.3g} of the "
        f"mini-batch noise, {memory}; best by {most['objective']}"
    )


def print_plan(asked: SearchOptions, *, as_json: bool, quiet: bool) -> None:
    """Print the plan of a search on stdout."""
    with Phases(quiet=quiet) as phases:
        plan = make_plan(asked, phases)
    if as_json:
        print_json(plan.to_json())
        return
    size, expected = _policies(plan.policies), plan.expected
    shown = "; ".join(plan.presets[:6]) + (f" and {len(plan.presets) - 6} more" if len(plan.presets) > 6 else "")
    limit = f", cut short by --budget {span_text(plan.budget_s)}" if plan.budget_s else ""
    lines = [
        f"model     {plan.model['class']}, {plan.model['parameters']:,} parameters, {len(plan.groups)} layer groups",
        f"target    {plan.target}, times {plan.source}; trials start by {plan.launch}",
        f"bound     {plan.bound}",
        *([f"          {plan.limited}"] if plan.limited else []),
        f"limits    {_limits(plan)}",
        f"choices   {', '.join(plan.choices)}: {size}",
        f"presets   {shown}",
        f"trials    at most {expected.trials}, then {counted(expected.runs, 'run')} under further paired seeds",
        f"one run   {span_text(plan.reference_s)} as written, {span_text(plan.trial_s)} as a trial (timed just now)",
        *([f"          with {plan.gpu_terms}"] if plan.gpu_terms else []),
        f"duration  usually about {span_text(plan.usual_s)}, as a search ends when nothing left is worth a run",
        f"          about {span_text(plan.total_s)} if nothing converges: reference {span_text(expected.reference_s)}, "
        f"gradient errors {span_text(expected.scan_s)}, trials {span_text(expected.trials_s)}, "
        f"further seeds {span_text(expected.finalists_s)}, the answer {span_text(expected.closing_s)}{limit}",
        f"writes    {plan.output} and {RUNS}/ when it is run without --dry-run",
    ]
    echo("\n".join(lines))
