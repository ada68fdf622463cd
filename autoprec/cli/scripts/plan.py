"""``autoprec search --dry-run``: what a search would try on this script, and about how long that would take.

The script is started as for a search and one step of it is recorded; then it is ended. No trial is run, the reference
neither; no study is begun and nothing is written. The length of a step is therefore the cost model's, for the device
that the script runs on here; a search says how long it takes anew once the script has run as it is written.
"""

from __future__ import annotations

import math
import tempfile
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.cli.console import print_json
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.errors import UsageError
from autoprec.support.units import counted, memory_text, percent_text, span_text
from autoprec.tuning.options import RUNS, SearchOptions

if TYPE_CHECKING:
    from autoprec.trial.protocol import HostInfo, TrialResult
    from autoprec.tuning.schedule import Schedule
    from autoprec.tuning.setup import Setup
    from autoprec.tuning.sixteen_bit import Bound
    from autoprec.tuning.workers.local import RunnerFactory

#: Options that say what is acceptable, and when a search ends.
LIMITS = ("max_gradient_error", "max_memory", "budget_s", "trials", "objective")
#: Presets that a person is shown; the JSON has all.
_SHOWN = 6


def make_plan(asked: SearchOptions, phases: Phases, factory: RunnerFactory | None = None) -> dict[str, Any]:
    """Record one step of a script, and return what a search of it would do: what ``--dry-run --json`` prints.

    Seconds are estimates: ``usual`` of a search that ends when nothing left is worth a run, as searches do; ``most`` of
    one that never does. Both are without what the script compiles, which no step has shown yet.

    Args:
        asked: the search.
        phases: is told what goes on.
        factory: starts a host; None starts real processes.

    Raises:
        ScriptError: the script failed before or in its first step.
        NothingAcceptableError: there is nothing to tune.
        UsageError: ``--resume``.
    """
    from autoprec.cost.device.cpu import cpu_rates
    from autoprec.graph.report import GraphReport
    from autoprec.trial.command import ScriptCommand, parse_variants
    from autoprec.trial.protocol import PATIENCE_S, RecordSpec
    from autoprec.tuning.checks import check_early
    from autoprec.tuning.phases.record import answer_of, record_step, tunable
    from autoprec.tuning.phases.variants import AS_GIVEN
    from autoprec.tuning.setup import Setup
    from autoprec.tuning.sixteen_bit import bound_of
    from autoprec.tuning.study.naming import free_name
    from autoprec.tuning.workers.engines import runner_factory
    from autoprec.tuning.workers.local import HostPool

    if asked.resume:
        what = "--dry-run begins nothing, and --resume continues what was begun"
        raise UsageError(what, fix="leave one of them out")
    check_early(asked)
    command, variants = ScriptCommand.parse(list(asked.command)), parse_variants(asked.variant)
    asked = replace(asked, study=asked.study or free_name(asked, command))
    hosts = factory or runner_factory(asked, command)
    with tempfile.TemporaryDirectory() as folder, HostPool(hosts, Path(folder)) as pool:
        phases.begin(f"running {command.label} to its first training step")
        probe = threading.Thread(target=cpu_rates, daemon=True)  # takes as long as starting a script
        probe.start()
        host = pool.info()
        phases.begin("recording one training step, operator by operator")
        result, slots = pool.host().run(RecordSpec(timeout_s=PATIENCE_S)), pool.slots()
        graph = tunable(answer_of(result, GraphReport, command.label, "recorded"), command.label)
        # all of them as fast as the script as given: which are accepted, and how fast they are, no run has shown
        names = [AS_GIVEN, *(variant.name for variant in variants)] if variants else []
        probe.join()
        whole = Setup.of(asked, host, graph, dict.fromkeys(names, (1.0, 1.0)))
        run = pool.host().run
        bound = bound_of(whole, command, lambda policy: record_step(run, command.label, policy=policy))
    return _document(bound, command.label, [variant.label for variant in variants], result, slots)


