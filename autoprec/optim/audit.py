"""Compare what a policy asks of weights, gradients, state, loss scaling and communication with what is live."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.numerics.plan import DTYPE_NAMES
from autoprec.optim.communication import GradientHook, find_distributed
from autoprec.optim.optimizer import OptimizerRuntime, loss_scaler_of, runtime_of
from autoprec.optim.stepping.fused import is_fused, why_not_fused
from autoprec.optim.stepping.products import multiplies, products_of
from autoprec.optim.tensor import StoredTensor
from autoprec.policy import Policy
from autoprec.policy.sections import STEPPING
from autoprec.precision.recipes import KEEP

_STATE = {"exp_avg": ("exp_avg", "momentum_buffer"), "exp_avg_sq": ("exp_avg_sq",)}


_NOTHING = "nothing yet"
_OWN = "fp32 in a policy is: stored as the script stores it"


def _held(values: list[Any]) -> tuple[str, bool]:
    """Name what the live tensors are stored in, and whether they are plain tensors in the script's own dtypes."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    stored = {value.codec.name for value in tensors if isinstance(value, StoredTensor)}
    plain = {_short(value) for value in tensors if value.is_floating_point() or value.is_complex()}
    return ", ".join(sorted(stored or plain)) or _NOTHING, not stored


def _short(tensor: Tensor) -> str:
    """Return the short name of a tensor's dtype: fp32, bf16, complex64."""
    return DTYPE_NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")


def _stored(requested: str, values: list[Any], reason: str = "") -> dict[str, Any]:
    """Return the row of what live tensors are stored in.

    Nothing is stored anew for FP32: where the script has them in another dtype, what was asked is to ``keep`` that.
    """
    executed, plain = _held(values)
    if requested == "fp32" and plain and executed not in ("fp32", _NOTHING):
        return {"requested": KEEP, "executed": executed, "ok": True, "reason": reason or _OWN}
    return _entry(requested, executed, reason)


def _entry(requested: str, executed: str, reason: str = "") -> dict[str, Any]:
    return {"requested": requested, "executed": executed, "ok": requested == executed, "reason": reason}


def _idle(requested: str, reason: str) -> dict[str, Any]:
    return {"requested": requested, "executed": "-", "ok": True, "reason": reason}


def _gradients(requested: str, runtime: OptimizerRuntime | None, matrices: list[Tensor]) -> dict[str, Any]:
    """Audit gradient storage; gradients may have been set to None since they were stored."""
    if runtime is not None and runtime.weights.gradients_stored:
        rounded = len(runtime.weights.rounded)
        return _entry(requested, requested, f"{rounded} rounded at the step, not stored (DDP)" if rounded else "")
    held: list[Any] = [p.grad for p in matrices if p.grad is not None]
    if not held and requested == "fp32":  # they are gone, and had their parameters' dtypes
        held = [torch.empty(0, dtype=p.dtype) for p in matrices]
    return _stored(requested, held)


