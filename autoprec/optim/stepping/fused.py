"""An optimizer's step in one kernel: torch's own ``fused=True``, put on an optimizer that exists, and off again.

By default torch updates on a CPU one parameter and one operation after the other, on a GPU one operation for all
parameters; fused, one kernel reads and writes each value once. Sums are in the same precision, so that only roundings
differ. Kernels: Adam, AdamW and SGD on CPUs and CUDA, Adagrad on CPUs (torch/optim/adam.py, ``fused``).
"""

from __future__ import annotations

from typing import Any

import torch

from autoprec.errors import UnsupportedError

_ATTRIBUTE = "_autoprec_fused"
#: Optimizers with a fused kernel, and the devices that have it.
_DEVICES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("cpu", "cuda"),
    torch.optim.AdamW: ("cpu", "cuda"),
    torch.optim.SGD: ("cpu", "cuda"),
    torch.optim.Adagrad: ("cpu",),
}


def why_not_fused(optimizer: torch.optim.Optimizer) -> str:
    """Return why an optimizer cannot update in one kernel; empty where it can, or does already."""
    name = type(optimizer).__name__
    devices = _DEVICES.get(type(optimizer))
    if devices is None:
        return f"{name} has no fused step of torch's"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} with differentiable=True has no fused step"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type not in devices:
                return f"{name} has no fused step on {parameter.device.type}"
            if not parameter.is_floating_point():
                return f"{name} has no fused step for {str(parameter.dtype).removeprefix('torch.')} parameters"
    return ""


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether each group of an optimizer is updated in one kernel."""
    return all(bool(group.get("fused")) for group in optimizer.param_groups)


def check_fused(optimizer: torch.optim.Optimizer) -> None:
    """Refuse now what :func:`fuse` would refuse; changes nothing.

    Args:
        optimizer: before or after its first step.

    Raises:
        UnsupportedError: it cannot update in one kernel.
    """
    if reason := why_not_fused(optimizer):
        raise UnsupportedError(
            reason, where="policy.optimizer", fix="set update: keep, or use torch's Adam, AdamW, SGD or Adagrad"
        )


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer update in one kernel, after its state was loaded as well; nothing where it does.

    Args:
        optimizer: before or after its first step.

    Raises:
        UnsupportedError: it cannot.
    """
    check_fused(optimizer)
    if is_fused(optimizer):
        return
    before = [(group, group.get("fused")) for group in (*optimizer.param_groups, optimizer.defaults)]
    handle = optimizer.register_load_state_dict_post_hook(_set)
    setattr(optimizer, _ATTRIBUTE, (before, handle))
    _set(optimizer)


def unfuse(optimizer: torch.optim.Optimizer) -> None:
    """Take :func:`fuse` off: groups update as they did; those that were added since as the first one."""
    held = optimizer.__dict__.pop(_ATTRIBUTE, None)
    if held is None:
        return
    before, handle = held
    handle.remove()
    first = before[0][1]
    for group in (*optimizer.param_groups, optimizer.defaults):
        group["fused"] = next((value for one, value in before if one is group), first)
    _move_steps(optimizer)


def set_fused(optimizer: torch.optim.Optimizer, *, wanted: bool) -> None:
    """Let an optimizer update in one kernel, or as the script has it.

    Args:
        optimizer: before or after its first step.
        wanted: whether in one kernel.

    Raises:
        UnsupportedError: it cannot.
    """
    (fuse if wanted else unfuse)(optimizer)


def _set(optimizer: torch.optim.Optimizer) -> None:
    for group in (*optimizer.param_groups, optimizer.defaults):
        group["fused"] = True
    _move_steps(optimizer)


def _move_steps(optimizer: torch.optim.Optimizer) -> None:
    """Put counts of steps where the step expects them: beside the parameter if fused, else on the CPU."""
    for group in optimizer.param_groups:
        beside = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(parameter.device if beside else "cpu")
