"""What an optimizer adds to a step: bytes of its state beside those of the model, and products of its own (Muon)."""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autoprec.graph.analysis.modules import ModelNames, on_this_rank
from autoprec.graph.report import NewtonSchulz
from autoprec.graph.trace import Trace
from autoprec.optim.optimizer import inner_optimizer
from autoprec.optim.stepping.products import multiplies

#: The largest parameter for which an optimizer may be tried out on real zeros.
_MOST_VALUES = 1 << 26


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(on_this_rank(t).numel() * t.element_size() for t in tensors)


def _state_tensors(state: Any) -> Iterable[torch.Tensor]:
    for values in state.values():
        for value in values.values() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor):
                yield value


def step_of_twin(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[tuple[Mapping[str, Any], Sequence[torch.nn.Parameter]]],
    state: Mapping[torch.nn.Parameter, dict[str, Any]] | None = None,
) -> int:
    """Run one step of a copy of the optimizer on stand-ins for its parameters; return the bytes of its state.

    Args:
        optimizer: whose copy makes the step; it is not changed.
        groups: parameter groups whose settings hold, with the stand-ins of each, which have gradients of their shapes.
        state: of the stand-ins before the step, which writes into it; none by default.
    """
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = defaultdict(dict, state or {})
    twin.param_groups = [
        {key: copy.copy(value) for key, value in group.items() if key != "params"}
        | {"params": list(shadows), "foreach": False, "fused": False}
        for group, shadows in groups
    ]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # what a step draws, the script draws itself
        inspect.unwrap(type(optimizer).step)(twin)  # unwrapped: the script's step hooks must not see this
    return _bytes(_state_tensors(twin.state))


def stand_in(shape: torch.Size, dtype: torch.dtype, device: str = "meta") -> torch.nn.Parameter:
    """Return a parameter of zeros with a gradient, without data on the meta device.

    Args:
        shape: of the parameter.
        dtype: of the parameter and its gradient.
        device: ``meta`` holds no data.
    """
    shadow = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
    shadow.grad = torch.zeros_like(shadow)
    return shadow


def _predicted(optimizer: torch.optim.Optimizer) -> int:
    """Predict, shape by shape, on the meta device (no data); an optimizer that reads values gets zeros."""
    total = 0
    for group in optimizer.param_groups:
        shapes = Counter((on_this_rank(p).shape, p.dtype) for p in group["params"] if p.requires_grad)
        for (shape, dtype), count in shapes.items():
            try:
                size = step_of_twin(optimizer, [(group, [stand_in(shape, dtype)])])
            except RuntimeError:  # NotImplementedError is one of them
                if shape.numel() > _MOST_VALUES:
                    raise
                size = step_of_twin(optimizer, [(group, [stand_in(shape, dtype, "cpu")])])
            total += count * size
    return total


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the bytes of an optimizer's state; predicted before its first step, None when that is not possible."""
    existing = list(_state_tensors(optimizer.state))
    if existing:
        return _bytes(existing)
    try:
        return _predicted(optimizer)
    except Exception:  # someone else's optimizer may need anything at all; then its size is unknown
        return None


def step_memory(trace: Trace, names: ModelNames, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, int]:
    """Return bytes by purpose; a purpose that could not be counted is left out.

    ``saved_for_backward`` counts each storage once, without parameters and the batch; ``live_at_backward`` is all
    that was alive when backward began, which also sees the inputs that checkpointing keeps. ``gradients_in_forward``
    are those of the step before, where a script releases them between forward and backward.

    Args:
        trace: the recorded step.
        names: modules and parameters of the model.
        optimizers: of the script, for the bytes of their state.
    """
    unique = [p for name, p in names.parameters.items() if names.aliases[name] == name]
    out = {
        "parameters": _bytes(unique),
        "gradients": _bytes(p.grad for p in unique if p.grad is not None),
        "saved_for_backward": trace.saved_bytes or trace.live_bytes,
        "live_at_backward": trace.live_bytes,
        "buffers": _bytes(names.root.buffers()),
    }
    if trace.zeroed_late:  # from the second step on
        out["gradients_in_forward"] = out["gradients"]
    counted = [optimizer_bytes(optimizer) for optimizer in optimizers]
    known = [size for size in counted if size is not None]
    if counted and len(known) == len(counted):
        out["optimizer"] = sum(known)
    return out


def muon_matrices(
    optimizers: Iterable[torch.optim.Optimizer],
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], torch.nn.Parameter]]:
    """Yield what Muon makes orthogonal in a step: torch's, or another optimizer of that name.

    Keller Jordan's optimizers mark the groups that are Adam's with ``use_muon: False``, and flatten convolutions.
    """
    for optimizer in optimizers:
        groups = optimizer.param_groups if "muon" in type(optimizer).__name__.lower() else []
        for group in (one for one in groups if one.get("use_muon", True)):
            yield from ((optimizer, group, p) for p in group["params"] if p.requires_grad and p.dim() >= 2)


def multiplied_matrices(
    optimizers: Iterable[torch.optim.Optimizer],
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], torch.nn.Parameter]]:
    """Yield the matrices that a step may multiply: those of Muon, and of optimizers that are not torch's.

    One that steps with another optimizer has none: a twin of it would step with the real one.
    """
    for optimizer in optimizers:
        meant = multiplies(optimizer) and not inner_optimizer(optimizer)
        for group in (one for one in optimizer.param_groups if meant and one.get("use_muon", True)):
            yield from ((optimizer, group, p) for p in group["params"] if p.requires_grad and p.dim() >= 2)


def newton_schulz(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[NewtonSchulz, ...]:
    """Return the shapes of what Muon makes orthogonal in a step."""
    found: Counter[tuple[int, int, int]] = Counter()
    for _, group, p in muon_matrices(optimizers):
        sides = sorted((p.shape[0], p.numel() // max(1, p.shape[0])))
        found[(sides[0], sides[1], int(group.get("ns_steps", 5)))] += 1
    return tuple(NewtonSchulz(*shape, count) for shape, count in found.items())