def _products(requested: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Audit the dtype of what the step multiplies: by the products that were seen."""
    held, name = products_of(optimizer), type(optimizer).__name__
    if held is None or held.mode is None:
        return _entry(requested, KEEP, f"this {name} is not wrapped")
    if not held.steps:
        return _entry(requested, _NOTHING, "a step that was compiled before the optimizer was wrapped stays as it was")
    if not held.mode.count:
        return _entry(requested, KEEP, f"{name} multiplies no matrices of another dtype that are large enough to gain")
    return _entry(requested, requested, f"{held.mode.count / held.mode.steps:.3g} products a step")


def joined(rows: dict[str, dict[str, Any]], further: Mapping[str, dict[str, Any]]) -> None:
    """Add the rows of one more optimizer: of several, the first that is not as asked counts.

    Of how they step it is the first that is as asked: an optimizer beside Muon multiplies nothing, and Muon has no
    fused update.
    """
    for part, row in further.items():
        if part not in rows or row["ok"] is (part in STEPPING):
            rows[part] = row


def optimizer_hints(policy: Policy, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return what a policy makes worth a look at an optimizer, but does not ask of it."""
    narrow = policy.activations == "fp16" or any(r.scaled or r.format == "fp16" for r in policy.recipes.values())
    if not narrow or any(group.get("weight_decay") for group in optimizer.param_groups):
        return []
    return [
        f"{type(optimizer).__name__} has no weight decay: without it weights and logits grow until FP16 or FP8 "
        "saturates (GLM-130B: 0.1)"
    ]


_NOT_WRAPPED = "no living optimizer of this model was wrapped: optimizer = policy.wrap_optimizer(optimizer)"
_ELEMENTWISE = "the step of no optimizer here multiplies matrices"
_ALONE = "one process, or no DistributedDataParallel around the model: nothing goes over a wire that we hook"


def audit_optimizers(
    policy: Policy, optimizers: Iterable[torch.optim.Optimizer], model: nn.Module
) -> dict[str, dict[str, Any]]:
    """Return :func:`audit_optimizer`'s rows of the parts in which the policy asks for something, by ``optimizer.PART``.

    Of several optimizers the first that is not as asked counts; where none was wrapped, nothing of it can have run.

    Args:
        policy: what was asked.
        optimizers: of the model, after at least one step.
        model: whose parameters they train.
    """
    optimizers = list(optimizers)
    asked: dict[str, Any] = policy.optimizer.model_dump(exclude_defaults=True)
    asked |= {"loss_scaling": policy.loss_scaling} if policy.loss_scaling != "none" else {}
    asked |= {"communication": wire} if (wire := policy.communication.gradients) != "fp32" else {}
    if not asked:
        return {}
    rows: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers:
        joined(rows, audit_optimizer(policy, optimizer, model))
    alone = find_distributed(model) is None
    for part in asked.keys() - rows.keys():
        idle = alone and part == "communication"
        why = _ALONE if idle else _ELEMENTWISE if part == "products" and optimizers else _NOT_WRAPPED
        rows[part] = {"requested": asked[part], "executed": "-", "ok": idle, "reason": why}
    return {f"optimizer.{part}": rows[part] for part in asked}


def audit_optimizer(
    policy: Policy, optimizer: torch.optim.Optimizer, model: nn.Module | None = None
) -> dict[str, dict[str, Any]]:
    """Return ``{part: {requested, executed, ok, reason}}`` after at least one real step.

    Parts are weights, gradients, exp_avg, exp_avg_sq, loss_scaling and, where the model is distributed or the policy
    asks for it, communication.
    Emulated weight storage is executed (the numerics are) and says why its bytes are not saved. A part that nothing
    has used yet is not ok and says so.

    Args:
        policy: what was asked.
        optimizer: after at least one step.
        model: whose parameters it trains; None where that is not known.
    """
    runtime, choice = runtime_of(optimizer), policy.optimizer
    matrices = [p for group in optimizer.param_groups for p in group["params"] if p.dim() >= 2]
    name = type(optimizer).__name__
    out: dict[str, dict[str, Any]] = {}
    beside = [] if runtime is None else [stored for _, stored in runtime.weights.beside.values()]
    weights = [*(p for p in matrices if isinstance(p, StoredTensor)), *beside]
    why = [] if runtime is None else [f"{n} emulated: {text}" for text, n in runtime.weights.emulated.items()]
    out["weights"] = _stored(choice.weights, weights or matrices, "; ".join(why))
    out["gradients"] = _gradients(choice.gradients, runtime, matrices)
    if not matrices:  # another optimizer trains them: what is beside Muon
        none = f"{name} trains no matrix, and nothing else is stored low"
        out = {part: _idle(getattr(choice, part), none) for part in (*out, *_STATE)}
    for part, names in _STATE.items() if matrices else ():
        requested = getattr(choice, part)
        values = [optimizer.state[p].get(name) for p in matrices if p in optimizer.state for name in names]
        row = _stored(requested, values)
        second = runtime is not None and runtime.kind == "muon" and part == "exp_avg_sq"  # of the optimizer beside it
        # SGD has no second moments, plain SGD no first
        if row["executed"] == _NOTHING and (requested == "fp32" or second):
            out[part] = _idle(requested, f"{name} keeps no such state")
            continue
        out[part] = row
    if choice.update == "fused":
        out["update"] = _entry("fused", "fused" if is_fused(optimizer) else KEEP, why_not_fused(optimizer))
    if choice.products != KEEP and multiplies(optimizer):
        out["products"] = _products(choice.products, optimizer)
    scaler = loss_scaler_of(optimizer)
    if scaler is None or scaler.active:
        out["loss_scaling"] = _entry(policy.loss_scaling, "none" if scaler is None else "dynamic")
    else:  # the script's own scaler does it
        out["loss_scaling"] = _entry(policy.loss_scaling, "dynamic", scaler.inactive_reason)
    wrapper = None if model is None else find_distributed(model)
    if wrapper is not None:
        hook: GradientHook | None = getattr(wrapper, "_autoprec_gradient_hook", None)
        out["communication"] = _entry(policy.communication.gradients, "fp32" if hook is None else hook.name)
    elif policy.communication.gradients != "fp32":
        out["communication"] = _idle(policy.communication.gradients, _ALONE)
    return out
