"""A policy as a table: what each rule makes its layers run, GEMM by GEMM."""

from __future__ import annotations

from autoprec.policy.schema import Phase, Policy
from autoprec.precision.recipes import GEMMS
from autoprec.support.tables import Table
from autoprec.support.units import gap_text, speed_text


def policy_table(policy: Policy) -> Table:
    """Return a row for each rule and one for every other layer; what differs from the defaults around them below."""
    rows: list[tuple[str, ...]] = []
    for rule in policy.layers:
        match = rule.match or "(root)"
        name = f"{match} (optional)" if rule.optional else match
        rows.append((name, rule.recipe, *policy.plan_of_rule(rule).labels.values()))
    rows.append(
        ("every other layer" if rows else "every layer", policy.default, *policy.plan_of_rule(None).labels.values())
    )
    model = f" for {policy.model.class_name}, {policy.model.parameters:,} parameters" if policy.model else ""
    return Table(("layers, first match wins", "recipe", *GEMMS), tuple(rows), f"policy{model}", tuple(_around(policy)))


def _around(policy: Policy) -> list[str]:
    """Return what a policy says beside its layers, a line each."""
    out = []
    for name in ("activations", "execution", "loss_scaling", "embedding_gradient"):
        value = getattr(policy, name)
        if value != type(policy).model_fields[name].default:
            out.append(f"{name.replace('_', ' ')}: {value}")
    for name in ("operators", "optimizer", "communication", "implementation"):
        changed = getattr(policy, name).model_dump(exclude_defaults=True)
        if changed:
            out.append(f"{name}: " + ", ".join(f"{key} {value}" for key, value in changed.items()))
    out += [f"from {phase.label} on: {_phase(policy, phase)}" for phase in policy.phases]
    if policy.rollout is not None:
        out.append(f"rollout: {_rollout(policy)}")
    found = policy.evidence
    figures = [
        f"{key} {speed_text(found[key], *(found.get(f'{key}_{end}') for end in ('low', 'high')))}"
        for key in ("speedup_over_16bit", "speedup")
        if _is_number(found.get(key))
    ]
    gap = [found["divergence"]] if _is_number(found.get("divergence")) else []
    figures += [gap_text(value, found.get("metric") or "") for value in gap]
    if figures:
        out.append(f"evidence ({found.get('source', 'measured')}): {', '.join(figures)}".replace("_", " "))
    return out


def _phase(policy: Policy, phase: Phase) -> str:
    """Return what a phase changes, in a line: its rules as ``match recipe``, the rest by name."""
    parts = []
    for name, value in phase.changes.items():
        if name == "layers":
            stage = policy.model_copy(update={"phases": ()})
            rules = [f"{rule.match or '(root)'} {stage.plan_of_rule(rule).describe()}" for rule in value]
            parts.append("layers " + (", ".join(rules) or "none"))
        elif isinstance(value, (str, float)):
            parts.append(f"{name.replace('_', ' ')} {value}")
        else:
            changed = value.model_dump(exclude_defaults=True).items()
            parts.append(f"{name} " + (" ".join(f"{key} {item}" for key, item in changed) or "as by default"))
    return "; ".join(parts)


def _rollout(policy: Policy) -> str:
    """Return what the copy that generates runs, in a line: its rules as ``match recipe``, the rest by name."""
    section = policy.rollout.to_dict() if policy.rollout is not None else {}
    rules = [f"{rule['match'] or '(root)'} {rule['recipe']}" for rule in section.pop("layers", ())]
    return "; ".join([*rules, *(f"{name} {value}" for name, value in section.items())]) or "as the script wrote it"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
