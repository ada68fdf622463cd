"""What is known of the proxy: its recorded step, and what the policy that was found on it runs in every layer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoprec.errors import AutoPrecError
from autoprec.graph.report import GraphReport
from autoprec.policy import Policy, first_match, load_policy
from autoprec.policy.space import Choice

#: Policies that a search leaves in its folder.
_POLICIES = ("best.yaml", "policy.yaml", "front/*.yaml")


@dataclass(frozen=True)
class Proxy:
    """The small model: its step, and what the policy runs in every layer.

    Attributes:
        rules: layer -> number of the policy's rule that names it, -1 for its default.
        choices: layer -> what it runs, as a choice's name.
    """

    report: GraphReport
    rules: dict[str, int]
    choices: dict[str, str]

    @classmethod
    def of(cls, policy: Policy, report: GraphReport) -> Proxy:
        """Resolve a policy over the model it was found on."""
        names = [layer.name for layer in report.tunable]
        rules, choices = {}, {}
        for name in names:
            rule = first_match(policy.layers, name)
            rules[name] = -1 if rule is None else policy.layers.index(rule)
            choices[name] = choice_of_rule(policy, rules[name])
        return cls(report, rules, choices)


def choice_of_rule(policy: Policy, number: int) -> str:
    """Return what a rule (-1: the default) asks for, as a choice's name."""
    if number < 0:
        return policy.default
    rule = policy.layers[number]
    return Choice(recipe=rule.recipe, gemms=dict(rule.gemms)).name


def find_study(policy: Policy, path: Path, runs_dirs: Sequence[Path]) -> Path | None:
    """Return the folder of the study that wrote a policy file: the one it lies in, or one whose answer it is.

    Args:
        policy: what the file holds.
        path: the policy file.
        runs_dirs: folders that hold studies.
    """
    for folder in (path.parent, path.parent.parent):
        if (folder / "graph.json").is_file() and (folder / "study.db").exists():
            return folder
    wanted = _without_date(policy)
    for runs in runs_dirs:
        for found in sorted((p.parent for p in runs.glob("*/graph.json")), key=lambda p: -p.stat().st_mtime):
            for other in (path for pattern in _POLICIES for path in sorted(found.glob(pattern))):
                with contextlib.suppress(AutoPrecError):  # another study's damaged file is not ours to report
                    if _without_date(load_policy(other)) == wanted:
                        return found
    return None


def _without_date(policy: Policy) -> Mapping[str, object]:
    document = policy.to_dict()
    return {name: document[name] for name in document if name != "guard"}
