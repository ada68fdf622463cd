"""``autoprec lint``: what is wrong with a policy or search space, or a script's own precision, without training."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from autoprec.cli import options
from autoprec.cli.console import print_json
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.recording import is_description, step_of
from autoprec.cli.script import script_command
from autoprec.errors import AuditError, AutoPrecError, FileError, UsageError
from autoprec.graph.report import MAX_GRAPH_BYTES
from autoprec.policy import Policy, load_policy
from autoprec.policy.space import space_from_dict
from autoprec.precision.hardware import load_targets
from autoprec.precision.hardware import target as target_named
from autoprec.reports.findings import TEXTS, counts, sarif, sound
from autoprec.support.files import read_document, read_text
from autoprec.support.redact import redact_arguments
from autoprec.support.units import counted
from autoprec.tuning.lint.facts import Facts
from autoprec.tuning.lint.rules import findings
from autoprec.tuning.lint.source import settings_of

_SILENCED = "a finding that is meant is silenced under `silenced:` in the policy, with a reason (docs/cli.md)"
_BASELINE = (
    "mend the script at the places that are named; findings that are meant are kept in a file and not told again: "
    "autoprec lint --json {words} > known.json, then --baseline known.json"
)
#: What is added to what was found where no step of the script could be looked at.
_UNSEEN = " by reading alone: no step of the script was looked at"
#: Seconds until a script has to reach its first step.
_WITHIN_S = 300.0


def _split(words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the file, empty where none is given, and the script's command line, or what describes a model.

    Raises:
        UsageError: there is neither, or an option stands between them.
    """
    policy = words[0] if words and _is_file(words[0]) else ""
    rest = words[1:] if policy else words
    if rest[:1] == ("--",):  # what follows is a launcher, where it is neither a script nor a model's description
        plain = len(rest) > 1 and (rest[1].endswith(".py") or rest[1] == "-m" or is_description(rest[1]))
        rest = rest[1:] if plain or len(rest) == 1 else rest
    elif rest and rest[0].startswith("-") and rest[0] != "-m":
        raise UsageError(
            f"{rest[0]} comes after the policy", fix="options come first: autoprec lint --strict policy.yaml"
        )
    if not (policy or rest):
        raise UsageError("neither a policy nor a script is named", fix="autoprec lint policy.yaml -- train.py")
    return policy, rest


def _is_file(word: str) -> bool:
    """Say whether a word is a file with a schema of AutoPrec's: JSON without one describes a model."""
    if word.endswith(".json"):
        return "schema" in read_document(word, most_bytes=MAX_GRAPH_BYTES, may_be_infinite=True)
    return word.endswith((".yaml", ".yml"))


def _loaded(path: str) -> tuple[str, Policy | None]:
    """Load a file by the schema that it names; return what it is, and the policy where it is one.

    Raises:
        FileError: it is not valid, or of no schema that AutoPrec knows.
    """
    document = read_document(path)
    schema = str(document.get("schema"))
    if schema == "autoprec.space/1":
        space = space_from_dict(document, where=path)
        return f"search space '{space.name}', {counted(len(space.choices), 'rule')} of choices", None
    if schema == "autoprec.targets/1":
        return f"table of targets: {', '.join(sorted(load_targets(path)))}", None
    if not schema.startswith("autoprec.policy/"):
        known = "autoprec.policy/1, autoprec.space/1, autoprec.targets/1"
        raise FileError(f"schema is '{schema}'", where=path, fix=f"the file names one of {known}")
    policy: Policy = load_policy(path)
    parts = [counted(len(policy.layers), "rule"), counted(len(policy.recipes), "recipe")]
    parts += [counted(len(policy.phases), "phase")] if policy.phases else []
    return f"policy, {', '.join(parts)}", policy


def _facts(loaded: Policy | None, path: str, words: tuple[str, ...], phases: Phases) -> tuple[Facts, list[str]]:
    """Return what is known of a policy and a script in the working directory, and what could not be seen."""
    facts = Facts(loaded, path, read_text(path) if loaded else "", settings=settings_of(words, Path.cwd()))
    unseen = [f"{word} comes after the script, so it is the script's and was not checked" for word in _policies(words)]
    if not words:
        return facts, ["no script was named: only the policy's own text was looked at"] if loaded else []
    try:
        # with a policy no value is needed, and so no memory for weights; without one the script's own step is judged
        weights = "fake" if loaded else ""
        report, _ = step_of(words, phases, weights=weights, timeout_s=_WITHIN_S, tunes=loaded is not None)
    except (UsageError, FileError):
        raise
    except AutoPrecError as error:
        said = [line.strip() for line in error.what.splitlines() if line.strip()]  # a traceback may follow
        why = ": ".join(dict.fromkeys((said[0], said[-1])))
        return facts, [*unseen, f"no step was recorded, so layers were not looked at: {why}"]
    here = str(Path.cwd())
    layers = tuple(replace(layer, where=layer.where.removeprefix(f"{here}/")) for layer in report.layers)
    own = loaded is None or is_description(words[0])  # weights of shards hold values under a policy, too
    judged = report.judged.within(here) if own and report.judged is not None else None
    unseen += judged.unseen if judged is not None else ()
    if not own:
        again = shlex.join(redact_arguments(words))
        unseen.append(f"the script's own precision was not judged: `autoprec lint {again}` does that")
    return replace(facts, report=replace(report, layers=layers, judged=judged)), unseen


