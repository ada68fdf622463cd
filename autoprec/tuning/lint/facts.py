"""What a rule may look at: a policy, one recorded step, the script's own settings and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import yaml

from autoprec.cost.model import CostModel
from autoprec.graph.census import Judged
from autoprec.graph.report import GraphReport, Layer
from autoprec.graph.roles import Place, places
from autoprec.policy import LayerPlan, Policy, glob_matches, resolve
from autoprec.precision.hardware import Target


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that a script, or a file it is given, says of precision itself.

    Attributes:
        kind: what it is, e.g. ``autocast`` (see :mod:`autoprec.tuning.lint.source`).
        value: what it is set to, in words; empty where nothing could be read.
        place: ``file:line``.
    """

    kind: str
    value: str
    place: str


@dataclass(frozen=True)
class Facts:
    """What is known of a script and its policy.

    Attributes:
        policy: None where only the script is looked at; ``path`` is its file, ``text`` what is in it.
        report: one recorded step; None where none could be recorded, and rules that need one find nothing.
        settings: from :func:`autoprec.tuning.lint.source.settings_of`.
        targets: what gains are expected on, and shapes are held against.
    """

    policy: Policy | None = None
    path: str = ""
    text: str = ""
    report: GraphReport | None = None
    settings: Sequence[Setting] = ()
    targets: Sequence[Target] = ()
    models: dict[str, CostModel] = field(default_factory=dict, compare=False)

    @property
    def judged(self) -> Judged | None:
        """What the recorded step says of the script's own precision; None where it was recorded without data."""
        return self.report.judged if self.report is not None else None

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Every layer of the step, by name, in model order."""
        return {} if self.report is None else {layer.name: layer for layer in self.report.layers}

    @cached_property
    def plans(self) -> dict[str, LayerPlan]:
        """What each layer runs under the policy, as it begins."""
        return {} if self.policy is None else resolve(self.policy.stages[0], self.layers, strict=False)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Role and depth of every layer."""
        return places(list(self.layers.values()))

    @cached_property
    def matched(self) -> list[list[str]]:
        """Names of layers that each rule's glob matches, whether or not an earlier rule takes them."""
        rules = self.policy.layers if self.policy is not None else ()
        return [[name for name in self.layers if glob_matches(rule.match, name)] for rule in rules]

    @cached_property
    def rule_places(self) -> list[str]:
        """``file:line`` of each rule of the policy; the file alone where its text is not at hand."""
        if self.policy is None or not self.text:
            return [self.path] * len(self.policy.layers if self.policy is not None else ())
        root = yaml.compose(self.text, Loader=yaml.SafeLoader)
        parts = {} if root is None else {key.value: value for key, value in root.value}
        nodes = parts["layers"].value if "layers" in parts else []
        return [f"{self.path}:{node.start_mark.line + 1}" for node in nodes]

    @cached_property
    def takers(self) -> dict[str, int]:
        """Position of the rule that takes a layer, by the layer's name: the first that matches it."""
        return {name: index for index, names in reversed([*enumerate(self.matched)]) for name in names}

    def rule_of(self, name: str) -> int | None:
        """Return the position of the rule that takes a layer; None where none does."""
        return self.takers.get(name)

    def place_of(self, name: str) -> str:
        """Return where a layer is defined; else the rule that takes it; else the policy's file."""
        if found := self.layers[name].where if name in self.layers else "":
            return found
        index = self.rule_of(name)
        return self.path if index is None else self.rule_places[index]

    def says(self, *kinds: str) -> list[Setting]:
        """Return the script's settings of these kinds."""
        return [setting for setting in self.settings if setting.kind in kinds]

    def model(self, target: Target) -> CostModel:
        """Return the cost model of the step on a target."""
        if self.report is None:
            raise ValueError("there is no recorded step")
        if target.name not in self.models:
            self.models[target.name] = CostModel(self.report, target, compiled=bool(self.says("compile")))
        return self.models[target.name]

    def speedup(self, target: Target) -> float:
        """Return the modelled speed-up of the policy over the script as written."""
        model = self.model(target)
        if self.policy is None:
            return 1.0
        first = self.policy.stages[0]
        plans: Mapping[str, LayerPlan] = {
            name: plan
            for name, plan in self.plans.items()
            if all(model.can_run(name, recipe)[0] for recipe in plan.recipes)
        }
        return model.estimate({}).time_ms / model.estimate(plans, activations=first.activations).time_ms
