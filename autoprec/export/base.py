"""What every exporter takes and gives back: a policy with layer names in, files and a list of losses out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autoprec.policy import LayerPlan, Policy, glob_matches, resolve


@dataclass(frozen=True, slots=True)
class Loss:
    """Something the target cannot express.

    ``match`` is the glob of the layers concerned (empty: the whole policy), ``what`` the part of the policy, and
    ``instead`` what the exported files do.
    """

    what: str
    instead: str
    match: str = ""

    def __str__(self) -> str:
        where = f"layers '{self.match}': " if self.match else ""
        return f"{where}{self.what}; instead: {self.instead}"


@dataclass(frozen=True, slots=True)
class RulePlan:
    """One rule of the policy with its recipes looked up; the default is the last rule, with the glob ``*``."""

    match: str
    plan: LayerPlan


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be exported.

    Attributes:
        policy: the policy.
        layers: names of the model's tunable layers; empty when no model is at hand. Targets that need names rather
            than globs say so as a loss.
        name: what the policy is called in comments.
        kinds: layer -> ``Layer.kind`` as ``inspect --json`` has it, where that is known.
    """

    policy: Policy
    layers: tuple[str, ...] = ()
    name: str = "policy.yaml"
    kinds: Mapping[str, str] = field(default_factory=dict)

    def rules(self) -> tuple[RulePlan, ...]:
        """Return the ordered rules, the default last; rules that match none of the known layers are left out."""
        rules = [RulePlan(rule.match, self.policy.plan_of_rule(rule)) for rule in self.policy.layers]
        if self.layers:
            rules = [rule for rule in rules if any(glob_matches(rule.match, name) for name in self.layers)]
        return (*rules, RulePlan("*", self.policy.plan_of_rule(None)))

    def plans(self) -> dict[str, LayerPlan]:
        """Return what each of the model's layers runs under the policy, by name; no rule has to match."""
        return resolve(self.policy, self.layers, strict=False)

    def runs(self, plan: LayerPlan) -> bool:
        """Say whether a layer may run a plan; where the layers are known, whether one does."""
        return not self.layers or plan in self.plans().values()


@dataclass(frozen=True, slots=True)
class Export:
    """The result: file name -> text, what was lost, hints for a person (how to use the files), and what is kept.

    ``kept`` names what the files do not spell out and the target does by itself: part of the policy -> who does it.
    """

    target: str
    files: dict[str, str]
    losses: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def lossy(self) -> list[str]:
        """What the target cannot express, one sentence each; empty when the export is exact."""
        return [str(loss) for loss in self.losses]


#: What a module of :mod:`.stacks` writes: file name -> text, and notes for a person.
Written = tuple[dict[str, str], Sequence[str]]


@dataclass(slots=True)
class Exporter:
    """One target: the function ``write`` of its module in :mod:`.stacks`, which lists losses and never refuses for one.

    Its conformance suite is :mod:`tests.conformance.exporters`.
    """

    name: str
    write: Callable[[Request, Losses], Written]

    def export(self, request: Request) -> Export:
        """Return the files, what was lost and what is kept."""
        losses = Losses()
        files, notes = self.write(request, losses)
        return Export(self.name, files, tuple(losses.found), tuple(notes), losses.kept)


@dataclass
class Losses:
    """Collects losses without repeating them, and what a target keeps by itself."""

    found: list[Loss] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, instead: str, match: str = "") -> None:
        """Note what the target does not express; said twice, it is one loss.

        Args:
            what: the part of the policy that is lost.
            instead: what the target runs.
            match: glob or name of the layers that it is about; empty for a setting of the whole run.
        """
        loss = Loss(what, instead, match)
        if loss not in self.found:
            self.found.append(loss)