def _policies(words: tuple[str, ...]) -> list[str]:
    """Return the policy files among a script's arguments."""
    files = [word for word in words if word.endswith((".yaml", ".yml")) and Path(word).is_file()]
    return [word for word in files if "schema: autoprec.policy/" in read_text(word)]


def _where_meant(words: tuple[str, ...], *, has_policy: bool) -> str:
    """Say what to do with findings that are meant: only a policy can silence some by itself."""
    return _SILENCED if has_policy else _BASELINE.format(words=shlex.join(redact_arguments(words)))


def _known(path: Path | None) -> set[str]:
    """Return the keys of findings that a baseline, an earlier ``--json``, has."""
    if path is None:
        return set()

    try:
        return {str(row["key"]) for row in json.loads(read_text(path))["findings"]}
    except (ValueError, KeyError, TypeError) as error:
        raise FileError("is not a baseline", where=str(path), fix="write one: autoprec lint --json > FILE") from error


@script_command(
    "lint",
    required=False,
    takes="[POLICY] [-- train.py [SCRIPT ARGS]...]",
    examples=(
        "autoprec lint policy.yaml",
        "autoprec lint policy.yaml -- train.py --width 768",
        "autoprec lint --target h100 --format github policy.yaml -- train.py",
        "autoprec lint --target b200 policy.yaml -- config.json",
    ),
)
@options.of_search("target", help="What gains and shapes are judged for; default: the policy's.")
@click.option("--baseline", type=click.Path(path_type=Path), help="Findings of an earlier --json are not told again.")
@click.option(
    "--format",
    "layout",
    default="text",
    show_default=True,
    type=click.Choice(("text", "json", "github", "sarif")),
    help="How findings are printed.",
)
@options.as_json("Findings")
@click.option("--strict", is_flag=True, help="Warnings fail as well: exit 1.")
def lint(
    script: tuple[str, ...],
    target: str,
    baseline: Path | None,
    layout: str,
    as_json: bool,
    strict: bool,
) -> int:
    """Say what is wrong with POLICY for a script, and with what the script says of precision; exit 1 on an error.

    `autoprec lint [POLICY] -- train.py [SCRIPT ARGS]`. With a policy one step is recorded without weights; without one
    the script takes one step as it is, and its own precision is judged: updates that are lost, sums, positions and
    losses in 16 bits. In the place of the script: a model's config.json.

    Without a script: is the file, a policy, a search space or a table of targets, valid? Exit 2 where it is not.
    docs/cli.md has every code, a GitHub Action and a pre-commit hook.
    """
    known, (path, words) = _known(baseline), _split(script)
    what, policy = _loaded(path) if path else ("", None)
    if path and words and policy is None:
        raise UsageError(f"this is a {what}", where=path, fix="lint it alone, or name a policy before the script")
    with Phases() as phases:
        facts, unseen = _facts(policy, path, words, phases)
    named = str((policy.evidence.get("target") if policy else "") or "") if target == "auto" else target
    facts = replace(facts, targets=[target_named(named)] if named else [])
    found = [one for one in findings(facts) if one.key not in known]
    gains = {one.name: facts.speedup(one) for one in facts.targets if facts.report is not None and not one.is_cpu}
    layout = "json" if as_json else layout
    if layout == "sarif":
        print_json(sarif(found))
    elif layout == "json":
        document: dict[str, Any] = {"ok": not counts(found)["error"], "file": path, "what": what}
        document |= {"findings": [one.to_json() for one in found]}
        print_json(document | {"counts": counts(found), "gains": gains, "unseen": unseen, "source": "modelled"})
    elif lines := TEXTS[layout](found) + (_UNSEEN if layout == "text" and words and facts.report is None else ""):
        echo(f"{path}: valid {what}\n{lines}" if path and layout == "text" else lines)
    for text in unseen if layout != "json" else ():
        echo(f"note: {text}", err=True)
    if layout == "text" and gains:
        echo(
            "; ".join(
                f"expected on {name}: {gain:.2f}x over the script as written (modelled)" for name, gain in gains.items()
            )
        )
    failing = {severity: counts(found)[severity] for severity in ("error", *(("warning",) if strict else ()))}
    if layout == "text" and not found and facts.judged is not None:
        echo(sound(facts.judged))
    if any(failing.values()):
        raise AuditError(
            ", ".join(counted(count, severity) for severity, count in failing.items() if count),
            where=path or " ".join(words),
            fix=_where_meant(words, has_policy=policy is not None),
        )
    return 0
