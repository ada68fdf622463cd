"""What a policy remembers while training, taken along in checkpoints.

A step under a policy may depend on earlier ones: delayed scales on amax histories, stochastic rounding on a random
stream, dynamic loss scaling on its scale. Resumed without them a run goes on, but not as it would have. So they travel
in the optimizer's ``state_dict``, as an entry of its first parameter group: scripts, trainers and
``torch.distributed.checkpoint`` save those already, and a plain optimizer that loads one keeps the entry unread.
The entries and their shapes depend on the policy alone: a distributed checkpoint loads into what is there before it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.applying.around.loading import load_execution
from autoprec.applying.raw_weights import unit_execution
from autoprec.applying.swap import root_of
from autoprec.applying.units import tunable_units, unwrap
from autoprec.errors import AutoPrecWarning
from autoprec.optim.checkpoint import ENTRY
from autoprec.optim.optimizer import load_counters, optimizer_counters, stored_codes

_HANDLES = "_autoprec_state_handles"
_PHASES = "autoprec.phases."


#: Models that a policy is on, each with what counts its steps (:class:`autoprec.applying.phases.Phases`) or None.
ON: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what the policy on a model remembers between steps, by ``layer.gemm.operand.part``.

    Delayed scaling: ``history`` float32 ``[amax_history_len]``, ``scale`` and ``seen`` float32; stochastic rounding:
    ``random``, the state of the layer's generator (uint8). Transformer Engine: ``scale`` and ``history`` of both
    directions. A policy with phases: the steps of the run so far.
    """
    found: dict[str, Tensor] = {}
    for name, unit in tunable_units(model).items():
        run = unit_execution(unit)
        if run is not None:
            found |= {f"{name}.{part}": value for part, value in run.state(unit.weight.device).items()}
    counted = ON.get(unwrap(model))
    return found if counted is None else found | {_PHASES + part: value for part, value in counted.state().items()}


def load_model_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Continue from :func:`model_state`; what the state does not name begins anew, with a warning.

    Args:
        model: that a policy was applied to.
        state: tensors by name, of the shapes that :func:`model_state` returned.
    """
    counted = ON.get(unwrap(model))
    if counted is not None:  # first: what runs the layers depends on how far the run is
        counted.load_state(_under(_PHASES, state))
    missing = []
    for name, unit in tunable_units(model).items():
        run = unit_execution(unit)
        wanted = {} if run is None else run.state(unit.weight.device)
        held = {part: state[f"{name}.{part}"] for part in wanted if f"{name}.{part}" in state}
        if wanted:
            load_execution(unit.module, unit.parameter, run, held, unit.weight.device)
        missing += [name] if held.keys() != wanted.keys() else []
    if missing:
        warnings.warn(
            f"the checkpoint holds no delayed scales or random streams for {len(missing)} layers ({missing[0]}, ...): "
            "they begin anew, and losses differ a little from those of a run that was not interrupted",
            AutoPrecWarning,
            stacklevel=2,
        )


def _state(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> dict[str, Tensor]:
    found = {f"optimizer.{name}": value for name, value in optimizer_counters(optimizer).items()}
    return (
        found
        | stored_codes(optimizer)
        | ({} if model is None else {f"model.{name}": v for name, v in model_state(model).items()})
    )


def _save(model: nn.Module | None, optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> dict[str, Any]:
    """Post-hook of ``state_dict``."""
    state, groups = _state(optimizer, model), document["param_groups"]
    if state and groups:
        document = {**document, "param_groups": [{**groups[0], ENTRY: state}, *groups[1:]]}
    return document


def _load(model: nn.Module | None, optimizer: torch.optim.Optimizer) -> None:
    """Post-hook of ``load_state_dict``: what was loaded lies in the live parameter groups."""
    held: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        held |= group.pop(ENTRY, {})
    counters = _under("optimizer.", held)
    if missing := [name for name in optimizer_counters(optimizer) if name not in counters]:
        warnings.warn(
            f"the checkpoint does not hold what the policy remembers of the optimizer ({', '.join(missing)}): "
            "it begins anew, and losses differ a little from those of a run that was not interrupted",
            AutoPrecWarning,
            stacklevel=2,
        )
    load_counters(optimizer, counters)
    if model is not None:
        load_model_state(model, _under("model.", held))


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


def _settle(model: nn.Module, *_args: Any) -> None:
    """Post-hook of ``step``: ranks agree on what they have seen before anything is saved."""
    root = root_of(unwrap(model))
    if root is not None and root.after_step is not None:
        root.after_step()


def carries_state(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether :func:`carry_state` was asked to look after this optimizer."""
    return _HANDLES in optimizer.__dict__


def carry_state(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
    """Let an optimizer's checkpoints carry what the policy on ``model`` and on the optimizer remembers.

    A checkpoint that was loaded before the policy was applied is read now.
    """
    for handle in optimizer.__dict__.pop(_HANDLES, []):
        handle.remove()
    if not _state(optimizer, model):
        for group in optimizer.param_groups:
            group.pop(ENTRY, None)
        return
    handles = [
        optimizer.register_state_dict_post_hook(partial(_save, model)),
        optimizer.register_load_state_dict_post_hook(partial(_load, model)),
    ]
    if model is not None:
        handles.append(optimizer.register_step_post_hook(partial(_settle, model)))
    optimizer.__dict__[_HANDLES] = handles
    if any(ENTRY in group for group in optimizer.param_groups):
        _load(model, optimizer)
