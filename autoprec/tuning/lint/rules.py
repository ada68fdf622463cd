"""The rules: for each code of ``rules.yaml`` the function that finds what its sentence says.

An ``error`` is a policy that does not do what it says, or breaks training; a ``warning`` is one that probably does not
do what was meant; a ``note`` costs time, or is worth knowing. A rule that lacks a fact (no recorded step, no policy)
finds nothing. Findings are silenced by their code in the policy's ``silenced:``, with a reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from autoprec.cost.scale import short_dtype
from autoprec.errors import nearest
from autoprec.graph.census import Observation
from autoprec.graph.roles import shown
from autoprec.policy import Policy, compiles, unmatched_rules
from autoprec.policy.known_layers import unknown_layers
from autoprec.precision.hardware import alignment, cpu_instructions, recipe_family
from autoprec.support.files import read_document
from autoprec.tuning.lint.facts import Facts
from autoprec.tuning.lint.judged import CODES, assess

SEVERITIES = ("error", "warning", "note")
#: What the audit of a run notes as well: a policy that runs as asked, and asks for what is known to end worse.
SENSITIVE = ("router-low-precision", "head-int8-tensor")
#: What one script may choose only one of.
_DTYPE_KINDS = ("autocast", "trainer")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        code: a key of :data:`RULES`.
        place: ``file:line`` of what is to be changed; empty where it is not known.
        layers: the layers it is about, in model order.
        data: what the sentence is made of.
        grade: its severity where the effect decides that, not the code.
        seen: what was measured, of a finding about the script's own precision.
    """

    code: str
    place: str = ""
    layers: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    grade: str = ""
    seen: Observation | None = None

    @property
    def severity(self) -> str:
        """One of :data:`SEVERITIES`."""
        return self.grade or RULES[self.code].severity

    @property
    def message(self) -> str:
        """What is wrong."""
        return RULES[self.code].sentence.format(layers=shown(self.layers), **self.data)

    @property
    def fix(self) -> str:
        """What to do about it."""
        return RULES[self.code].fix.format(layers=shown(self.layers), **self.data)

    @property
    def key(self) -> str:
        """What a finding is known by in a baseline: lines move, and figures change."""
        what = (
            f"{self.seen.operator} {self.seen.module}".strip() if self.seen is not None else self.data.get("what", "")
        )
        return f"{self.code} {' '.join(self.layers) or what}"

    def to_json(self) -> dict[str, Any]:
        """Return the row of ``autoprec lint --json``."""
        file, _, line = self.place.rpartition(":")
        named = (file, int(line)) if line.isdigit() else (self.place, 0)
        out: dict[str, Any] = {"code": self.code, "severity": self.severity, "message": self.message, "fix": self.fix}
        out |= {"file": named[0], "line": named[1], "layers": list(self.layers), "key": self.key}
        if self.seen is not None:
            seen = self.seen
            out |= {"operator": seen.operator, "module": seen.module, "dtypes": list(seen.dtypes)}
            out |= {"figures": dict(seen.figures), "also": list(seen.also), "means": RULES[self.code].means}
        return out


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of ``rules.yaml``: how bad a finding is, what it says, what to do, what it means, and when it is seen."""

    severity: str
    sentence: str
    fix: str
    means: str
    example: str


RULES: dict[str, Rule] = {
    code: Rule(**row) for code, row in read_document(Path(__file__).with_name("rules.yaml"))["rules"].items()
}


def findings(facts: Facts) -> list[Finding]:
    """Return everything that the rules find, the worst first, without what the policy silences."""
    found = [finding for code in RULES for finding in _FINDERS[code](facts)]
    ignored = facts.policy.silenced if facts.policy is not None else ()
    kept = [one for one in found if not any(entry.silences(one.code, one.layers) for entry in ignored)]
    return sorted(kept, key=lambda one: SEVERITIES.index(one.severity))


def _by_place(facts: Facts, code: str, names: Sequence[str], **data: Any) -> Iterator[Finding]:
    """Yield one finding for the layers that are defined in one place."""
    places: dict[str, list[str]] = defaultdict(list)
    for name in names:
        places[facts.place_of(name)].append(name)
    for place, several in places.items():
        yield Finding(code, place, tuple(several), data)


# --- rules and layers ------------------------------------------------------------------------------------------------
def _unmatched(facts: Facts) -> Iterator[Finding]:
    if facts.policy is None or facts.report is None:
        return
    rules, side = list(facts.policy.layers), facts.policy.rollout_side
    missing = [(rule, facts.rule_places[rules.index(rule)]) for rule in unmatched_rules(facts.policy, facts.layers)]
    # the copy that generates has the same layers
    missing += [(rule, facts.path) for rule in (unmatched_rules(side, facts.layers) if side is not None else ())]
    for rule, place in missing:
        close = nearest(rule.match.replace("*", ""), list(facts.layers), limit=1)
        near = f"; the nearest layer is {close[0]}" if close else ""
        yield Finding("rule-unmatched", place, (), {"what": rule.match, "near": near})


def _shadowed(facts: Facts) -> Iterator[Finding]:
    rules = facts.policy.layers if facts.policy is not None else ()
    for index, names in enumerate(facts.matched):
        takers = {taker for name in names if (taker := facts.rule_of(name)) is not None}
        if names and index not in takers:
            first = rules[min(takers)].match
            yield Finding("rule-shadowed", facts.rule_places[index], (), {"what": rules[index].match, "first": first})


def _out_of_reach(facts: Facts) -> Iterator[Finding]:
    rules = facts.policy.layers if facts.policy is not None else ()
    for index, names in enumerate(facts.matched):
        asked = [facts.layers[name] for name in names if facts.rule_of(name) == index and not facts.plans[name].keeps]
        if asked and not any(layer.tunable for layer in asked):
            data = {"what": rules[index].match, "why": asked[0].reason}
            yield Finding("layer-out-of-reach", facts.rule_places[index], tuple(layer.name for layer in asked), data)


def _unnamed(facts: Facts) -> Iterator[Finding]:
    """Find layers that run as written because nothing names them, and that the search had not seen."""
    policy = facts.policy
    if policy is None or all(plan.keeps for plan in facts.plans.values()):
        return
    unnamed = [n for n, layer in facts.layers.items() if layer.tunable and facts.rule_of(n) is None]
    unnamed = [name for name in unnamed if facts.plans[name].keeps]
    new = unknown_layers(unnamed, policy.model.layers) if policy.model is not None and policy.model.layers else []
    yield from _by_place(facts, "layer-unnamed", [name for name in unnamed if name in new])


def _unseen(facts: Facts) -> Iterator[Finding]:
    lowered = [n for n, plan in facts.plans.items() if not plan.keeps and facts.layers[n].tunable]
    for found in new_layers(facts.policy, lowered) if facts.policy is not None else ():
        yield from _by_place(facts, found.code, found.layers)


def new_layers(policy: Policy, lowered: Sequence[str]) -> Iterator[Finding]:
    """Find layers that a policy lowers and that its search has not seen."""
    known = policy.model.layers if policy.model is not None else ()
    if known and (new := unknown_layers(lowered, known)):
        yield Finding("layer-unseen", layers=tuple(new))


def _changed(facts: Facts) -> Iterator[Finding]:
    if facts.policy is not None and facts.report is not None:
        yield from other_model(facts.policy, facts.report.model)


def other_model(policy: Policy, found: Mapping[str, Any]) -> Iterator[Finding]:
    """Find that a policy was made for another model than ``{"class", "parameters", "fingerprint"}``."""
    made = policy.model
    if made is not None and made.fingerprint and made.fingerprint != found.get("fingerprint"):
        then = f"{made.class_name} ({made.parameters:,} parameters)"
        now = f"{found['class']} ({found['parameters']:,} parameters)"
        yield Finding("model-changed", data={"then": then, "now": now})


# --- sensitive layers ------------------------------------------------------------------------------------------------
def _searched(facts: Facts, name: str) -> bool:
    """Say whether the policy's own search has measured what this layer runs."""
    policy = facts.policy
    known = policy is not None and policy.model is not None and policy.evidence.get("seeds")
    return bool(known) and not unknown_layers([name], policy.model.layers)  # type: ignore[union-attr]


