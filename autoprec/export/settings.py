"""What a policy says beside its layers, and what a target does about each of it.

A target has a table: field of the policy -> who sees to it there, or what the target does instead.
:func:`report_settings` walks everything that a policy says (loss scaling, attention, wide outputs,
execution, operators, optimizer state, communication); what a target has no row for is lost in the words that
stand here. A target without a word for an operator still runs it in some precision, so an export says which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from autoprec.export.base import Losses, Request
from autoprec.export.naming import TORCH_DTYPES
from autoprec.policy.sections import STEPPING

OPERATORS = ("softmax", "norm", "embedding", "loss", "output")
#: torch.autocast's list for CUDA (torch/amp, "CUDA ops that can autocast to float32").
AUTOCAST = {
    "softmax": "torch.autocast on CUDA computes softmax in fp32",
    "norm": "torch.autocast on CUDA computes layer and group norms in fp32; others accumulate in fp32",
    "loss": "torch.autocast on CUDA computes losses in fp32",
}
#: What an exported Python module does itself, and what it leaves to the script.
IN_FORWARD = "the exported module, inside the model's forward"
SCALER = "use torch.amp.GradScaler in the training loop"
LOOKUP = {"embedding": "a lookup returns the weights' own precision"}
#: Where the script is what runs the model under autocast.
CAST_LOGITS = {"output": "the autocast dtype: cast the logits in the script"}
#: Where the model is in bf16 as a whole, under FSDP2's mixed precision.
_IN_BF16 = "bf16 in and out, accumulated in fp32 inside the kernel (no autocast)"
LOST_IN_BF16 = {"softmax": _IN_BF16, "norm": _IN_BF16, "embedding": "bf16"}
_UNTOUCHED = "nothing is run in less than the script's own precision"
_NONE: Mapping[str, str] = {}
#: How a script has what is computed in another way of torch's.
_BY_HAND = {
    "loss": "the loss of all logits at once: nn.LinearCrossEntropyLoss with options computes it in chunks",
    "attention": "in torch's kernel: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True), "
    "and sdpa_kernel(SDPBackend.MATH) around the forward, have it written out",
    "gelu": "as its modules compute it: put nn.GELU(approximate='tanh') in their place",
    "layout": "as the script gives it: model.to(memory_format=torch.channels_last), and its images",
}


def report_settings(
    request: Request,
    losses: Losses,
    scaler: str,
    *,
    scales: bool = False,
    kept: Mapping[str, str] = _NONE,
    lost: Mapping[str, str] = _NONE,
    autocast: bool = True,
    own: Collection[str] = (),
    activations: str = "",
) -> None:
    """Say of everything that the policy says beside its layers who sees to it, or what happens instead.

    Args:
        scaler: who scales the loss, or would have to.
        scales: whether it is scaled, asked or unasked.
        kept: field -> who sees to it; of the fields that :func:`_said` yields.
        lost: field -> what the target does instead, where it is not what stands there.
        autocast: the model runs under ``torch.autocast``, which keeps most operators in FP32.
        own: fields that the exporter reports itself.
        activations: what the target has instead of the policy's activations, where it may be something else.
    """
    policy = request.policy
    if activations and not activations.startswith(policy.activations):
        losses.add(f"activations: {policy.activations}", activations)
    if (policy.loss_scaling == "dynamic") != scales:
        losses.add(f"loss_scaling: {policy.loss_scaling}", f"{'dynamic' if scales else 'none'}: {scaler}")
    if policy.operators.attention == policy.activations:
        kept = {"attention": "the activations are, all of them", **kept}
    if autocast:
        kept = {**AUTOCAST, **LOOKUP, **kept}
        kept |= dict.fromkeys(OPERATORS, _UNTOUCHED) if policy.activations == "keep" else {}
    for field, what, instead, match in _said(request):
        if field in own:
            continue
        if by := kept.get(field):
            losses.kept[f"layers '{match}': {what}" if match else what] = by
        else:
            losses.add(what, lost.get(field, instead), match)


def by_script(request: Request) -> str:
    """Return whose the activations are where the exported files cannot set them."""
    dtype = TORCH_DTYPES.get(request.policy.activations)
    return f"as the script runs it: call torch.autocast('cuda', {dtype})" if dtype else ""


def _said(request: Request) -> Iterator[tuple[str, str, str, str]]:
    """Yield (field, what the policy says, what happens where a target has no word for it, glob of the layers)."""
    policy = request.policy
    attention, around = policy.operators.attention, "in the dtype of the activations"
    if attention != "keep":
        around = "as the script runs it" if policy.activations == "keep" else around
        yield "attention", f"operators.attention: {attention}", f"attention {around}", ""
    for rule in request.rules():
        fprop = rule.plan.fprop
        if fprop is not None and fprop.output == "fp32" and request.runs(rule.plan):
            yield "wide", fprop.describe(), f"{fprop.format}: the product is rounded", rule.match
    if policy.embedding_gradient != 1.0:
        what = f"embedding_gradient: {policy.embedding_gradient:g}"
        yield "embedding_gradient", what, "the whole gradient: shrink it behind the embedding, in the model", ""
    if policy.execution != "keep":
        by_hand = "as the script runs it: torch.compile is for the script to call"
        yield "execution", f"execution: {policy.execution}", by_hand, ""
    for name in OPERATORS:
        if getattr(policy.operators, name) == "fp32":
            yield name, f"operators.{name}: fp32", "the autocast dtype", ""
    if policy.optimizer.update != "keep":
        what = f"optimizer.update: {policy.optimizer.update}"
        yield "update", what, "the step as the script has it: pass fused=True to the optimizer", ""
    if policy.optimizer.products != "keep":
        what, dtype = f"optimizer.products: {policy.optimizer.products}", TORCH_DTYPES[policy.optimizer.products]
        yield "products", what, f"as the script has them: X = X.to({dtype}) before the step's products", ""
    for name, value in policy.implementation.model_dump(exclude_defaults=True).items():
        yield "implementation", f"implementation.{name}: {value}", _BY_HAND[name], ""
    for name, value in policy.optimizer.model_dump(exclude={*STEPPING}).items():
        if value != "fp32":
            yield "optimizer", f"optimizer.{name}: {value}", "kept in the optimizer's own precision (fp32)", ""
    if policy.communication.gradients != "fp32":
        what = f"communication.gradients: {policy.communication.gradients}"
        yield "gradients", what, "gradients travel as they are", ""
