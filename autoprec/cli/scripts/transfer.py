"""``autoprec transfer``: a policy that was found on a proxy, for a model on which no trial can be afforded."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoprec.cli import options
from autoprec.cli.console import plain_table, print_json, stdout_console
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.policies.export import known_layers
from autoprec.cli.recording import SIZE, is_description, is_saved_step, step_of
from autoprec.errors import UsageError
from autoprec.graph.report import GraphReport, Layer
from autoprec.graph.roles import ROLES, parse_hints, shown
from autoprec.policy import Policy, load_policy, save_policy
from autoprec.precision.hardware import Target
from autoprec.support.files import check_writable, read_document
from autoprec.support.units import memory_text, speed_text
from autoprec.tuning.target import resolve_target
from autoprec.tuning.transfer.law import SPREAD

if TYPE_CHECKING:
    from autoprec.tuning.transfer.plan import Transfer
    from autoprec.tuning.transfer.proxy import Proxy


def _step(words: Sequence[str], *, batch: int = SIZE[0], seq: int = SIZE[1]) -> GraphReport:
    """Return the step of a model by what describes it; a list of names has no shapes."""
    if [word[-4:] for word in words] == [".txt"]:
        return _named_layers(Path(words[0]))
    with Phases() as phases:
        return step_of(words, phases, batch=batch, seq=seq, weights="fake")[0]


def _named_layers(path: Path) -> GraphReport:
    layers = tuple(
        Layer(name, "", "linear", f"{name}.weight", name, (), 0, True, "named in a list") for name in known_layers(path)
    )
    model = {"class": path.stem, "parameters": 0, "fingerprint": ""}
    return GraphReport(model, layers, (), {}, 0, 0.0, source="names")


def _rule_rows(policy: Policy, proxy: Proxy, found: Transfer) -> list[dict[str, Any]]:
    """Return one row per rule of the proxy's policy that says something: where it went."""
    from autoprec.tuning.transfer.proxy import choice_of_rule

    rows = []
    for number in [*range(len(policy.layers)), -1]:
        small = [name for name, rule in proxy.rules.items() if rule == number]
        big = [name for name, rule in found.rules.items() if rule == number]
        if number < 0 and not big:
            continue
        choice = choice_of_rule(policy, number)
        kept = [name for name in big if found.choices[name] == choice]
        roles = dict.fromkeys(found.matched.here[name].role for name in big)
        rows.append(
            {
                "rule": policy.layers[number].match if number >= 0 else "(default)",
                "recipe": choice,
                "roles": [ROLES.get(role, "same name") for role in roles],
                "proxy_layers": len(small),
                "layers": len(big),
                "as_asked": len(kept),
                "where": shown(big) if big else "",
            }
        )
    return rows


def _document(
    output: str, device: Target, policy: Policy, proxy: Proxy, report: GraphReport, found: Transfer
) -> dict[str, Any]:
    predicted, places = found.predicted, found.matched.here
    return {
        "policy": output,
        "source": "modelled",
        "target": device.name,
        "growth": found.growth.to_json(),
        "rules": _rule_rows(policy, proxy, found),
        "no_counterpart": [
            {"layers": shown([n]), "guess": places[n].role or places[n].guess} for n in found.matched.alone
        ],
        "lost": [
            {"layers": shown(x.layers), "count": len(x.layers), "recipe": x.choice, "reason": x.reason}
            for x in found.lost
        ],
        "filled": _filled_rows(found),
        "not_tunable": _untouched(report),
        "gradient_error": {
            "predicted": predicted.error,
            "low": predicted.error / SPREAD,
            "high": predicted.error * SPREAD,
            "noise": predicted.noise,
            "budget": predicted.budget,
            "segments": predicted.segments,
        },
        "step": found.step.to_json() if found.step else None,
        "baseline": found.baseline.to_json() if found.baseline else None,
        "speedup": found.speedup if found.step else None,
        "memory": {"bytes": found.step.memory_bytes, "device_bytes": device.memory_bytes} if found.step else None,
        "phases": [
            {"from": phase.start, "speedup": one.speedup, "gradient_error": one.predicted.error}
            for phase, one in zip(policy.phases, found.later, strict=True)
        ],
    }