def _router(facts: Facts) -> Iterator[Finding]:
    """Find what chooses experts in fewer bits than the script's own; the gate of a shared expert chooses nothing."""

    def lowered(name: str) -> bool:
        plan, layer = facts.plans[name], facts.layers[name]
        script = short_dtype(layer.dtype)
        if not (layer.tunable or layer.reason.startswith("chooses the experts")):
            return False  # no policy reaches it, for another reason
        formats = {recipe.format for recipe in plan.recipes if recipe is not None}
        return bool(plan.scaled) or (script not in ("bf16", "fp16") and bool(formats & {"bf16", "fp16"}))

    routers = [name for name in facts.plans if facts.places[name].role == "router"]
    names = [name for name in routers if lowered(name) and not name.endswith("shared_expert_gate")]
    yield from _by_place(facts, "router-low-precision", names)


def _head(facts: Facts) -> Iterator[Finding]:
    for name, plan in facts.plans.items():
        is_head = "head" in facts.layers[name].flags or facts.places[name].role == "head"
        if is_head and plan.scaled and not _searched(facts, name):
            yield from _by_place(facts, "head-low-precision", [name], recipe=plan.scaled[0].describe())


def _int8_head(facts: Facts) -> Iterator[Finding]:
    for name, plan in facts.plans.items():
        one_scale = any(r.format == "int8" and r.scaling and r.scaling.granularity == "tensor" for r in plan.scaled)
        if one_scale and ("head" in facts.layers[name].flags or facts.places[name].role == "head"):
            yield from _by_place(facts, "head-int8-tensor", [name])


