"""``autoprec estimate``: the verdict alone, in a minute: what could be gained on a target, where, and why not."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from autoprec.cli import options
from autoprec.cli.console import print_json
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.recording import SIZE, is_description, is_saved_step, step_of, tunable
from autoprec.cli.script import script_command
from autoprec.errors import UsageError
from autoprec.support.redact import redact_arguments
from autoprec.support.tables import Table
from autoprec.support.units import memory_text, span_text


def _device_here() -> str:
    """Return the device that ``--target auto`` means where there is no script to say on which it trains."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


#: What the run without a policy is where there is a configuration and no script.
_CONFIGURED = "the model in pure bf16"


def _lines(verdict: Any, estimate: Any, choices: str) -> list[str]:
    share = ", ".join(
        f"{name} {value:.0%}" for name, value in verdict.shares.items() if value >= 0.005 and name != "tunable"
    )
    low, high = _ms(estimate.low_ms), _ms(estimate.high_ms)
    baseline = verdict.baseline_run
    return [
        f"verdict   {verdict.kind}",
        f"why       {verdict.reason}",
        f"bound     {verdict.bound_text}; {verdict.label}",
        f"choices   {choices}",
        f"step      {_ms(estimate.time_ms)} ms ({low} to {high}) as {baseline}",
        f"shares    {share}; layers that may change: {verdict.shares['tunable']:.0%}",
    ]


def _layer_lines(verdict: Any, limit: int) -> list[str]:
    """Return one line per kind of layer, those that take most time first."""
    lines = [""]
    shown: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in verdict.rows:
        key = (str(row["shapes"]), row["best"], row["reason"])
        shown.setdefault(key, []).append(row)
    by_time = sorted(shown.values(), key=lambda rows: -sum(row["baseline_ms"] for row in rows))
    for rows in by_time[:limit]:
        row = rows[0]
        shapes = " ".join("x".join(str(size) for size in shape) for shape in row["shapes"][:2])
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        total = sum(r["baseline_ms"] for r in rows)
        why = row["reason"] if row["reason"].startswith(row["best"]) else f"{row['best']}: {row['reason']}"
        lines.append(f"{row['name']}{more}  {shapes}  {_ms(total)} ms  {why}")
    if len(shown) > limit:
        lines.append(f"... {len(shown) - limit} more kinds of layers; --json has every layer")
    return lines


def _memory(model: Any, verdict: Any, plans: Any) -> dict[str, Any]:
    """Return the modelled bytes of the baseline's step and of the best single choice's, and whether they fit."""

    def held(choice: str) -> dict[str, int] | None:
        found = model.memory(plans.get(choice, {}), activations=verdict.activations)
        return found.to_json() if found else None

    base, best = held(verdict.baseline), verdict.best_uniform[0]
    return {
        "baseline": base,
        "best_uniform": held(best) if best != verdict.baseline else None,
        "device_bytes": model.target.memory_bytes,
        "fits": base is None or base["total"] <= model.target.memory_bytes,
    }


def _memory_line(memory: dict[str, Any], verdict: Any) -> str:
    base, best, device = memory["baseline"], memory["best_uniform"], memory["device_bytes"]
    if base is None:
        return "memory    not modelled: the record counted none"
    saved = base["saved"] + base["weight_casts"]
    parts = [("weights", base["parameters"]), ("gradients", base["gradients"]), ("optimizer", base["optimizer"])]
    parts += [("saved for backward", saved), ("in the backward pass", base["backward"] + base["gathered"])]
    listed = ", ".join(f"{name} {memory_text(size)}" for name, size in parts if size)
    other = f"; {memory_text(best['total'])} with {verdict.best_uniform[0]}" if best else ""
    line = f"memory    {memory_text(base['total'])} as {verdict.baseline_run} ({listed}){other}; "
    if memory["fits"]:
        return f"{line}one device has {memory_text(device)}"
    return f"{line}MORE than the {memory_text(device)} of one device: shard, checkpoint, or cut the batch"


def _under(policy: Any, model: Any, baseline_ms: float) -> dict[str, Any]:
    """Return what a step would take under a policy, as it begins; nothing where layers of it cannot run on the target.

    ``cannot_run`` maps the reason to those layers.
    """
    from autoprec.policy import resolve

    plans = resolve(policy.stages[0], [layer.name for layer in model.report.tunable])
    asked = model.executed(policy.execution)
    step = asked.estimate(
        plans,
        activations=policy.activations,
        attention=policy.operators.attention,
        norm=policy.operators.norm,
        optimizer=policy.optimizer,
    )
    refused: dict[str, list[str]] = {}
    for name, plan in plans.items():
        tried = [model.can_run(name, recipe) for recipe in dict.fromkeys(plan.recipes) if recipe is not None]
        if why := next((reason for ok, reason in tried if not ok), ""):
            refused.setdefault(why, []).append(name)
    if refused:
        return {"step_ms": None, "speedup": None, "cannot_run": refused}
    return {"step_ms": step.time_ms, "speedup": baseline_ms / step.time_ms, "cannot_run": {}}


