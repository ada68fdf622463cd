"""Published policies on the command line: ``show published:`` lists them, and a command's ``--policy`` may name one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoprec.cli.console import plain_table, print_json, stdout_console
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.recording import record_step
from autoprec.graph.report import GraphReport
from autoprec.policy import Policy, load_policy
from autoprec.policy.library import PREFIX, is_published, published, published_names


def print_published(name: str, *, as_json: bool) -> None:
    """Print every published policy, or one with its rules and evidence.

    Args:
        name: ``published:`` for all, ``published:NAME`` for one.

    Raises:
        UnknownNameError: with the nearest name.
    """
    one = name.removeprefix(PREFIX)
    entries = [published(each) for each in ([one] if one else published_names())]
    if as_json:
        documents = [entry.model_dump(mode="json", by_alias=True, exclude_defaults=True) for entry in entries]
        print_json(documents[0] if one else documents)
    elif one:
        echo("\n".join(_lines(name)))
    else:
        rows = [(entry.name, entry.date, entry.title, entry.evidence[0]) for entry in entries]
        stdout_console().print(plain_table(("published:", "date", "what", "evidence"), rows))
        echo("autoprec show published:NAME has the rules; autoprec run --policy published:NAME train.py runs one")


def _lines(name: str) -> list[str]:
    entry = published(name)
    made = f"; for {entry.blocks} blocks" if entry.blocks else ""
    out = [f"{PREFIX}{entry.name}: {entry.title}", f"{entry.date}, {entry.source}{made}"]
    for title, lines in {"": entry.lines(), "evidence": entry.evidence, "not published": entry.not_published}.items():
        out += [title] if title and lines else []
        out += [f"  {line}" for line in lines]
    return out


def bound(policy: Path | str, step: Callable[[], GraphReport]) -> Policy:
    """Load a policy file, or make a published policy one of a recorded step's model, with notes on stderr.

    Args:
        step: records the step; called for a published policy only.

    Raises:
        UnknownNameError, PolicyMismatchError: see :func:`autoprec.tuning.decide.published.resolve_published`.
        PolicyError: see :func:`autoprec.policy.load_policy`.
    """
    text = str(policy)
    if not is_published(text):
        loaded: Policy = load_policy(text)
        return loaded
    published(text)  # an unknown name is refused before the script is started
    from autoprec.tuning.decide.published import resolve_published

    found = resolve_published(text, step())
    for line in found.notes:
        echo(f"{found.name}: {line}", err=True)
    return found.policy


def policy_of(policy: Path | str, script: Sequence[str]) -> Policy:
    """Load a policy file, or make a published one that of a script's model: the script is run to its first step."""

    def step() -> Any:
        with Phases() as phases:
            return record_step(script, phases)[0]

    return bound(policy, step)
