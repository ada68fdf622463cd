"""``autoprec search --dry-run``: what a search would try on this script, and how long that would take.

The script is started, one step is recorded and two short runs are timed: one as written and one under the last preset
of the target, which costs what a trial costs. Everything else is counted. No study is begun and nothing is written.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoprec.cli.console import print_json
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.recording import record, run_failed, running, tunable
from autoprec.support.units import counted, memory_text, span_text
from autoprec.tuning.options import RUNS

if TYPE_CHECKING:
    from autoprec.trial.driver.runner import TrialRunner
    from autoprec.trial.protocol import TrialSpec
    from autoprec.tuning.options import SearchOptions

#: Options that say what is acceptable, and when a search ends.
LIMITS = ("max_divergence", "max_gradient_error", "max_memory", "budget_s", "trials", "objective")
#: Steps of the runs that are timed: they need not last as long as a trial.
_TIMED_STEPS = 5


def _timed(runner: TrialRunner, spec: TrialSpec, label: str, policy: str = "") -> float:
    """Return the seconds of a whole run, from a few of its steps; ``policy`` names what it runs under."""
    few = replace(spec, steps=min(spec.steps, _TIMED_STEPS), warmup=1)
    result = runner.run(few)
    if not result.ok:
        raise run_failed(result, label, "a run could not be timed", policy=policy)
    return result.wall_s * (spec.steps + spec.warmup) / (few.steps + few.warmup)


def make_plan(asked: SearchOptions, phases: Phases) -> dict[str, Any]:
    """Look at a script and count what a search of it would do: what ``--dry-run --json`` prints.

    Times are in seconds, each ``*_s`` an estimate from the runs that were timed. ``total_s`` and its parts are of a
    search that never converges: a search ends when nothing left is worth a trial, and after ``--budget``. ``usual_s``
    is what searches take that end as they usually do; ``limited`` says why less would be tried than the space offers.

    Raises:
        ScriptError: the script failed as it is written.
        AutoPrecError: it failed under a preset.
        NothingAcceptableError: there is nothing to tune, or it has fewer steps than a trial takes.
    """
    from autoprec.trial.protocol import TrialSpec
    from autoprec.tuning.checks import check_early
    from autoprec.tuning.decide.presets import presets
    from autoprec.tuning.schedule import CLOSING_S, Pace, schedule
    from autoprec.tuning.setup import Setup
    from autoprec.tuning.sixteen_bit import only_sixteen_bit
    from autoprec.tuning.target import calibration_here

    check_early(asked)
    with running(asked.command, phases) as (runner, host, label):
        report = tunable(record(runner, label, phases))
        setup = Setup.of(asked, host, report, calibration_here(asked, host.device))
        verdict, limited = setup.verdict(), ""
        narrow = only_sixteen_bit(setup, verdict)
        if narrow is not None:
            setup, limited = narrow, "only 16-bit policies would be tried (--force searches the whole space)"
        elif verdict.kind == "stay" and not asked.force:
            limited = "the search would end here, without a trial (--force searches)"
        problem, names = setup.problem, dict(presets(setup.problem))
        spec = TrialSpec(steps=asked.steps, warmup=asked.warmup, seed=None if host.launch == "fork" else 0)
        phases.begin("timing a run of the script as written")
        reference_s = _timed(runner, spec, label)
        phases.begin("timing a run under a preset")
        last = [*names][-1]
        backend = asked.backend if setup.source == "measured" else "emulated"
        spec = replace(spec, policy=problem.policy(names[last]).to_dict(), backend=backend)
        trial_s = max(reference_s, _timed(runner, spec, label, f"the preset '{last}'"))
    passes = len(names) + sum(len(group.choices) for group in problem.groups)
    steps = asked.steps + asked.warmup
    paces = [Pace(0.0, seconds / steps) for seconds in (reference_s, trial_s)]  # all of a run, told per step
    asked = replace(asked, trials=int(min(asked.trials, problem.size())))  # none is run twice
    how: dict[str, Any] = {"setup_s": host.setup_s, "closing_s": CLOSING_S}
    how["passes"] = min(passes, max(60, asked.trials))
    expected, usual = schedule(asked, *paces, **how), schedule(asked, *paces, usual=True, **how)
    parts = ("scan_s", "trials_s", "finalists_s", "closing_s")
    return {
        "target": setup.target.name,
        "source": setup.source,
        "launch": host.launch,
        "model": {"class": report.model["class"], "parameters": report.model["parameters"]},
        "groups": {group.name: group.layers for group in problem.groups},
        "choices": problem.choice_names,
        "policies": problem.size(),
        "presets": tuple(names)[: asked.trials],
        "bound": f"{verdict.kind}: {verdict.reason}",
        "limited": limited,
        "reference_s": reference_s,
        "trial_s": trial_s,
        "usual_s": min(usual.total_s, asked.budget_s or usual.total_s),
        "output": asked.output,
        "budget_s": asked.budget_s,
        "limits": {name: getattr(asked, name) for name in LIMITS},
        "trials": expected.trials,
        "finalist_runs": expected.runs,
        "setup_s": expected.reference_s,
        **{name: getattr(expected, name) for name in parts},
        "total_s": min(expected.total_s, asked.budget_s or math.inf),
    }


def _policies(count: float) -> str:
    """Return how many policies a space has, for a person."""
    if count == 1:
        return "1 policy"
    if count >= 1e15:
        return "more policies than could ever be tried"
    return f"{count:,.0f} policies" if count < 1e6 else f"{count:.3g} policies"


def _lines(plan: dict[str, Any]) -> list[str]:
    """Return the plan for a person, every limit as people write it: what was meant can be seen before it counts."""
    most, presets = plan["limits"], plan["presets"]
    times = {name: span_text(value) for name, value in plan.items() if name.endswith("_s") and value is not None}
    memory = f"memory {memory_text(most['max_memory'])}" if most["max_memory"] else "memory without a limit"
    shown = "; ".join(presets[:6]) + (f" and {len(presets) - 6} more" if len(presets) > 6 else "")
    limit = f", cut short by --budget {times['budget_s']}" if plan["budget_s"] else ""
    return [
        f"model     {plan['model']['class']}, {plan['model']['parameters']:,} parameters, "
        f"{len(plan['groups'])} layer groups",
        f"target    {plan['target']}, times {plan['source']}; trials start by {plan['launch']}",
        f"bound     {plan['bound']}",
        *([f"          {plan['limited']}"] if plan["limited"] else []),
        f"limits    mean loss gap {100 * most['max_divergence']:g} %, gradient error {most['max_gradient_error']:.3g} "
        f"of the mini-batch noise, {memory}; best by {most['objective']}",
        f"choices   {', '.join(plan['choices'])}: {_policies(plan['policies'])}",
        f"presets   {shown}",
        f"trials    at most {plan['trials']}, then {counted(plan['finalist_runs'], 'run')} under further paired seeds",
        f"one run   {times['reference_s']} as written, {times['trial_s']} as a trial (timed just now)",
        f"duration  usually about {times['usual_s']}, as a search ends when nothing left is worth a run",
        f"          about {times['total_s']} if nothing converges: reference {times['setup_s']}, "
        f"gradient errors {times['scan_s']}, trials {times['trials_s']}, "
        f"further seeds {times['finalists_s']}, the answer {times['closing_s']}{limit}",
        f"writes    {plan['output']} and {RUNS}/ when it is run without --dry-run",
    ]


def print_plan(asked: SearchOptions, *, as_json: bool, quiet: bool) -> None:
    """Print the plan of a search on stdout."""
    with Phases(quiet=quiet) as phases:
        plan = make_plan(asked, phases)
    if as_json:
        print_json(plan)
    else:
        echo("\n".join(_lines(plan)))
