"""Low-precision weights and optimizer state inside the user's own optimizer object.

``wrap_optimizer`` patches the optimizer in place: its class, ``param_groups``, schedulers, step hooks, ``GradScaler``
and ``state_dict`` keep working. The seam is ``_init_group``, which every ``torch.optim`` optimizer calls at the start
of ``step`` to collect what it will update: parameters that a policy stores in low precision are updated there, by
:mod:`autoprec.optim.update`, and left out of what the optimizer itself goes on to update. Matrices
(two dimensions or more) are stored low; biases and norms stay FP32. Stored weights exclude embeddings.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from autoprec.errors import PolicyMismatchError, UnsupportedError, UsageError
from autoprec.optim.checkpoint import Checkpoint, attach, hook_checkpoints, narrow_moments, parameters_of
from autoprec.optim.codecs import Codec, codec
from autoprec.optim.communication import install_gradient_hook
from autoprec.optim.guard import StepGuard, only_makes_state
from autoprec.optim.holders import models_holding
from autoprec.optim.loss_scaling import LossScaler
from autoprec.optim.stepping.fused import check_fused, set_fused, why_not_fused
from autoprec.optim.stepping.products import set_products
from autoprec.optim.tensor import StoredTensor, decoded
from autoprec.optim.update import adam_update, muon_update, sgd_update
from autoprec.optim.weights import StoredWeights, storable
from autoprec.policy import OptimizerPolicy, Policy

_ATTRIBUTE, _SCALER = "_autoprec_runtime", "_autoprec_loss_scaler"
_ADAM, _SGD, _MUON = "adam", "sgd", "muon"
#: torch's optimizers whose update is known here.
_BASES: dict[str, Any] = {_ADAM: torch.optim.Adam, _SGD: torch.optim.SGD, _MUON: torch.optim.Muon}


def inner_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return the attribute in which an optimizer holds another that it steps with; empty where it has none."""
    return next((name for name, held in vars(optimizer).items() if isinstance(held, torch.optim.Optimizer)), "")


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Return which update rule applies.

    Raises:
        UnsupportedError: the optimizer is not Adam, AdamW, SGD or Muon of torch, or overrides their ``step``.
    """
    for kind, base in _BASES.items():
        if isinstance(optimizer, base):
            own, torchs = type(optimizer).step, base.step  # torch wraps it per class and keeps its names
            if (own.__module__, own.__qualname__) == (torchs.__module__, torchs.__qualname__):
                return kind
    inner = inner_optimizer(optimizer)
    raise UnsupportedError(
        "low-precision state is implemented for torch's Adam, AdamW, SGD and Muon, not for "
        f"{type(optimizer).__module__}.{type(optimizer).__name__}",
        where="policy.optimizer",
        fix=f"wrap the optimizer that it steps with: policy.wrap_optimizer(optimizer.{inner})"
        if inner
        else "use torch.optim.AdamW or torch.optim.Muon, or set weights, exp_avg, exp_avg_sq and gradients to fp32",
    )


def _check(
    optimizer: torch.optim.Optimizer, choice: OptimizerPolicy, kind: str, model: nn.Module | None = None
) -> None:
    """Refuse combinations that cannot work, with the reason.

    Muon trains matrices alone, so another optimizer trains the rest of ``model``: second moments are asked of that one.
    """
    parameters = list(parameters_of(optimizer))
    if any(hasattr(p, "to_local") for p in parameters):
        raise UnsupportedError(
            "sharded parameters (FSDP2, DTensor) keep their state in FP32 here",
            where="policy.optimizer",
            fix="use an 8-bit optimizer of torchao.optim (it shards its state), or fp32 state here",
        )
    matrices = [p for p in parameters if p.dim() >= 2]
    if matrices and not any(map(storable, matrices)):
        raise UnsupportedError(
            f"every matrix is {' or '.join(sorted({str(p.dtype).removeprefix('torch.') for p in matrices}))}, which is "
            "left as it is",
            where="policy.optimizer",
            fix="set weights, gradients, exp_avg and exp_avg_sq to fp32, which keeps the script's own dtypes",
        )
    if not matrices:
        raise UnsupportedError(
            "no parameter is a matrix (FSDP flattens them), so nothing would be stored in low precision",
            where="policy.optimizer",
            fix="set weights, gradients, exp_avg and exp_avg_sq to fp32",
        )
    for group in optimizer.param_groups:
        for option in ("amsgrad", "differentiable"):
            if group.get(option):
                raise UnsupportedError(
                    f"{option}=True needs its state in FP32",
                    where="policy.optimizer",
                    fix=f"set {option}=False, or keep the optimizer section at fp32",
                )
        if choice.exp_avg_sq != "fp32" and (kind == _SGD or (kind == _MUON and not _others(optimizer, model))):
            raise PolicyMismatchError(
                f"exp_avg_sq: {choice.exp_avg_sq} asks for a second moment, and {_BASES[kind].__name__} has none",
                where="policy.optimizer",
                fix="set exp_avg_sq: fp32",
            )
        if kind == _SGD and choice.exp_avg != "fp32" and not group["momentum"]:
            raise PolicyMismatchError(
                f"exp_avg: {choice.exp_avg} asks for a first moment, and SGD without momentum has none",
                where="policy.optimizer",
                fix="set exp_avg: fp32",
            )


@dataclass
class OptimizerRuntime:
    """What an optimizer carries that stores in low precision: formats, stored weights, guard and counters."""

    choice: OptimizerPolicy
    kind: str
    weights: StoredWeights
    guard: StepGuard
    steps: int = 0
    codecs: dict[str, Codec | None] = field(init=False)
    checkpoint: Checkpoint = field(init=False)
    observer: Callable[[Tensor, Tensor, Tensor | None], None] | None = None
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)
    order: dict[int, int] = field(default_factory=dict)
    step: Any = None
    step_before: Any = None

    def __post_init__(self) -> None:
        first = codec("exp_avg", self.choice.exp_avg)
        self.codecs = {
            "exp_avg": first,
            "momentum_buffer": first,
            "exp_avg_sq": codec("exp_avg_sq", self.choice.exp_avg_sq),
        }
        self.checkpoint = Checkpoint(self.weights, self.codecs, ("exp_avg", "exp_avg_sq") if self.kind == _ADAM else ())

    def generator(self, parameter: Tensor, step: int) -> torch.Generator:
        """Return the private noise stream of one parameter at one step: resuming a run resumes its noise.

        Args:
            parameter: of any shape; the stream is on its device.
            step: of the optimizer, from 1 on.
        """
        device = parameter.device
        if device not in self.generators:
            self.generators[device] = torch.Generator(device)
        index = self.order[id(parameter)]
        return self.generators[device].manual_seed((step * 1_000_003 + index) * 2_654_435_761 % (1 << 62))

    def update_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[Tensor]:
        """Update this group's managed parameters; return those left to the optimizer itself.

        Args:
            optimizer: whose step it is.
            group: one of its parameter groups; parameters of any shapes.
        """
        if group is optimizer.param_groups[0] and not only_makes_state(optimizer):
            self.steps += 1
        left: list[Tensor] = []
        for parameter in group["params"]:
            self.order.setdefault(id(parameter), len(self.order))
            if parameter.grad is None or parameter.grad.is_sparse or not self.checkpoint.stores(parameter):
                left.append(parameter)
            else:
                self._update(optimizer, group, parameter)
        return left

    def _update(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
        stateless = self.kind == _SGD and not group["momentum"]  # for which torch makes no entry either
        state: dict[str, Any] = {} if stateless else optimizer.state[parameter]
        gradient = self.weights.gradient(parameter)
        scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler when the optimizer is fused
        if scale is not None:
            gradient = gradient / scale.to(gradient.device)
        weight = self.weights.read(parameter)
        if self.kind == _ADAM:
            number = self._step_number(state, group)
            moments = {name: self._read(state, name, parameter) for name in ("exp_avg", "exp_avg_sq")}
            adam_update(weight, gradient, moments["exp_avg"], moments["exp_avg_sq"], number, group)
        elif self.kind == _MUON:
            number, moments = float(self.steps), {"momentum_buffer": self._read(state, "momentum_buffer", parameter)}
            muon_update(weight, gradient, moments["momentum_buffer"], group)
        else:
            number = float(self.steps)
            old = state.get("momentum_buffer")
            new = sgd_update(
                weight, gradient, None if old is None else self._read(state, "momentum_buffer", parameter), group
            )
            moments = {} if new is None else {"momentum_buffer": new}
        noise = self.generator(parameter, int(number))
        if self.observer is not None:
            self.observer(parameter, weight, moments.get("exp_avg_sq"))
        for name, values in moments.items():
            self._write(state, name, values, parameter, noise)
        self.weights.write(parameter, weight, noise)

    def _step_number(self, state: dict[str, Any], group: dict[str, Any]) -> float:
        if "step" not in state:
            on_device = group.get("capturable") or group.get("fused")
            device = group["params"][0].device if on_device else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state["step"] += 1
        return float(state["step"].item())

    def _read(self, state: dict[str, Any], name: str, parameter: Tensor) -> Tensor:
        held = state.get(name)
        if held is None:
            return torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        return held.decode() if isinstance(held, StoredTensor) else held.float()

    def _write(
        self, state: dict[str, Any], name: str, values: Tensor, parameter: Tensor, noise: torch.Generator
    ) -> None:
        held, how = state.get(name), self.codecs[name]
        if how is None:
            if held is not values:
                state[name] = values.to(parameter.dtype)
        elif isinstance(held, StoredTensor):
            held.assign(values, noise)
        else:
            state[name] = StoredTensor.store(values, how, noise)


def runtime_of(optimizer: torch.optim.Optimizer) -> OptimizerRuntime | None:
    """Return what ``wrap_optimizer`` put on this optimizer, or None."""
    return getattr(optimizer, _ATTRIBUTE, None)


def loss_scaler_of(optimizer: torch.optim.Optimizer) -> LossScaler | None:
    """Return the loss scaler that ``wrap_optimizer`` put on this optimizer, or None."""
    return getattr(optimizer, _SCALER, None)


def skipped_steps(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps the guard or our loss scaler left out (a script's own GradScaler not included)."""
    runtime, scaler = runtime_of(optimizer), loss_scaler_of(optimizer)
    return (runtime.guard.skipped if runtime else 0) + (scaler.skipped_steps if scaler else 0)