def _filled_rows(found: Transfer) -> list[dict[str, Any]]:
    changes: dict[tuple[str, str], list[str]] = {}
    for name, before, after in found.filled:
        changes.setdefault((before, after), []).append(name)
    return [
        {"layers": shown(names), "count": len(names), "before": before, "after": after}
        for (before, after), names in changes.items()
    ]


def _untouched(report: GraphReport) -> list[dict[str, Any]]:
    """Return what no policy changes though it has a twentieth of the FLOPs or more, by reason."""
    grouped: dict[str, list[Any]] = {}
    for layer in report.layers:
        if not layer.tunable:
            grouped.setdefault(layer.reason, []).append(layer)
    shares = {why: sum(x.total_flops for x in found) / (report.total_flops or 1) for why, found in grouped.items()}
    return [
        {"layers": shown([x.name for x in found]), "count": len(found), "flops_share": shares[why], "reason": why}
        for why, found in grouped.items()
        if shares[why] >= 0.05
    ]


def _print(document: dict[str, Any], found: Transfer) -> None:
    rows = [
        (
            row["rule"],
            row["recipe"],
            "; ".join(row["roles"]) or "-",
            row["where"] or "nothing of its kind here",
            f"{row['as_asked']} of {row['layers']}" if row["layers"] else "-",
        )
        for row in document["rules"]
    ]
    stdout_console().print(plain_table(("rule of the proxy", "recipe", "role", "layers here", "as asked"), rows))
    for row in document["lost"]:
        echo(f"dropped   {row['recipe']} on {row['layers']} ({row['count']} layers): {row['reason']}")
    for row in document["filled"]:
        echo(f"changed   {row['layers']} ({row['count']} layers): {row['before']} -> {row['after']}, within the budget")
    for row in document["not_tunable"]:
        echo(
            f"kept      {row['layers']} ({row['count']} layers, {row['flops_share']:.0%} of the FLOPs): {row['reason']}"
        )
    if document["no_counterpart"]:
        echo(f"kept      {shown(found.matched.alone)}: no counterpart in the proxy")
    error = document["gradient_error"]
    echo(f"growth    {found.growth.describe()} (of the proxy)")
    if error["predicted"] == error["predicted"]:
        echo(
            f"error     {error['predicted']:.4f} of the gradient predicted (nine times in ten {error['low']:.4f} to "
            f"{error['high']:.4f}), budget {error['budget']:.4f}; mini-batch noise {error['noise']:.3f} "
            "(by the law of docs/long_run.md)"
        )
    else:
        echo("error     not predicted: the proxy's study was not found (--from)")
    if found.step is not None and found.baseline is not None:
        echo(
            f"step      {found.step.time_ms:,.4g} ms against {found.baseline.time_ms:,.4g} ms in 16 bits: "
            f"{speed_text(found.speedup, *found.bounds)} on {document['target']}; {found.step.label}"
        )
        memory = document["memory"]
        if memory and memory["bytes"]:
            echo(f"memory    {memory_text(memory['bytes'])}; one device has {memory_text(memory['device_bytes'])}")
    else:
        echo("step      not modelled: a list of names has no shapes")
    for row, phase in zip(document["phases"], found.policy.phases, strict=True):
        error = f", error {row['gradient_error']:.4f}" if row["gradient_error"] == row["gradient_error"] else ""
        echo(f"phase     from {phase.label} on: {row['speedup']:.2f}x{error}; the table above is of how the run begins")


