"""``autoprec estimate``: a search stopped at its verdict: what could be gained on a target, where, and why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from autoprec.cli import options
from autoprec.cli.console import print_json
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.policies.published import bound
from autoprec.cli.recording import SIZE, is_description, is_saved_step, step_of
from autoprec.cli.script import script_command
from autoprec.errors import UsageError
from autoprec.policy import resolve
from autoprec.precision.hardware import limit_bytes
from autoprec.precision.recipes import AS_WRITTEN
from autoprec.support.units import memory_text
from autoprec.trial.protocol import HostInfo
from autoprec.tuning.checks import check_names
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.phases.record import tunable


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
        "usable_bytes": model.target.usable_bytes,
        "fits": base is None or base["total"] <= model.target.usable_bytes,
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
    has = f"{memory_text(memory['usable_bytes'])} that one device of {memory_text(device)} has less a margin"
    return f"{line}MORE than the {has}: shard, checkpoint, or cut the batch"


#: A batch so many times as large is as fast as any larger one.
_MOST_TIMES = 10_000


def _batches(model: Any, verdict: Any, plans: Any, limit: int) -> list[dict[str, Any]]:
    """Return, for the baseline and each choice, the largest batch that fits within ``limit`` bytes, and its speed.

    The model is asked at that batch, of as many micro-batches as the step has; nothing where the record does not say
    how large it is.
    """
    samples, tokens = (model.report.batch.get(name, 0) for name in ("samples", "tokens"))
    parts = model.report.batch.get("micro_batches", 1)
    rows = []
    for choice in (verdict.baseline, *(name for name in plans if name != verdict.baseline)):
        most = model.most_samples(plans.get(choice, {}), limit, activations=verdict.activations)
        if most is None:
            return []
        most -= most % parts
        row = {"choice": choice, "samples": most, "micro_batch": most // parts}
        row |= {"samples_per_s": None, "tokens_per_s": None}
        if most:
            taken = min(most, samples * _MOST_TIMES)
            scale = replace(model.scale, tokens=model.scale.seq * taken / samples)
            step = model.at(scale).estimate(plans.get(choice, {}), activations=verdict.activations)
            row["samples_per_s"] = taken / step.time_ms * 1e3
            row["tokens_per_s"] = row["samples_per_s"] * tokens * model.scale.seq / samples if tokens else None
        rows.append(row)
    return rows


def _batch_line(rows: list[dict[str, Any]], limit: int) -> str:
    """Return the text of :func:`_batches`: the baseline, the fastest and the largest, each over the first of these."""
    fits = [row for row in rows if row["samples"]]
    if not fits:
        return f"batch     no micro-batch fits in {memory_text(limit)}, not even of one sample: shard or checkpoint"
    fastest = max(fits, key=lambda row: row["samples_per_s"])
    largest = max(fits, key=lambda row: (row["samples"], row["samples_per_s"]))
    told = {row["choice"]: row for row in (*fits[:1], fastest, largest)}
    first = fits[0]  # a sample of one token is a sample: there are no sequences
    unit = "tokens" if (first["tokens_per_s"] or 0.0) > 1.001 * first["samples_per_s"] else "samples"
    listed = []
    for row in told.values():
        gain = "" if row is first else f", {row['samples_per_s'] / first['samples_per_s']:.2f}x"
        listed.append(f"{row['choice']} {row['micro_batch']:,} ({_ms(row[f'{unit}_per_s'])} {unit}/s{gain})")
    most = f"batch     largest micro-batch within {memory_text(limit)} of one device: {', '.join(listed)}"
    return most + (f"; {fastest['choice']} is the fastest there" if len(told) > 1 else "")


def _under(policy: Any, model: Any, baseline_ms: float) -> dict[str, Any]:
    """Return what a step would take under a policy, as it begins; nothing where layers of it cannot run on the target.

    ``cannot_run`` maps the reason to those layers.
    """
    plans = resolve(policy.stages[0], [layer.name for layer in model.report.tunable])
    step = model.under(policy, plans)
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


def _subject(script: tuple[str, ...], config: str | None) -> tuple[str, ...]:
    """Return what is estimated: a script with its arguments, or one file.

    Raises:
        UsageError: neither was given, or both; or ``--config`` is not a configuration.
    """
    if config is None:
        if not script:
            raise UsageError("which script?", fix="autoprec estimate train.py, or --config config.json")
        return script
    if script:
        raise UsageError(f"--config stands in the place of a script: found {script[0]}", fix="give one of them")
    if not config.endswith(".json"):
        raise UsageError(f"--config {config} is not a .json file", fix="--config config.json")
    return (config,)


@script_command("estimate", required=False)
@options.of_search("target")
@options.of_search("space", help="Search space whose choices are compared.")
@options.of_search("cost_scale")
@click.option("--config", metavar="FILE", help="In the place of SCRIPT: a config.json, built by transformers.")
@click.option("--policy", metavar="FILE", help="Also: a step under this policy, or under published:NAME.")
@click.option("--batch", default=SIZE[0], show_default=True, metavar="N", type=click.IntRange(min=1),
              help="Of a config: sequences per device.")  # fmt: skip
@click.option("--seq", default=SIZE[1], show_default=True, metavar="N", type=click.IntRange(min=1),
              help="Of a config: tokens per sequence.")  # fmt: skip
@click.option(
    "--recompute",
    type=click.Choice(("none", "selective", "full")),
    default="none",
    show_default=True,
    help="Of a config: activations that are computed again in the backward pass (selective: as torchtitan does).",
)
@click.option("--shards", default=1, show_default=True, metavar="N", type=click.IntRange(min=1),
              help="Of a config: GPUs that share its state.")  # fmt: skip
@options.as_json("Everything")
def estimate(
    script: tuple[str, ...],
    target: str,
    space: str,
    cost_scale: str,
    config: str | None,
    policy: str | None,
    batch: int,
    seq: int,
    recompute: str,
    shards: int,
    as_json: bool,
) -> int:
    """Say what a precision policy could gain for SCRIPT on a target, where, and why not.

    In the place of SCRIPT: a model's config.json (or --config FILE), or what `inspect --json` printed.
    """
    from autoprec.tuning.setup import Setup

    script = _subject(script, config)
    if (batch, seq, recompute, shards) != (*SIZE, "none", 1) and not is_description(script[0]):
        what = "--batch, --seq, --recompute and --shards have no effect on a script"
        raise UsageError(what, fix="set it in the script, or leave them out")
    command = ("SCRIPT",) if is_description(script[0]) else script  # what a reason tells to search
    asked = SearchOptions(command=command, target=target, space=space, cost_scale=cost_scale)
    check_names(asked)
    with Phases() as phases:
        report, host = step_of(script, phases, batch=batch, seq=seq, recompute="" if recompute == "none" else recompute)
    device = host.device if host else _device_here() if target == "auto" else "cpu"
    described = HostInfo("process", dict(report.model), (), (), device, compiled=True)  # a model is as good as compiled
    setup = Setup.of(asked, host or described, tunable(report), shards=shards)
    model, plans, found = setup.cost, setup.plans, setup.target
    verdict = setup.verdict(written=AS_WRITTEN if host or is_saved_step(script[0]) else _CONFIGURED)
    step = model.estimate(plans.get(verdict.baseline, {}), activations=verdict.activations)
    memory, limit = (
        _memory(model, verdict, plans),
        limit_bytes(found, host.device_bytes if host and setup.measured else 0),
    )
    batches = _batches(model, verdict, plans, limit) if memory["baseline"] else []
    under = _under(bound(policy, lambda: report), model, step.time_ms) if policy else None
    as_compiled = host is not None and not host.compiled and model.compiled and not found.is_cpu
    if as_json:
        document = {
            "target": found.name,
            "space": setup.space.name,
            "cost_scale": cost_scale,
            "verdict": verdict.to_json(),
            "step": step.to_json(),
            "memory": memory | {"limit_bytes": limit, "largest": batches},
            "source": "modelled",
            "as_compiled": as_compiled,
            **({"policy": {"name": policy, **under}} if under else {}),
        }
        print_json(document)
    else:
        offered = f"{', '.join(plans)} (space {setup.space.name})"
        head = [*_lines(verdict, step, offered), _memory_line(memory, verdict)]
        head += [_batch_line(batches, limit)] if batches else []
        head += ["modelled  as if compiled, which the script is not"] * as_compiled
        head += [*(_policy_lines(under, str(policy), verdict) if under else []), *_layer_lines(verdict, 12)]
        echo("\n".join(head))
    return 0
