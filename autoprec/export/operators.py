"""Operators that are not layers: who keeps softmax, norms, embeddings, losses and outputs in FP32 under a target.

A target without a word for them still runs them in some precision; an export says which, operator by operator.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoprec.export.base import Losses, Request

OPERATORS = ("softmax", "norm", "embedding", "loss", "output")
#: torch.autocast's list for CUDA (torch/amp, "CUDA ops that can autocast to float32").
AUTOCAST = {
    "softmax": "torch.autocast on CUDA computes softmax in fp32",
    "norm": "torch.autocast on CUDA computes layer and group norms in fp32; others accumulate in fp32",
    "loss": "torch.autocast on CUDA computes losses in fp32",
}
#: Who does what an exported Python module does itself.
IN_FORWARD = "the exported module, inside the model's forward"
LOOKUP = {"embedding": "a lookup returns the weights' own precision"}
_UNTOUCHED = "nothing is run in less than the script's own precision"


def report_operators(request: Request, losses: Losses, kept: Mapping[str, str], lost: Mapping[str, str]) -> None:
    """Say of every operator that the policy wants in FP32 who keeps it so, or what it runs in instead.

    And of ``execution``, ``operators.attention`` and FP32 outputs of 16-bit products (``wide``), where the policy says
    how the model is compiled, what attention computes in or what the head returns: ``kept`` may name who sees to it.

    Args:
        kept: operator -> who keeps it in FP32.
        lost: operator -> what the target does instead; every operator must be in one of the two.
    """
    _report_attention(request, losses, kept.get("attention", ""), lost.get("attention", ""))
    for rule in request.rules():
        scalings = [recipe.scaling for recipe in rule.plan.scaled if recipe.scaling is not None]
        steps = max((scaling.calibration_steps for scaling in scalings), default=0)
        if steps and request.runs(rule.plan):
            losses.add(f"calibration_steps: {steps}", "quantised from the first step on", rule.match)
        if rule.plan.fprop is not None and rule.plan.fprop.output == "fp32" and request.runs(rule.plan):
            if "wide" in kept:
                losses.kept[f"layers '{rule.match}': {rule.plan.fprop.describe()}"] = kept["wide"]
            else:
                losses.add(rule.plan.fprop.describe(), f"{rule.plan.fprop.format}: the product is rounded", rule.match)
    for name, value in request.policy.stability.model_dump(exclude_defaults=True).items():
        losses.add(f"stability.{name}: {value:g}", "nothing: the training loop must do it")
    if request.policy.communication.weights != "keep":
        if "gather" in kept:
            losses.kept["communication.weights: fp8"] = kept["gather"]
        else:
            losses.add("communication.weights: fp8", "weights are gathered as the stack does it")
    execution = request.policy.execution
    if execution != "keep" and "execution" in kept:
        losses.kept[f"execution: {execution}"] = kept["execution"]
    elif execution != "keep":
        losses.add(f"execution: {execution}", "as the script runs it: torch.compile is for the script to call")
    for name in OPERATORS:
        if getattr(request.policy.operators, name) != "fp32":
            continue
        if name in kept:
            losses.kept[f"operators.{name}: fp32"] = kept[name]
        else:
            losses.add(f"operators.{name}: fp32", lost[name])


def _report_attention(request: Request, losses: Losses, kept: str, lost: str) -> None:
    wanted, activations = request.policy.operators.attention, request.policy.activations
    if wanted == "keep":
        return
    if wanted == "fp8":
        losses.add("operators.attention: fp8", "attention as the script runs it: AutoPrec alone replaces its calls")
    elif kept or wanted == activations:
        losses.kept[f"operators.attention: {wanted}"] = kept or "the activations are, all of them"
    else:
        around = "as the script runs it" if activations == "keep" else "in the dtype of the activations"
        losses.add(f"operators.attention: {wanted}", lost or f"attention {around}")


def autocast_operators(
    request: Request,
    losses: Losses,
    *,
    output: str = "",
    lost: str = "",
    execution: str = "",
    attention: str = "",
    gather: str = "",
) -> None:
    """Report a target that runs the model under ``torch.autocast``.

    Args:
        output: who casts the model's output to FP32, or
        lost: what the output is instead.
        execution: who compiles the model, or does not, as the policy says; empty for nobody.
        attention: who runs attention in the dtype that the policy names; empty for nobody.
        gather: who gathers weights in FP8; empty for nobody.
    """
    named = (("execution", execution), ("attention", attention), ("gather", gather))
    more = {name: who for name, who in named if who}
    if request.policy.activations == "keep":
        report_operators(request, losses, dict.fromkeys(OPERATORS, _UNTOUCHED) | more, {})
        return
    kept = AUTOCAST | LOOKUP | more | ({"output": output} if output else {})
    report_operators(request, losses, kept, {"output": lost})