class _TakesTarget(click.Command):
    """A command line that ends with the big model: what follows a script's name after ``--to`` is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        at = next((i for i, word in enumerate(words) if word == "--to" or word.startswith("--to=")), None)
        if at is None:
            return super().parse_args(ctx, words)
        joined = words[at].partition("=")[2]
        after = [*([joined] if joined else []), *words[at + 1 :]]
        of_a_script = after and not is_description(after[0]) and not after[0].endswith(".txt")
        return super().parse_args(ctx, [*words[:at], "--" if of_a_script else "--to", *after])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return ["POLICY", "[OPTIONS]", "--to", "train_big.py [SCRIPT ARGS]..."]


@click.command("transfer", cls=_TakesTarget)
@click.argument("policy", type=click.Path(path_type=Path))
@click.argument("script", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--to",
    "config",
    default="",
    metavar="MODEL",
    help="The big model: its script, config.json, preset, a saved step, or its layer names alone, one per line.",
)
@click.option(
    "--from",
    "proxy",
    type=click.Path(path_type=Path),
    metavar="STUDY|STEP|CONFIG",
    help="Folder of the study that found POLICY; or a saved step of its own model, that model's config.json or preset.",
)
@click.option(
    "--spot",
    type=click.Path(path_type=Path),
    help="`autoprec check --sensitivity 8 --json` of an earlier transfer to this model: it corrects the predictions.",
)
@click.option("--role", "roles", multiple=True, metavar="GLOB=ROLE", help="What layers are whose names do not tell.")
@click.option(
    "--target", default="", metavar="NAME", help="A GPU of `autoprec doctor --targets`; default: the policy's."
)
@click.option("--batch", default=SIZE[0], show_default=True, metavar="N", help="With a config: sequences per device.")
@click.option("--seq", default=SIZE[1], show_default=True, metavar="N", help="With a config: tokens per sequence.")
@click.option(
    "-o", "--output", default="transferred.yaml", show_default=True, metavar="FILE", help="Where to write it."
)
@options.force
@options.as_json("Everything")
def transfer(
    policy: Path,
    script: tuple[str, ...],
    config: str,
    proxy: Path | None,
    spot: Path | None,
    roles: tuple[str, ...],
    target: str,
    batch: int,
    seq: int,
    output: str,
    force: bool,
    as_json: bool,
) -> int:
    """Carry POLICY, found on a small model, over to a big one that cannot be searched.

    The big model is a script (recorded without its weights), a decoder's config.json or preset, a saved step, or a list
    of layer names. Rules go by role and relative depth; one that no longer pays there is dropped, with its reason.
    """
    from autoprec.cost import CostModel
    from autoprec.tuning.transfer.correction import Correction
    from autoprec.tuning.transfer.evidence import with_evidence
    from autoprec.tuning.transfer.plan import transfer as carry
    from autoprec.tuning.transfer.proxy import Proxy, load_proxy
    from autoprec.tuning.verify import limits_of

    found_there = Correction.from_json(read_document(spot), where=str(spot)) if spot else None
    hints = parse_hints(roles)
    words = (config, *script) if config else script
    if not words:
        fix = "autoprec transfer policy.yaml --to train_big.py [script args]"
        raise UsageError("the big model is missing", fix=fix)
    options.check_absent(Path(output), force=force)
    check_writable(output)
    small: Policy = load_policy(policy)
    found_at = _study_of(small, policy, proxy)
    size = {} if is_saved_step(str(proxy)) else {"batch": batch, "seq": seq}  # which has its own
    origin = load_proxy(small, found_at) if found_at else Proxy.of(small, _step([str(proxy)], **size))
    device = _target(target, small)
    report = _step(words, batch=batch, seq=seq)
    cost = None if report.source == "names" else CostModel(report, device)
    limit = limits_of(small, None, None)["max_gradient_error"]
    result = carry(small, origin, report, cost, hints=hints, max_gradient_error=limit, correction=found_there)
    study_name = found_at.resolve().name if found_at is not None else ""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    save_policy(with_evidence(result, small, origin, report, device.name, study=study_name, date=today), output)
    document = _document(output, device, small, origin, report, result)
    if as_json:
        print_json(document)
        return 0
    _print(document, result)
    echo(f"wrote     {output}; a few passes on the big model tell whether it holds:")
    echo(f"          autoprec check --policy {output} --sensitivity 8 SCRIPT")
    return 0


def _study_of(small: Policy, path: Path, proxy: Path | None) -> Path | None:
    """Return the folder of the study that found a policy; None where only a step of its model is given."""
    from autoprec.tuning.transfer.proxy import find_study

    if proxy is not None:
        return proxy if proxy.is_dir() else None
    found = find_study(small, path, (Path("autoprec-runs"), path.parent / "autoprec-runs"))
    if found is None:
        raise UsageError(
            "the study that found this policy is not here, so the layers of its model are not known",
            where=str(path),
            fix="name its folder: --from autoprec-runs/NAME; or a step of that model saved by "
            "`autoprec inspect --json > proxy.json`: --from proxy.json",
        )
    return found


def _target(name: str, policy: Policy) -> Target:
    chosen = name or str(policy.evidence.get("target", ""))
    if not chosen or chosen == "auto":
        raise UsageError("the policy does not say which device it is for", fix="name it: --target h100")
    return resolve_target(chosen, "cpu")[0]