def _edges(facts: Facts) -> Iterator[Finding]:
    for name, plan in facts.plans.items():
        place = facts.places[name]
        four = any(recipe.format == "nvfp4" for recipe in plan.scaled)
        if four and place.count > 2 and place.rank in (0, place.count - 1) and not _searched(facts, name):
            yield from _by_place(facts, "edge-block-fp4", [name], edge="first" if not place.rank else "last")


# --- the target ------------------------------------------------------------------------------------------------------
def _refused(facts: Facts) -> Iterator[Finding]:
    if facts.report is None:
        return
    for target in facts.targets:
        why: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, plan in facts.plans.items():
            recipes = [recipe for recipe in plan.recipes if recipe is not None and facts.layers[name].tunable]
            for recipe in recipes:
                ok, reason = facts.model(target).can_run(name, recipe)
                if not ok:
                    why[reason, recipe.describe()].append(name)
                    break
        for (reason, asked), names in why.items():
            yield from _by_place(facts, "target-refuses", names, recipe=asked, target=target.title, why=reason)


def _padded(facts: Facts) -> Iterator[Finding]:
    if facts.report is None or all(target.is_cpu for target in facts.targets):
        return
    alike: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, plan in facts.plans.items():
        tokens = {gemm.m for gemm in facts.layers[name].gemms if gemm.role == "fprop"}
        multiple = max((alignment(recipe_family(recipe)) for recipe in plan.scaled), default=1)
        for odd in sorted(count for count in tokens if count % multiple)[:1]:
            alike[odd, multiple].append(name)
    for (count, multiple), names in alike.items():
        yield Finding("tokens-padded", "", tuple(names), {"tokens": count, "multiple": multiple})


def _other_target(facts: Facts) -> Iterator[Finding]:
    found = str(facts.policy.evidence.get("target") or "") if facts.policy is not None else ""
    for target in facts.targets:
        if found and found != target.name:
            yield Finding("other-target", facts.path, (), {"then": found, "now": target.name, "what": target.name})


def _instructions(facts: Facts) -> Iterator[Finding]:
    if facts.policy is not None and any(target.is_cpu for target in facts.targets):
        yield from other_instructions(facts.policy, cpu_instructions())


def other_instructions(policy: Policy, here: str) -> Iterator[Finding]:
    """Find that a policy was timed on a CPU that multiplies with other instructions than ``here``."""
    then = str(policy.evidence.get("instructions") or "")
    if then and here and then != here:
        yield Finding("other-instructions", data={"then": then, "now": here})


# --- what the script itself says -------------------------------------------------------------------------------------
def _contradiction(facts: Facts) -> Iterator[Finding]:
    found = [setting for setting in facts.says(*_DTYPE_KINDS) if setting.value in ("bf16", "fp16")]
    policy = facts.policy
    for setting in found:
        asked = policy.activations if policy is not None else "keep"
        other = next((one for one in found if one.value != setting.value), None)
        if asked not in ("keep", setting.value):
            data = {"own": setting.value, "other": f"the policy's activations: {asked}", "what": setting.place}
            yield Finding("autocast-contradicts", setting.place, (), data)
        elif other is not None and setting is found[0]:
            data = {"own": setting.value, "other": f"{other.value} at {other.place}", "what": setting.place}
            yield Finding("autocast-contradicts", setting.place, (), data)


