"""``autoprec transfer``: a policy that was found on a small model, for one on which no trial can be afforded."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoprec.cli import options
from autoprec.cli.console import plain_table, print_json, stdout_console
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.policies.export import known_layers
from autoprec.cli.recording import SIZE, is_description, is_saved_step, record, running, step_of
from autoprec.cli.scripts.spot import ask, print_spot
from autoprec.errors import AuditError, UsageError
from autoprec.graph.report import GraphReport, Layer, load_report
from autoprec.graph.roles import ROLES, parse_hints, shown
from autoprec.policy import Policy, load_policy, save_policy
from autoprec.precision.hardware import Target
from autoprec.support.files import check_writable
from autoprec.support.units import memory_text, speed_text
from autoprec.tuning.target import resolve_target

if TYPE_CHECKING:
    from autoprec.tuning.transfer.plan import Transfer
    from autoprec.tuning.transfer.proxy import Proxy
    from autoprec.tuning.transfer.spot import SpotCheck


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
    """Return one row per rule of the small model's policy that says something: where it went."""
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


def _findings(policy: Policy, report: GraphReport, device: Target, output: str) -> list[dict[str, Any]]:
    """Return what ``autoprec lint`` says of the transferred policy on the big model's recorded step."""
    from autoprec.tuning.lint.facts import Facts
    from autoprec.tuning.lint.rules import findings

    if report.source == "names":
        return []
    return [one.to_json() for one in findings(Facts(policy, output, report=report, targets=[device]))]


def _document(
    output: str, device: Target, policy: Policy, proxy: Proxy, report: GraphReport, found: Transfer
) -> dict[str, Any]:
    places = found.matched.here
    return {
        "policy": output,
        "source": "modelled",
        "target": device.name,
        "rules": _rule_rows(policy, proxy, found),
        "no_counterpart": [
            {"layers": shown([n]), "guess": places[n].role or places[n].guess} for n in found.matched.alone
        ],
        "lost": [
            {"layers": shown(x.layers), "count": len(x.layers), "recipe": x.choice, "reason": x.reason}
            for x in found.lost
        ],
        "not_tunable": _untouched(report),
        "step": found.step.to_json() if found.step else None,
        "baseline": found.baseline.to_json() if found.baseline else None,
        "speedup": found.speedup if found.step else None,
        "memory": {"bytes": found.step.memory_bytes, "device_bytes": device.memory_bytes} if found.step else None,
        "phases": [
            {"from": phase.start, "speedup": one.speedup} for phase, one in zip(policy.phases, found.later, strict=True)
        ],
    }


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
    stdout_console().print(plain_table(("rule", "recipe", "role", "layers here", "as asked"), rows))
    for row in document["lost"]:
        echo(f"dropped   {row['recipe']} on {row['layers']} ({row['count']} layers): {row['reason']}")
    for row in document["not_tunable"]:
        echo(
            f"kept      {row['layers']} ({row['count']} layers, {row['flops_share']:.0%} of the FLOPs): {row['reason']}"
        )
    if document["no_counterpart"]:
        echo(f"kept      {shown(found.matched.alone)}: no counterpart in the small model")
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
        echo(f"phase     from {phase.label} on: {row['speedup']:.2f}x; the table above is of how the run begins")
    for row in document["findings"]:
        echo(f"{row['severity']:9} {row['message']} [{row['code']}]")