def _policy_lines(found: dict[str, Any], name: str, verdict: Any) -> list[str]:
    """Return the text of :func:`_under`."""
    cannot = [f"{len(names)} layers: {why}" for why, names in found["cannot_run"].items()]
    if cannot:
        return [f"policy    {name} does not run on the target: {'; '.join(cannot)}"]
    gain = f"{found['speedup']:.2f}x over {verdict.baseline_run}"
    return [f"policy    {_ms(found['step_ms'])} ms under {name}: {gain}; {verdict.label}"]


def _more(model: Any, verdict: Any, plans: Any, *, sweep: bool) -> dict[str, Any]:
    """Return payback, what compiling would change, and sweeps where asked."""
    from autoprec.cost import judge, planning

    if model.report.source == "analytic" and not model.target.is_cpu:
        limits = planning.at_the_limit(model, plans, verdict.activations)
    else:
        limits = []
    paid = planning.payback(verdict.step_ms, verdict.bound_speedup, verdict.bound_over_script)
    out: dict[str, Any] = {"payback": paid, "at_the_limit": limits}
    if not model.compiled and not model.target.is_cpu:  # a policy may say `execution: compile`
        out["compiled"] = judge(model.executed("compile"), plans, written=verdict.written)
    if sweep:
        out["batch_sweep"] = planning.sweep(model, plans)
        out["sequence_sweep"] = planning.sweep(model, plans, sequence=True)
        out["break_even_tokens"] = planning.break_even_tokens(out["batch_sweep"])
    return out


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value.to_json() if hasattr(value, "to_json") else value


def _sweep_lines(points: list[Any], what: str) -> list[str]:
    """Return the table of a sweep; a batch that one device cannot hold says so."""
    rows = tuple(
        (
            f"{p.tokens:,}",
            _ms(p.step_ms),
            f"{p.bound_speedup:.2f}x",
            memory_text(p.memory_bytes) if p.memory_bytes else "-",
            f"{p.best_uniform} {p.best_uniform_speedup:.2f}x" + ("" if p.fits else "  (more than one device has)"),
        )
        for p in points
    )
    return ["", Table((what, "step ms", "bound", "memory", "best single choice"), rows).text()]


def _break_even(points: list[Any], found: int | None) -> str:
    if found is None:
        return "pays at no batch size looked at"
    notes = ["the smallest looked at"] if found == min(p.tokens for p in points) else []
    notes += ["which one device cannot hold"] if any(p.tokens == found and not p.fits for p in points) else []
    return f"pays from {found:,} tokens per step on" + (f" ({', '.join(notes)})" if notes else "")


def _more_lines(more: dict[str, Any]) -> list[str]:
    """Return the text of :func:`_more`."""
    from autoprec.cost.planning import HORIZON_STEPS

    paid = more["payback"]
    lines = [""]
    if paid.steps == float("inf"):
        lines.append(f"payback   never within {HORIZON_STEPS:,} steps: a search would gain next to nothing")
    else:
        lines.append(
            f"payback   a search costs about {span_text(paid.search_s)} of training steps, starting the script apart, "
            f"and is paid back after {paid.steps:,.0f} steps ({span_text(paid.hours * 3600)}) at the earliest"
        )
    if "compiled" in more:
        other = more["compiled"]
        lines.append(
            f"compiled  the step takes {_ms(other.step_ms)} ms as {other.baseline_run}; the bound there is "
            f"{other.bound_text}, verdict {other.kind}: a policy may say `execution: compile`"
        )
    for key, what in (("batch_sweep", "tokens per step"), ("sequence_sweep", "tokens, longer sequences")):
        if key in more:
            lines += _sweep_lines(more[key], what)
    if "break_even_tokens" in more:
        lines += ["", _break_even(more["batch_sweep"], more["break_even_tokens"])]
    return lines


def _limit_lines(limits: list[Any], baseline: str, device_bytes: int) -> list[str]:
    """Return the table of the largest micro-batches, and the sentence on which choice wins there."""
    from autoprec.cost.planning import USABLE_MEMORY

    best = limits[0]
    if not best.samples:
        return ["", f"no choice holds one sequence in {USABLE_MEMORY:.0%} of a device: --shards, --recompute full"]
    rate = next((limit.tokens_per_s for limit in limits if limit.choice == baseline), 0.0)
    rows = tuple(
        (
            p.choice,
            str(p.samples),
            f"{p.tokens_per_s:,.0f}",
            memory_text(p.memory_bytes),
            f"{p.tokens_per_s / rate:.2f}x"
            if rate and p.samples
            else "-"
            if p.samples
            else "one sequence does not fit",
        )
        for p in limits
    )
    title = f"in {USABLE_MEMORY:.0%} of one device's {memory_text(device_bytes)}, modelled"
    wins = f"at the limit of memory {best.choice} wins"
    headings = ("choice", "micro-batch", "tokens/s", "memory", f"over {baseline}")
    return ["", Table(headings, rows, title=title, notes=(wins,)).text()]


