"""Put a policy on a live model in place, and take it off again.

Works before or after the optimizer is built, before or after ``torch.compile``, under DDP, FSDP2, activation
checkpointing, autocast and gradient accumulation. An empty policy changes nothing at all.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autoprec import policy as policies
from autoprec.backends import Backend, choose, get
from autoprec.errors import UnsupportedError
from autoprec.layers import kind_of, tunable_layers, unwrap
from autoprec.numerics.conv import CONV_FORMATS, ConvExecution
from autoprec.policy import LayerPlan, load_policy, resolve, save_policy
from autoprec.protect import RootExecution
from autoprec.recipes import GEMMS
from autoprec.swap import install, install_root, uninstall, uninstall_root

if TYPE_CHECKING:
    from autoprec.audit import AuditReport

__all__ = ["Policy", "apply_policy", "load", "remove_policy", "tunable_layers", "unwrap"]

_ACTIVATIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def apply_policy(policy: policies.Policy, model: nn.Module, *, backend: str = "auto", strict: bool = True) -> None:
    """Make a model run under a policy, in place; a policy applied earlier is replaced.

    Args:
        policy: what each layer runs.
        model: the model, wrapped or not.
        backend: ``auto`` or a name of :data:`autoprec.backends.BACKENDS`.
        strict: refuse rules that match nothing and recipes that the backend cannot run. Otherwise such a rule is
            ignored, such a layer is left as the script wrote it, and the audit says why.

    Raises:
        PolicyMismatchError: a rule that is not optional matches no layer.
        UnsupportedError: a layer cannot run its recipe; the message names layer, recipe and reason.
        UnknownNameError: no such backend.
    """
    root = unwrap(model)
    layers = tunable_layers(root)
    plans = resolve(policy, layers, strict=strict)
    device = _device_of(root)
    chosen = choose(backend, device)
    available = chosen.available(device)
    if not available:
        raise UnsupportedError(f"backend '{chosen.name}' cannot run here: {available.reason}", fix="use backend 'auto'")
    executions = {
        name: _bind(name, module, plans[name], chosen, device, backend == "auto", strict)
        for name, module in layers.items()
        if not plans[name].keeps
    }
    remove_policy(root)
    for name, execution in executions.items():
        if execution is not None:
            install(layers[name], kind_of(layers[name]), execution)
    if executions or policy.activations != "keep" or policy.operators.attention != "keep":
        low = any(p.dtype in (torch.bfloat16, torch.float16) for p in root.parameters())
        kind = device.split(":")[0]
        install_root(root, RootExecution(_ACTIVATIONS.get(policy.activations), policy.operators, kind, low))


def remove_policy(model: nn.Module) -> None:
    """Take a policy off again: every module gets its own class back and behaves bit-identically as before."""
    root = unwrap(model)
    uninstall_root(root)
    for module in root.modules():
        uninstall(module)


def _device_of(model: nn.Module) -> str:
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return str(parameter.device)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _bind(
    name: str, module: nn.Module, plan: LayerPlan, backend: Backend, device: str, auto: bool, strict: bool
) -> Any:
    """Return what runs one layer, or None (with ``strict`` off) where nothing can."""
    if kind_of(module) == "conv":
        refusal = _conv_refusal(plan)
        if not refusal:
            recipe = plan.fprop
            return ConvExecution(plan, module, "fp32" if recipe is None else recipe.format)
    else:
        refusal = _refusal(module, plan, backend, device)
        if refusal and auto:
            execution = get("emulated").bind(plan, module, name=name, seed=zlib.crc32(name.encode()))
            execution.note = f"emulated because: {refusal}"
            return execution
        if not refusal:
            return backend.bind(plan, module, name=name, seed=zlib.crc32(name.encode()))
    if strict:
        raise UnsupportedError(
            f"{refusal}",
            where=f"layer '{name}'",
            fix="choose another recipe for it, or backend 'emulated' to compute its numerics without the hardware",
        )
    return None


def _conv_refusal(plan: LayerPlan) -> str:
    formats = {None if (r := plan.recipe(gemm)) is None else r.format for gemm in GEMMS}
    found = formats.pop()
    if formats:
        return "a convolution runs one recipe in all three passes"
    if found not in CONV_FORMATS:
        return f"no device runs a {found} convolution in training: fp32, bf16 or fp16 only"
    return ""


def _refusal(module: nn.Module, plan: LayerPlan, backend: Backend, device: str) -> str:
    """Return why ``backend`` cannot run a linear layer, or an empty string."""
    weight: Any = module.weight
    n, k = weight.shape if kind_of(module) != "conv1d" else reversed(weight.shape)
    sizes = {"fprop": (0, k, n), "dgrad": (0, n, k), "wgrad": (n, 0, k)}
    for gemm in GEMMS:
        recipe = plan.recipe(gemm)
        if recipe is None:
            continue
        m_, k_, n_ = sizes[gemm]
        found = backend.capability(recipe, gemm=gemm, m=m_, k=k_, n=n_, device=device)
        if not found:
            return f"{backend.name} cannot run {gemm} as {recipe.describe()}: {found.reason}"
    return ""


class Policy(policies.Policy):
    """A precision policy with hands: the data of :class:`autoprec.policy.Policy`, plus what can be done with it."""

    def apply(self, model: nn.Module, backend: str = "auto") -> None:
        """Make ``model`` run under this policy, in place; see :func:`apply_policy`."""
        apply_policy(self, model, backend=backend)

    def remove(self, model: nn.Module) -> None:
        """Take any policy off ``model``: bit-identical behaviour as before."""
        remove_policy(model)

    def audit(self, model: nn.Module) -> AuditReport:
        """Compare what was asked for with what the last forward and backward really ran."""
        from autoprec.audit import audit_model

        return audit_model(self, model)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Give an optimizer the storage formats this policy asks for; returns the same object."""
        from autoprec.numerics import optimizer as optimizers

        wrapped: torch.optim.Optimizer = optimizers.wrap_optimizer(optimizer, self, model=model)
        return wrapped

    def save(self, path: Path | str) -> Path:
        """Write the policy file (YAML, or JSON by suffix), atomically."""
        return save_policy(self, path)


def load(path: Path | str) -> Policy:
    """Load a policy file. Data only: nothing is imported or run.

    Raises:
        PolicyError: missing, unreadable, or not a valid policy.
    """
    return load_policy(path, cls=Policy)