class _TakesModel(click.Command):
    """A command line that ends with the big model: what follows ``--`` is the script's."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return ["[OPTIONS]", "POLICY", "--", "train_big.py [SCRIPT ARGS]..."]


@click.command("transfer", cls=_TakesModel)
@click.argument("policy", type=click.Path(path_type=Path))
@click.argument("script", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--from",
    "proxy",
    type=click.Path(path_type=Path),
    metavar="STUDY|STEP|CONFIG",
    help="Folder of the study that found POLICY; or a saved step of its own model, that model's config.json.",
)
@click.option(
    "--spot",
    default=0,
    metavar="N",
    type=click.IntRange(min=0),
    help="Also: its gradient error on the script's recorded step, N passes; segments beyond the limit go to 16 bits.",
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
    proxy: Path | None,
    spot: int,
    roles: tuple[str, ...],
    target: str,
    batch: int,
    seq: int,
    output: str,
    force: bool,
    as_json: bool,
) -> int:
    """Carry POLICY, found on a small model, over to a big one that cannot be searched.

    Rules go by role and relative depth; one that no longer pays there is dropped, with its reason. The script is
    recorded without its weights, with --spot with them. In its place: a model's config.json, a saved step,
    or a list of layer names (.txt, one per line).
    """
    from autoprec.cost import CostModel
    from autoprec.tuning.transfer.plan import transfer as carry
    from autoprec.tuning.transfer.plan import with_evidence
    from autoprec.tuning.transfer.proxy import Proxy

    words = _words(script, spot)
    options.check_absent(Path(output), force=force)
    check_writable(output)
    small: Policy = load_policy(policy)
    found_at = _study_of(small, policy, proxy)
    size = {} if is_saved_step(str(proxy)) else {"batch": batch, "seq": seq}  # which has its own
    known = load_report(found_at / "graph.json") if found_at else _step([str(proxy)], **size)
    hints, device, origin = parse_hints(roles), _target(target, small), Proxy.of(small, known)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    study = found_at.resolve().name if found_at is not None else ""

    def carried(report: GraphReport) -> tuple[Transfer, Policy]:
        cost = None if report.source == "names" else CostModel(report, device)
        done = carry(small, origin, report, cost, hints=hints)
        return done, with_evidence(done, small, origin, report, device.name, study=study, date=today)

    checks: tuple[SpotCheck, ...] = ()
    if spot:
        with Phases() as phases, running(words, phases) as (runner, host, label):
            report = record(runner, label, phases)
            result, written = carried(report)
            backend = "auto" if resolve_target(device.name, host.device)[1] else "emulated"
            phases.begin(f"{spot} forward and backward passes on the model itself")
            written, checks = _held(lambda p, n: ask(runner, host, label, p, report, n, backend), written, report, spot)
    else:
        report = _step(words, batch=batch, seq=seq)
        result, written = carried(report)
    save_policy(written, output)
    document = _document(output, device, small, origin, report, result)
    document |= {"findings": _findings(written, report, device, output)}
    document |= {"spot": [check.to_json() for check in checks]}
    if as_json:
        print_json(document)
    else:
        _print(document, result)
        for check in checks:
            print_spot(check)
        echo(f"wrote     {output}" + ("" if checks else "; does it hold? a few passes on the big model tell:"))
        if not checks:
            echo(f"          autoprec check --policy {output} --sensitivity 8 SCRIPT")
    if checks and not checks[-1].within:
        raise AuditError(
            f"the gradient error is {checks[-1].error:.4f} on this model, beyond {checks[-1].limit:.4f}",
            where=output,
            fix="what it runs beside the layers errs as well: `autoprec inspect --sensitivity` says what",
        )
    return 0


def _words(script: tuple[str, ...], spot: int) -> tuple[str, ...]:
    """Return what describes the big model, a launcher behind its ``--``.

    Raises:
        UsageError: there is nothing; or it cannot take the passes that were asked of it.
    """
    if not script:
        fix = "autoprec transfer policy.yaml -- train_big.py [script args]"
        raise UsageError("the big model is missing", fix=fix)
    described = is_description(script[0]) or script[0].endswith(".txt")
    if spot and described:
        fix = "name its training script: autoprec transfer --spot 8 policy.yaml -- train_big.py"
        raise UsageError("--spot runs the model, and this only describes one", where=script[0], fix=fix)
    plain = described or script[0].endswith(".py") or script[0] == "-m"
    return script if plain else ("--", *script)


def _held(
    passes: Callable[[Policy, int], SpotCheck], policy: Policy, report: GraphReport, count: int
) -> tuple[Policy, tuple[SpotCheck, ...]]:
    """Return a policy that is within the limit on the model, as far as its layers can do that, and each check.

    Args:
        passes: runs a spot check of a policy, of so many passes.
        policy: what is checked first.
        report: the recorded step of the model.
        count: passes of the first check; a corrected policy is checked as a whole, by one.
    """
    from autoprec.tuning.transfer.spot import corrected

    first = passes(policy, count)
    if first.within:
        return policy.model_copy(update={"evidence": {**policy.evidence, "spot_check": first.evidence()}}), (first,)
    mended, removed = corrected(policy, report, first)
    if not removed:
        return mended, (first,)
    return mended, (first, passes(mended, 1))


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