def _document(bound: Bound, label: str, variants: list[str], recorded: TrialResult, slots: int) -> dict[str, Any]:
    """Return the plan of a search whose bound is known; see :func:`make_plan`."""
    from autoprec.tuning.decide.presets import presets
    from autoprec.tuning.sixteen_bit import by_hand, first_presets
    from autoprec.tuning.telling import notes_of_bound, verdict_text

    setup, verdict = bound.setup, bound.verdict
    problem, asked = setup.problem, setup.options
    known = [(name, params) for name, params in first_presets(presets(problem)) if not problem.is_script(params)]
    doubt = bound.soundness.told()
    notes = [*setup.host.notes, *setup.space.warnings(), *([str(doubt)] if doubt else [])]
    notes += notes_of_bound(setup, narrow=bound.narrow, beyond=bound.beyond)
    return {
        "script": label,
        "study": asked.study,
        "target": setup.target.name,
        "source": setup.source,
        "launch": setup.host.launch,
        "model": {"class": setup.graph.model["class"], "parameters": setup.graph.model["parameters"]},
        "space": {
            "name": setup.space.name,
            "groups": {group.name: list(group.layers) for group in problem.groups},
            "choices": list(problem.choice_names),
            "parameters": {name: list(values) for name, values in problem.parameters.items()},
            "policies": _finite(problem.size()),
        },
        "verdict": {"kind": verdict.kind, "reason": verdict_text(setup, verdict), "bound": verdict.bound_speedup},
        "ends": bound.ends,
        "notes": notes,
        "variants": variants,
        "by_hand": [name for name, _ in by_hand(known)],
        "presets": [name for name, _ in known],
        "limits": asked.compared | {name: getattr(asked, name) for name in LIMITS},
        "output": asked.output,
        **_counts(bound, recorded, slots),
    }


def _counts(bound: Bound, recorded: TrialResult, slots: int) -> dict[str, Any]:
    """Return the trials, runs under further seeds, and seconds of a search."""
    from autoprec.tuning.paired import finalists_at_once, probes_at_once, trials_at_once
    from autoprec.tuning.phases.duels import usual_search_s
    from autoprec.tuning.schedule import CLOSING_S, Pace, schedule

    setup, step_s = bound.setup, _step_s(bound.setup)
    host, asked, workers = setup.host, setup.options, trials_at_once(setup, slots)
    asked = replace(asked, trials=int(min(asked.trials, setup.problem.size())))  # none is run twice
    pace = Pace(recorded.start_s, step_s)
    rows: dict[str, dict[str, Any]] = {}
    for name in ("usual", "most"):
        found = schedule(
            asked,
            pace,
            pace if setup.measured else pace.of_trials(measured=False),
            setup_s=host.setup_s,
            host_s=None if host.launch == "fork" else 0.0,
            probes_at_once=probes_at_once(setup, slots, setup.steps.of_reference().memory_bytes),
            workers=workers,
            final_workers=finalists_at_once(setup, slots),
            turns=setup.takes_turns,
            usual=name == "usual",
            duels_s=usual_search_s() if setup.measured else 0.0,
            closing_s=CLOSING_S,
        )
        rows[name] = {"trials": 0, "runs": 0, "seconds": _only(host, CLOSING_S)} if bound.ends else _row(found)
    budget = asked.budget_s
    for row in rows.values():
        row["seconds"]["total"] = min(row["seconds"]["total"], math.inf if budget is None else budget)
    steps = asked.steps + asked.warmup
    return rows | {
        "at_once": workers,
        "steps": steps,
        "run_s": pace.run_s(steps),
        "setup_s": host.setup_s,
        "step_s": {"value": step_s, "source": "modelled"},
        "compiles": host.compiled,
    }


def _row(found: Schedule) -> dict[str, Any]:
    parts = {name.removesuffix("_s"): value for name, value in asdict(found).items() if name.endswith("_s")}
    del parts["whole"]  # what is compiled as a whole is not known
    return {"trials": found.trials, "runs": found.runs, "seconds": {**parts, "total": found.total_s}}


def _only(host: HostInfo, closing_s: float) -> dict[str, float]:
    """Return the seconds of a search that ends with its bound."""
    return {"reference": 0.0, "closing": closing_s, "total": host.setup_s + closing_s}


def _step_s(setup: Setup) -> float:
    """Return the seconds of a step of the script as written on the device at hand, by the cost model."""
    from autoprec.cost import CostModel
    from autoprec.tuning.target import resolve_target

    if setup.measured:
        return setup.steps.script().time_ms / 1e3
    host = setup.host
    here, _ = resolve_target("cpu" if host.device == "cpu" else "auto", host.device)
    model = CostModel(setup.graph, here, compiled=host.compiled, backend=setup.options.backend)
    return model.estimate({}, activations="keep").time_ms / 1e3