def _check_size(script: tuple[str, ...], batch: int, seq: int, shards: int) -> None:
    """Refuse what cannot be, and what would be ignored."""
    asked = click.get_current_context().get_parameter_source
    for name, count in (("batch", batch), ("seq", seq), ("shards", shards), ("recompute", 1)):
        if asked(name) is click.core.ParameterSource.COMMANDLINE and not is_description(script[0]):
            raise UsageError(f"--{name} has no effect on a script", fix=f"set it in the script, or leave --{name} out")
        if count < 1:
            raise UsageError(f"--{name} {count} is not a count", fix="use 1 or more")


@script_command("estimate")
@options.of_search("target")
@options.of_search("space", help="Search space whose choices are compared.")
@options.of_search("cost_scale")
@click.option("--policy", metavar="FILE", help="Also: a step under this policy, or under published:NAME.")
@click.option("--batch", default=SIZE[0], show_default=True, metavar="N", help="Of a config: sequences per device.")
@click.option("--seq", default=SIZE[1], show_default=True, metavar="N", help="Of a config: tokens per sequence.")
@click.option(
    "--recompute",
    type=click.Choice(("none", "selective", "full")),
    default="none",
    show_default=True,
    help="Of a config: activations that are computed again in the backward pass (selective: as torchtitan does).",
)
@click.option("--shards", default=1, show_default=True, metavar="N", help="Of a config: GPUs that share its state.")
@click.option("--eager", is_flag=True, help="The script is not compiled: nothing is fused, every launch is paid.")
@options.of_search("calibration")
@click.option("--sweep", is_flag=True, help="Also: from which batch size and sequence length on it pays.")
@options.as_json("Everything")
def estimate(
    script: tuple[str, ...],
    target: str,
    space: str,
    cost_scale: str,
    policy: str | None,
    batch: int,
    seq: int,
    recompute: str,
    shards: int,
    eager: bool,
    calibration: str,
    sweep: bool,
    as_json: bool,
) -> int:
    """Say what a precision policy could gain for SCRIPT on a target, where, and why not.

    In the place of SCRIPT: a preset (llama3-70b), a decoder's config.json, or a step saved by `inspect --save`.
    """
    from autoprec.cli.policies.published import bound
    from autoprec.cost import CostModel, judge
    from autoprec.cost.calibrate.calibration import check_target, kept_calibration, load_calibration
    from autoprec.cost.reasons import AS_WRITTEN
    from autoprec.policy.space import default_space, load_space
    from autoprec.tuning.checks import check_scale
    from autoprec.tuning.decide.problem import Problem
    from autoprec.tuning.target import resolve_target

    _check_size(script, batch, seq, shards)
    scale = check_scale(cost_scale, target, calibration) if cost_scale else None
    given = load_space(space) if space else None
    measured = load_calibration(Path(calibration)) if calibration else None
    if target != "auto":
        asked, _ = resolve_target(target, "cpu")  # an unknown name is refused before the script is started
        if measured:
            check_target(measured, asked, calibration)
    with Phases() as phases:
        report, host = step_of(script, phases, batch=batch, seq=seq, recompute="" if recompute == "none" else recompute)
    device = host.device if host else _device_here() if target == "auto" else "cpu"
    tunable(report)
    found, here = resolve_target(target, device)
    if measured:
        check_target(measured, found, calibration)
    elif here and device != "cpu":
        measured = kept_calibration(device)
    model = CostModel(report, found, scale=scale, compiled=not eager, calibration=measured, shards=shards)
    chosen = given or default_space(found)
    problem = Problem.build(report, chosen, model.can_run)
    plans = {name: problem.plans(problem.params_of(name)) for name in problem.choice_names}
    named = shlex.join(redact_arguments(script)) if host else "SCRIPT"
    written = AS_WRITTEN if host or is_saved_step(script[0]) else _CONFIGURED
    verdict = judge(model, plans, executions=chosen.execution, script=named, written=written)
    step = model.estimate(plans.get(verdict.baseline, {}), activations=verdict.activations)
    more = _more(model, verdict, plans, sweep=sweep)
    memory = _memory(model, verdict, plans)
    under = _under(bound(policy, lambda: report), model, step.time_ms) if policy else None
    as_compiled = host is not None and not host.compiled and not eager and not found.is_cpu
    if as_json:
        document = {
            "target": found.name,
            "space": chosen.name,
            "cost_scale": cost_scale,
            "verdict": verdict.to_json(),
            "step": step.to_json(),
            "memory": memory,
            "source": "modelled",
            "as_compiled": as_compiled,
            **({"policy": {"name": policy, **under}} if under else {}),
            **{key: _plain(value) for key, value in more.items()},
        }
        print_json(document)
    else:
        offered = f"{', '.join(problem.choice_names)} (space {chosen.name})"
        head = [*_lines(verdict, step, offered), _memory_line(memory, verdict)]
        head += ["modelled  as if compiled, which the script is not: --eager models it as it runs"] * as_compiled
        head += [*(_policy_lines(under, str(policy), verdict) if under else []), *_layer_lines(verdict, 12)]
        limits = more["at_the_limit"]
        held = _limit_lines(limits, verdict.baseline, found.memory_bytes) if limits else []
        echo("\n".join([*head, *held, *_more_lines(more)]))
    return 0
