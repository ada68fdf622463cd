"""``autoprec show``: a policy as a table a person can read, what two policies differ in, and the schema of files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from pydantic import BaseModel

from autoprec.cli import options
from autoprec.cli.console import print_json, stdout_console
from autoprec.cli.echo import echo
from autoprec.cli.policies.published import bound, print_published
from autoprec.cli.recording import is_saved_step
from autoprec.errors import UsageError
from autoprec.graph.report import GraphReport, load_report
from autoprec.policy import Policy, diff_policies, document, first_match, load_policy, resolve
from autoprec.policy.library import is_published
from autoprec.policy.space import SearchSpace
from autoprec.policy.table import policy_table
from autoprec.support.units import memory_text

if TYPE_CHECKING:
    from rich.console import Console

_FRACTIONS = (
    *("divergence", "noise_floor", "interval", "max_divergence", "max_change"),
    *("gradient_error", "gradient_noise", "gain_over_preset"),
)

#: Sections that say what was found, not what would run.
_TOLD = ("evidence", "guard")


def _rows_of_layers(policy: Policy, graph: GraphReport) -> list[tuple[str, ...]]:
    plans = resolve(policy, [layer.name for layer in graph.tunable])
    rows: list[tuple[str, ...]] = []
    for layer in graph.layers:
        share = f"{layer.total_flops / graph.total_flops:.1%}" if graph.total_flops else ""
        if layer.name not in plans:
            rows.append((layer.name or "(root)", share, "not tunable", layer.reason, "", ""))
            continue
        rule = first_match(policy.layers, layer.name)
        match = rule.match or "(root)" if rule else "default"
        rows.append((layer.name or "(root)", share, match, *plans[layer.name].labels.values()))
    return rows


def _value(name: str, value: Any) -> str:
    if name in _FRACTIONS and isinstance(value, (int, float)):
        return f"{100 * value:.4g}%"
    if "speedup" in name and isinstance(value, (int, float)):
        return f"{value:.2f}x"
    if name == "memory_bytes" and isinstance(value, (int, float)):
        return memory_text(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)


def _print_facts(console: Console, title: str, facts: dict[str, Any]) -> None:
    if not facts:
        return
    console.print(f"[bold]{title}[/bold]")
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"  {name.ljust(width)}  ", markup=False, end="")
        console.print(_value(name, value), markup=False)


@click.command("show", short_help="Print a policy with its evidence, or what two differ in.")
@click.argument("policy", required=False, type=click.Path(path_type=Path))
@click.argument("other", required=False, type=click.Path(path_type=Path))
@click.option("--schema", type=click.Choice(["policy", "space"]), help="The JSON Schema of such files instead.")
@click.option("--lean", is_flag=True, help="As YAML to commit: what runs, and little of the evidence.")
@options.as_json("The policy, the plan of each layer, or the differences")
def show(policy: Path | None, other: Path | None, schema: str | None, lean: bool, as_json: bool) -> int:
    """Print POLICY as a table: what each layer runs, what surrounds the layers, and why.

    With --lean: the file to commit. With OTHER: what changed from the first to the second, and exit code 1 if that is
    anything that would run. With a step saved by `autoprec inspect --json` in OTHER's place: layer by layer.

    POLICY may be `published:` (the list of policies that others have published) or `published:NAME`.
    """
    if (policy is None) == (schema is None):
        fix = "autoprec show policy.yaml [step.json | OTHER.yaml]"
        raise UsageError("give a policy, two policies to compare, or --schema", fix=fix)
    if schema is not None:
        print_json(_schema(schema), indent=2)
        return 0
    graph = other if other is not None and is_saved_step(str(other)) else None
    if is_published(str(policy)) and graph is None:
        print_published(str(policy), as_json=as_json)
        return 0
    report = load_report(graph) if graph else None
    loaded = bound(str(policy), lambda: cast("GraphReport", report))
    if lean:
        echo(document.yaml_text(document.lean(loaded)).rstrip())
        return 0
    if other is not None and graph is None:
        return _print_differences(loaded, load_policy(other), as_json=as_json)
    if not as_json:
        _print(loaded, report, str(policy))
        return 0
    shown: dict[str, Any] = {"policy": loaded.to_dict()}
    if report is not None:
        plans = resolve(loaded, [layer.name for layer in report.tunable])
        shown["layers"] = {name: plan.labels for name, plan in plans.items()}
    print_json(shown)
    return 0


def _text(value: Any) -> str:
    if value is None:
        return "(absent)"
    return value if isinstance(value, str) else json.dumps(value)


def _print_differences(a: Policy, b: Policy, *, as_json: bool) -> int:
    """Print what changed from one policy to another, what would run first; return 1 if any of that did."""
    rows = diff_policies(a, b)
    told = [row for row in rows if row[0].partition(".")[0] in _TOLD]
    run = [row for row in rows if row not in told]
    if as_json:
        changes = [{"where": where, "a": old, "b": new} for where, old, new in (*run, *told)]
        print_json({"same": not run, "differences": changes})
        return 1 if run else 0
    for where, old, new in run:
        echo(f"{where}: {_text(old)} -> {_text(new)}")
    if not run:
        echo("no difference in what runs")
    for where, old, new in told:
        echo(f"({where}: {_text(old)} -> {_text(new)})")
    return 1 if run else 0


def _schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of policies or search spaces, for editors and other programs."""
    described: type[BaseModel] = Policy if kind == "policy" else SearchSpace
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described.model_json_schema(by_alias=True)}


def _print(policy: Policy, report: GraphReport | None, label: str) -> None:
    table = policy_table(policy)
    if report is not None:
        headings = ("layer", "flops", "rule", *table.headings[2:])
        table = replace(table, headings=headings, rows=tuple(_rows_of_layers(policy, report)))
    console = stdout_console()
    console.print(label, style="bold", markup=False)
    console.print(table.rich())
    sections = {"backends": "backends that run the GEMMs, where they are installed", "why": "why"}
    _print_facts(console, "evidence", {k: v for k, v in policy.evidence.items() if k not in sections})
    for name, title in sections.items():
        told = policy.evidence.get(name)
        rows = dict(told) if isinstance(told, dict) else {}
        _print_facts(console, title, {k: v.get("reason", v) if isinstance(v, dict) else v for k, v in rows.items()})
    if policy.guard is not None:
        _print_facts(console, "guard: watch in the long run", dict(policy.guard.thresholds))
        _print_facts(console, "fall back to, in order", {str(i + 1): v for i, v in enumerate(policy.guard.fallback)})