def _finite(count: float) -> float | None:
    return count if math.isfinite(count) else None


def _policies(count: float | None) -> str:
    """Return how many policies a space has, for a person."""
    if count is None or count >= 1e15:
        return "more policies than could ever be tried"
    if count < 1.5:
        return "1 policy"
    return f"{count:,.0f} policies" if count < 1e6 else f"{count:.3g} policies"


def _lines(plan: dict[str, Any]) -> list[str]:
    """Return the plan for a person, every limit as people write it: what was meant can be seen before it counts."""
    most, space, model = plan["limits"], plan["space"], plan["model"]
    memory = f"memory {memory_text(most['max_memory'])}" if most["max_memory"] else "memory not limited"
    others = [name for name in plan["presets"] if name not in plan["by_hand"]]
    shown = "; ".join(others[:_SHOWN]) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
    parameters = ", ".join(space["parameters"])
    gap = f"mean loss gap {percent_text(most['max_divergence'])}" if "max_divergence" in most else ""
    gap = gap or f"{most['metric']} ({most['better']} is better) changed by {percent_text(most['max_change'])}"
    rows = [
        ("model", f"{model['class']}, {model['parameters']:,} parameters, {len(space['groups'])} groups of layers"),
        ("target", f"{plan['target']}, times {plan['source']}; trials start by {plan['launch']}"),
        ("bound", f"{plan['verdict']['kind']}: {plan['verdict']['reason']}"),
        (
            "limits",
            f"{gap}, gradient error {most['max_gradient_error']:.3g} "
            f"of the mini-batch noise, {memory}; best by {most['objective']}",
        ),
        ("space", f"{space['name']}: {', '.join(space['choices'])}; {_policies(space['policies'])}"),
        *([("", f"parameters: {parameters}")] if parameters else []),
        *(
            [("variants", "; ".join(plan["variants"]) + ": timed first, which is not counted below")]
            if plan["variants"]
            else []
        ),
    ]
    if plan["ends"]:
        rows.append(("trials", "none: the search ends with its bound (--force searches)"))
    else:
        rows += [("by hand", "; ".join(plan["by_hand"]) or "nothing beside the script as written")]
        rows += [("presets", f"where a run pays: {shown}")] if shown else []
        rows += _timed(plan)
    rows += [("note", note) for note in plan["notes"]]
    rows += [("writes", f"{plan['output']} and {RUNS}/{plan['study']}/ without --dry-run")]
    return [f"{name:<10}{text}" for name, text in rows]


def _timed(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows that say how much is run, and how long that takes."""
    usual, most, budget = plan["usual"], plan["most"], plan["limits"]["budget_s"]
    parts = {"reference": "start and reference", "scan": "gradient errors", "trials": "trials"}
    parts |= {"finalists": "further seeds", "duels": "duels", "closing": "the answer"}
    times = {name: value for name, value in usual["seconds"].items() if name in parts and value}
    compiled = ", and what the script compiles, which is not counted" if plan["compiles"] else ""
    limit = f", cut short by --budget {span_text(budget)}" if budget and most["seconds"]["total"] >= budget else ""
    return [
        (
            "trials",
            f"usually {usual['trials']}, at most {most['trials']}, {plan['at_once']} at once, of {plan['steps']} steps "
            f"each; then usually {counted(usual['runs'], 'run')} under further paired seeds",
        ),
        (
            "one run",
            f"about {span_text(plan['run_s'])}: a step takes {span_text(plan['step_s']['value'])} by the cost model"
            f"{compiled}; the script takes {span_text(plan['setup_s'])} to start",
        ),
        (
            "duration",
            f"usually about {span_text(usual['seconds']['total'])} "
            f"({', '.join(f'{parts[name]} {span_text(value)}' for name, value in times.items())}), "
            f"about {span_text(most['seconds']['total'])} if nothing converges{limit}",
        ),
    ]


def print_plan(asked: SearchOptions, *, as_json: bool, quiet: bool) -> None:
    """Print the plan of a search on stdout.

    Args:
        asked: the search.
        as_json: as one document.
        quiet: no progress on stderr.
    """
    with Phases(quiet=quiet) as phases:
        plan = make_plan(asked, phases)
    if as_json:
        print_json(plan, indent=1)
    else:
        echo("\n".join(_lines(plan)))
