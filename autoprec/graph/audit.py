"""What really ran: the executed dtype of every operator, read off a recorded step (no torch needed)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from autoprec.graph.report import GraphReport, Operator
from autoprec.policy import Policy, resolve
from autoprec.precision.recipes import GEMMS, KEEP

_FLOATS = ("fp64", "fp32", "bf16", "fp16", "e4m3", "e5m2", "e2m1")
_COMPLEX = ("complex128", "complex64", "complex32")
_WIDE = ("fp32", "fp64", *_COMPLEX[:2])
#: Operator classes that a policy protects, which are classes of the recorded step.
_PROTECTED = ("softmax", "norm", "embedding", "loss")
_QUIET = ("view", "cast", "allocation")


def _executed(operator: Operator) -> str:
    """The narrowest floating dtype an operator computes with: a sum of bf16 values is a bf16 sum."""
    if any(dtype in _COMPLEX for dtype in operator.dtypes):
        return next(dtype for dtype in _COMPLEX if dtype in operator.dtypes)  # a real operand is widened to it
    floats = [dtype for dtype in operator.dtypes if dtype in _FLOATS]
    return max(floats, key=_FLOATS.index) if floats else ""


def executed_precisions(report: GraphReport) -> dict[str, Any]:
    """Return what a recorded step executed.

    ``{"layers": {name: {role: dtype}}, "operators": {class: {dtype: calls}}, "modules": {class: {dtype: [module]}}}``
    with roles fprop, dgrad, wgrad and recompute. Under emulation a GEMM multiplies values that were rounded to 8 bits
    but are stored wider: the dtype here is that of the multiplication; ``policy.audit`` names the recipe.
    """
    by_call: dict[str, dict[str, str]] = {}
    weights = {layer.weight: layer.name for layer in report.layers}
    names = {layer.name for layer in report.layers}
    classes: dict[str, Counter[str]] = {}
    modules: dict[str, dict[str, list[str]]] = {}
    for operator in report.operators:
        dtype = _executed(operator)
        if not dtype or operator.cls in _QUIET or operator.phase == "update":
            continue
        classes.setdefault(operator.cls, Counter())[dtype] += 1
        seen = modules.setdefault(operator.cls, {}).setdefault(dtype, [])
        if operator.module not in seen and len(seen) < 20:
            seen.append(operator.module)
        layer = operator.module if operator.module in names else weights.get(operator.weight, "")
        if layer and operator.role and operator.weight:
            for role in operator.role.split("+"):
                by_call.setdefault(layer, {})[role] = dtype
    return {
        "layers": by_call,
        "operators": {cls: dict(found) for cls, found in classes.items()},
        "modules": modules,
    }


def protection_rows(report: GraphReport, operators: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Compare protections with what ran: ``{softmax: {"requested", "executed", "ok", "reason"}, ...}``.

    A policy reaches what runs inside the model's forward. What the script computes beside it, such as a softmax of the
    model's output in the script's own autocast, or all of a model whose parts alone are called, is told and is not held
    against the policy.

    Args:
        report: a step recorded under the policy.
        operators: the policy's ``operators`` section as plain data (keep or fp32 per class).
    """
    ran = executed_precisions(report)
    rows: dict[str, dict[str, Any]] = {}
    for name in _PROTECTED:
        requested, modules = operators.get(name, "keep"), ran["modules"].get(name, {})
        low = [module for dtype, seen in modules.items() if dtype not in _WIDE for module in seen]
        # not the script itself, nor a module that does not belong to the model (<ClassName>)
        reached = [module for module in low if report.root_called and not module.startswith("<")]
        ok = requested != "fp32" or not reached
        reason = "" if ok else f"ran in low precision in {', '.join(reached[:5])}"
        if ok and requested == "fp32" and low:
            reason = "beside the model's forward the script runs it in low precision, where no policy reaches"
        rows[name] = {"requested": requested, "executed": ran["operators"].get(name, {}), "ok": ok, "reason": reason}
    return rows


def uncovered_rows(report: GraphReport, audited: Collection[str], policy: Policy) -> list[dict[str, Any]]:
    """Return rows, as the audit's, for weights the model multiplies by where no policy reaches them.

    An output projection computed from an embedding's weight, say: no rule can name it, so only a policy whose default
    or whose wildcard asks for a recipe there is at odds with it. A rule ``{match: NAME, recipe: keep, optional: true}``
    says that this is meant.

    Args:
        report: a step recorded under the policy.
        audited: names that the audit has rows for.
    """
    names = [layer.name for layer in report.layers if layer.name not in audited and "fprop" in layer.roles()]
    plans = resolve(policy, names, strict=False)
    reasons = {layer.name: layer.reason for layer in report.layers}
    complex_weights = {layer.name for layer in report.layers if "complex" in layer.flags}
    ran = executed_precisions(report)["layers"]
    rows = []
    for name in names:
        requested = plans[name].labels
        executed = {gemm: ran[name][gemm] for gemm in GEMMS if gemm in ran.get(name, {})}
        differs = any(requested[gemm] not in (KEEP, dtype) for gemm, dtype in executed.items())
        if set(requested.values()) != {KEEP}:
            why = f"no policy reaches it: {reasons[name]}" if differs else "through activations"
            if name in complex_weights:
                differs, why = False, reasons[name]  # no rule can mean it: it is not a weight of real numbers
            row = {"name": name, "requested": requested, "executed": executed, "ok": not differs, "reason": why}
            rows.append(row | {"backend": ""})
    return rows