def _converted(facts: Facts) -> Iterator[Finding]:
    if facts.policy is not None and not all(plan.keeps for plan in facts.plans.values()):
        for setting in facts.says("torchao", "te"):
            yield Finding("converted-twice", setting.place, (), {"what": setting.value})


def _cast(facts: Facts) -> Iterator[Finding]:
    for setting in facts.says("cast") if facts.policy is not None else ():
        yield Finding("weights-cast", setting.place, (), {"own": setting.value, "what": setting.place})


def _unscaled(facts: Facts) -> Iterator[Finding]:
    if facts.judged is not None:
        yield from _judged("fp16-unscaled", facts)
        return
    policy, scaled = facts.policy, bool(facts.says("scaler"))
    if policy is not None and (policy.activations == "fp16" or policy.uses_format("fp16")):
        if policy.loss_scaling == "none" and not scaled:
            yield Finding("fp16-unscaled", facts.path, (), {"what": "the policy", "measured": ""})
        return
    for setting in facts.says("autocast"):
        if setting.value == "fp16" and not scaled:
            yield Finding("fp16-unscaled", setting.place, (), {"what": "torch.autocast", "measured": ""})


def _tf32(facts: Facts) -> Iterator[Finding]:
    if not any(target.vendor == "nvidia" for target in facts.targets):
        return
    for setting in facts.says("tf32"):
        if setting.value == "highest":
            yield Finding("tf32-off", setting.place, (), {"what": setting.place})


def _recompiles(facts: Facts) -> Iterator[Finding]:
    if not (facts.says("compile") or (facts.policy is not None and compiles(facts.policy))):
        return
    if facts.policy is not None and facts.policy.phases:
        data = {"what": "phases", "why": f"the policy changes {len(facts.policy.phases)} times during the run"}
        yield Finding("recompiles", facts.path, (), data)


def _silence(facts: Facts) -> Iterator[Finding]:
    for entry in facts.policy.silenced if facts.policy is not None else ():
        if entry.code not in RULES:
            close = nearest(entry.code, list(RULES), limit=1)
            near = f"; did you mean {close[0]}?" if close else ""
            yield Finding("silence-unknown", facts.path, (), {"what": entry.code, "near": near})


# --- what one real step shows of the script's own precision ----------------------------------------------------------
def _judged(code: str, facts: Facts) -> Iterator[Finding]:
    """Find what was seen with this code, once for each line."""
    told: set[str] = set()
    seen = facts.judged.observations if facts.judged is not None else ()
    for one in seen:
        severity, words = assess(one) if one.code == code else ("", {})
        if not severity or one.where in told:
            continue
        told.add(one.where)
        what = {"what": f"{one.operator} {one.module}".strip()} | words
        yield Finding(code, _chosen_at(code, facts) or one.where, (), what, severity, one)


def _chosen_at(code: str, facts: Facts) -> str:
    """Return the line that chooses fp16, where the script's source has one that is better known than the operator's."""
    if code != "fp16-unscaled" or facts.says("cast"):
        return ""
    found = [setting.place for setting in facts.says("autocast") if setting.value in ("fp16", "")]
    return found[0] if len(found) == 1 else ""


#: What finds each code.
_FINDERS: dict[str, Callable[[Facts], Iterator[Finding]]] = {
    "rule-unmatched": _unmatched,
    "rule-shadowed": _shadowed,
    "layer-out-of-reach": _out_of_reach,
    "layer-unnamed": _unnamed,
    "layer-unseen": _unseen,
    "model-changed": _changed,
    "router-low-precision": _router,
    "head-low-precision": _head,
    "head-int8-tensor": _int8_head,
    "edge-block-fp4": _edges,
    "target-refuses": _refused,
    "tokens-padded": _padded,
    "other-target": _other_target,
    "other-instructions": _instructions,
    "autocast-contradicts": _contradiction,
    "converted-twice": _converted,
    "weights-cast": _cast,
    "fp16-unscaled": _unscaled,
    "tf32-off": _tf32,
    "recompiles": _recompiles,
    "silence-unknown": _silence,
    **{code: partial(_judged, code) for code in CODES if code != "fp16-unscaled"},
}