def optimizer_counters(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return what decides how the next step is taken, beside the state: float64 of shape ``[]``, by name.

    Distributed checkpoints want all tensors that have a size on one device; these have none.
    """
    runtime, scaler = runtime_of(optimizer), loss_scaler_of(optimizer)
    found: dict[str, float] = {}
    if runtime is not None:
        found |= {"steps": runtime.steps, "skipped": runtime.guard.skipped, "nonfinite": runtime.guard.nonfinite}
    if scaler is not None and scaler.active:
        found |= {"loss_scale": scaler.scale, "good_steps": scaler.good_steps, "overflows": scaler.skipped_steps}
    return {name: torch.tensor(float(count), dtype=torch.float64) for name, count in found.items()}


def stored_codes(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the codes that a checkpoint must hold beside the state; see :mod:`autoprec.optim.checkpoint`.

    Args:
        optimizer: wrapped or not.

    Returns:
        Tensors by name, of the shapes of the format's parts.
    """
    runtime = runtime_of(optimizer)
    return {} if runtime is None else runtime.checkpoint.codes(optimizer)


def load_counters(optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Continue from :func:`optimizer_counters`; what the state does not name stays as it is.

    Args:
        optimizer: wrapped for the same policy.
        state: float64 of shape ``[]``, by name; tensors of other names may be among them.
    """
    runtime, scaler = runtime_of(optimizer), loss_scaler_of(optimizer)
    held = {name: float(state[name]) for name in optimizer_counters(optimizer) if name in state}
    if runtime is not None:
        runtime.steps = int(held.get("steps", runtime.steps))
        runtime.guard.skipped = int(held.get("skipped", runtime.guard.skipped))
        runtime.guard.nonfinite = int(held.get("nonfinite", runtime.guard.nonfinite))
    if scaler is not None:
        scaler.scale = held.get("loss_scale", scaler.scale)
        scaler.good_steps = int(held.get("good_steps", scaler.good_steps))
        scaler.skipped_steps = int(held.get("overflows", scaler.skipped_steps))


def _others(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> list[Tensor]:
    """Return the parameters that train, and not by this optimizer, of a model; of all that it trains for None."""
    own = list(parameters_of(optimizer))
    known = {id(parameter) for parameter in own}
    models = models_holding(own) if model is None else [model]
    return [p for one in models for p in one.parameters() if p.requires_grad and id(p) not in known]


def _has_nothing(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> bool:
    """Say whether an optimizer has no matrix because another one trains them: AdamW for what Muon leaves."""
    if any(p.dim() >= 2 for p in parameters_of(optimizer)):
        return False
    return any(p.dim() >= 2 for p in _others(optimizer, model))


def wrap_optimizer(
    optimizer: torch.optim.Optimizer, policy: Policy | OptimizerPolicy, model: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Store weights, gradients and state as the policy's optimizer section says; return the same object.

    Args:
        optimizer: ``torch.optim`` AdamW, Adam, SGD or Muon, before or after its first step. One that trains no matrix,
            where another optimizer does, keeps its state.
        policy: a policy, or its optimizer section alone. All FP32 leaves an optimizer untouched, and takes off
            what another policy had it store: state and weights are then as the optimizer itself keeps them. A whole
            policy also brings its loss scaling, and its gradient communication where the model is distributed.
        model: what it trains; needed for loss scaling and gradient communication alone.

    Raises:
        UnsupportedError: another optimizer, an option that needs FP32 state, or no fused step.
        PolicyMismatchError: the policy stores something this optimizer does not have.
    """
    wrapped, exact = runtime_of(optimizer) is not None, _take_off(optimizer)
    choice = policy.optimizer if isinstance(policy, Policy) else policy
    if choice.stores and _has_nothing(optimizer, model):
        choice = OptimizerPolicy(update=choice.update, products=choice.products)
    if choice.stores:  # before anything is changed
        _check(optimizer, choice, _kind(optimizer), model)
    step_as(optimizer, choice, model)
    if isinstance(policy, Policy) and policy.loss_scaling == "dynamic":
        if model is None:
            raise UsageError(
                "loss scaling enters at the model's outputs", fix="pass the model: wrap_optimizer(o, policy, model)"
            )
        setattr(optimizer, _SCALER, LossScaler.install(model, [optimizer]))
    if isinstance(policy, Policy) and model is not None and policy.communication.gradients != "fp32":
        install_gradient_hook(model, policy.communication.gradients)
    if not choice.stores:
        if wrapped:
            _narrow(optimizer)
        return optimizer
    guard = StepGuard.install(optimizer)  # that state cannot take a non-finite value back out
    weights = StoredWeights.install(list(parameters_of(optimizer)), choice, exact)
    runtime = OptimizerRuntime(choice, _kind(optimizer), weights, guard)
    original = optimizer._init_group  # type: ignore[attr-defined]

    def init_group(self: torch.optim.Optimizer, group: dict[str, Any], *lists: Any, **named: Any) -> Any:
        if torch._guards.TracingContext.try_get() is not None:  # Dynamo calls it once, and never again
            raise UnsupportedError(
                "the step of an optimizer that stores weights or state in fewer bits cannot be compiled",
                where="policy.optimizer",
                fix="call policy.wrap_optimizer(optimizer) before torch.compile takes optimizer.step",
            )
        return original({**group, "params": runtime.update_group(self, group)}, *lists, **named)

    def add_param_group(self: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        type(self).add_param_group(self, group)
        weights.take(self.param_groups[-1]["params"])

    runtime.step_before, runtime.step = optimizer.step, _uncompiled(optimizer)
    optimizer.step = runtime.step  # type: ignore[method-assign]
    optimizer._init_group = types.MethodType(init_group, optimizer)  # type: ignore[attr-defined]
    optimizer.add_param_group = types.MethodType(add_param_group, optimizer)  # type: ignore[method-assign]
    setattr(optimizer, _ATTRIBUTE, runtime)
    hook_checkpoints(optimizer)
    attach(optimizer, runtime.checkpoint)
    runtime.checkpoint.encode(optimizer)
    return optimizer


def _uncompiled(optimizer: torch.optim.Optimizer) -> Any:
    """Return the step of an optimizer as one that no graph is made of: ``torch.compile`` may be around it."""
    step = optimizer.step

    @functools.wraps(step)
    def uncompiled(_self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return types.MethodType(_disable_dynamo(uncompiled), optimizer)


def check_optimizer(optimizer: torch.optim.Optimizer, policy: Policy, model: nn.Module | None = None) -> None:
    """Refuse now what :func:`wrap_optimizer` would refuse; changes nothing.

    Args:
        optimizer: to be wrapped.
        policy: what is asked of it.
        model: whose parameters it trains; None where that is not known.
    """
    if policy.optimizer.stores and not _has_nothing(optimizer, model):
        _check(optimizer, policy.optimizer, _kind(optimizer), model)
    check_step(optimizer, policy.optimizer, model)


def check_step(optimizer: torch.optim.Optimizer, choice: OptimizerPolicy, model: nn.Module | None = None) -> None:
    """Refuse now what :func:`step_as` would refuse; changes nothing.

    Args:
        optimizer: before or after its first step.
        choice: how it is to step.
        model: whose parameters it trains; None where that is not known.

    Raises:
        UnsupportedError: it cannot update in one kernel, and trains all of its model.
    """
    if _fuses(optimizer, choice, model):
        check_fused(optimizer)


def _fuses(optimizer: torch.optim.Optimizer, choice: OptimizerPolicy, model: nn.Module | None) -> bool:
    """Say whether a fused update is about an optimizer: Muon has none, and AdamW beside it has."""
    return choice.update == "fused" and not (why_not_fused(optimizer) and _others(optimizer, model))


def step_as(optimizer: torch.optim.Optimizer, choice: OptimizerPolicy, model: nn.Module | None = None) -> None:
    """Let an optimizer step as a policy says, or as the script has it; storage is left alone.

    Args:
        optimizer: before or after its first step.
        choice: how it is to step.
        model: whose parameters it trains; None where that is not known.

    Raises:
        UnsupportedError: it cannot update in one kernel, and trains all of its model.
    """
    set_fused(optimizer, wanted=_fuses(optimizer, choice, model))
    set_products(optimizer, choice.products)


def rewrap_optimizer(optimizer: torch.optim.Optimizer, policy: Policy, model: nn.Module) -> None:
    """Go over to another policy in the middle of a run: stored values are converted, counters go on.

    What does not change is left alone.

    Args:
        optimizer: wrapped or not.
        policy: what is asked from now on.
        model: whose parameters it trains.

    Raises:
        UnsupportedError, PolicyMismatchError: see :func:`wrap_optimizer`.
    """
    install_gradient_hook(model, policy.communication.gradients)
    runtime, scaler = runtime_of(optimizer), loss_scaler_of(optimizer)
    step_as(optimizer, policy.optimizer, model)
    stored = OptimizerPolicy() if runtime is None else runtime.choice
    if stored.stores_as(policy.optimizer) and (scaler is not None) == (policy.loss_scaling == "dynamic"):
        return
    counters = optimizer_counters(optimizer)
    wrap_optimizer(optimizer, policy, model=model)
    load_counters(optimizer, counters)


def _narrow(optimizer: torch.optim.Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        narrow_moments(parameter, optimizer.state.get(parameter, {}))


def _take_off(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Take the wrapping off, with state in FP32; return exact weights that parameters are too narrow for, by id."""
    scaler = loss_scaler_of(optimizer)
    if scaler is not None:
        scaler.remove(optimizer)
        delattr(optimizer, _SCALER)
    runtime = runtime_of(optimizer)
    if runtime is None:
        return {}
    runtime.guard.remove()
    attach(optimizer, None)
    del optimizer._init_group, optimizer.add_param_group  # type: ignore[attr-defined]
    if optimizer.__dict__.get("step") == runtime.step:  # else a scheduler has wrapped it since
        optimizer.step = runtime.step_before  # type: ignore[method-assign]
    delattr(optimizer, _ATTRIBUTE)
    for state in optimizer.state.values():
        for name, value in list(state.items()):
            state[name] = decoded(value)
    exact = runtime.weights.exact_values()
    runtime.weights.remove()
    return exact
