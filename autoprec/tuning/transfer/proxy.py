"""What is known of the proxy: its recorded step and its gradient errors, from the folder of the study that found it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autoprec.errors import AutoPrecError, FileError
from autoprec.graph.report import GraphReport, load_report
from autoprec.policy import Policy, first_match, glob_matches, load_policy
from autoprec.policy.space import Choice
from autoprec.support.files import read_document, without_checksum
from autoprec.tuning.decide.table import SensitivityTable

#: Policies that a search leaves in its folder.
_POLICIES = ("best.yaml", "policy.yaml", "front/*.yaml")


@dataclass(frozen=True)
class Proxy:
    """The small model: its step, what the policy runs in every layer, and what a search measured of it.

    Attributes:
        rules: layer -> number of the policy's rule that names it, -1 for its default.
        choices: layer -> what it runs, as a choice's name.
        table: gradient errors per group and choice; None where no study was found.
        rows: layer -> row of the table.
    """

    report: GraphReport
    rules: dict[str, int]
    choices: dict[str, str]
    table: SensitivityTable | None = None
    rows: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, policy: Policy, report: GraphReport, table: SensitivityTable | None = None) -> Proxy:
        """Resolve a policy over the model it was found on."""
        names = [layer.name for layer in report.tunable]
        rules, choices = {}, {}
        for name in names:
            rule = first_match(policy.layers, name)
            rules[name] = -1 if rule is None else policy.layers.index(rule)
            choices[name] = choice_of_rule(policy, rules[name])
        return cls(report, rules, choices, table, _rows(report, table) if table is not None else {})

    def error2(self, table: SensitivityTable, layer: str, choice: str) -> float:
        """Return the squared error of the group of a layer under a choice; infinite where it was not asked."""
        if layer not in self.rows or choice not in table.choices:
            return math.inf
        return float(table.error2[self.rows[layer], table.choices.index(choice)])

    def predicted(self, policy: Policy) -> float:
        """Return the relative gradient error of the policy on the proxy; NaN without a table."""
        if self.table is None:
            return math.nan
        of_group = {
            row: (name, self.choices[name]) for name, row in self.rows.items()
        }  # a layer of each, and its choice
        total = sum(self.error2(self.table, *one) for one in of_group.values() if one[1] in self.table.choices)
        return math.sqrt(total + around2(self.table, policy)) * self.table.misfit.ratio


def around2(table: SensitivityTable, policy: Policy) -> float:
    """Return the squared error of what a policy does beside the layers."""
    names = (f"activations={policy.activations}", f"attention={policy.operators.attention}")
    return sum(table.parameters.get(name, 0.0) for name in names)


def choice_of_rule(policy: Policy, number: int) -> str:
    """Return what a rule (-1: the default) asks for, as a choice's name."""
    if number < 0:
        return policy.default
    rule = policy.layers[number]
    return Choice(recipe=rule.recipe, gemms=dict(rule.gemms)).name


def _rows(report: GraphReport, table: SensitivityTable) -> dict[str, int]:
    """Return which row of the table each layer belongs to: its group's, by the names a search gives groups."""
    names = [layer.name for layer in report.tunable]
    known = set(names)
    out: dict[str, int] = {}
    for row, group in enumerate(table.groups):
        members: Sequence[str] = report.groups.get(group, (group,) if group in known else ())
        for name in members or [name for name in names if glob_matches(group, name)]:
            out.setdefault(name, row)
    return out


def load_proxy(policy: Policy, study: Path) -> Proxy:
    """Read the proxy of a policy from the folder of the study that found it: its step, and its table of errors.

    Raises:
        FileError: a file is missing or not what it should be.
    """
    report, table = load_report(study / "graph.json"), study / "sensitivity.json"
    # absent where a search said 'stay' before anything was measured
    return Proxy.of(policy, report, _read_table(table) if table.exists() else None)


def _read_table(path: Path) -> SensitivityTable:
    try:
        return SensitivityTable.from_json(without_checksum(read_document(path), where=str(path)))
    except (KeyError, ValueError, TypeError) as error:
        raise FileError(f"is not a table of gradient errors: {error}", where=str(path), fix="search again") from error


def find_study(policy: Policy, path: Path, runs_dirs: Sequence[Path]) -> Path | None:
    """Return the folder of the study that wrote a policy file: the one it lies in, or one whose answer it is."""
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
