"""Delayed scales of layers whose weights are loaded while a run goes on: they are those of other weights.

The layers begin anew, as before their first step: each operand scales by its own amax until there is a history. A
history that was itself loaded, and that no step has changed since, belongs to the weights that are loaded beside it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: What was last loaded into the executions of a module, by the parameter's name.
_LOADED: weakref.WeakKeyDictionary[nn.Module, dict[str, dict[str, Tensor]]] = weakref.WeakKeyDictionary()
#: Where an execution lives in the ``__dict__`` of its module.
ATTRIBUTE = "_autoprec"


def load_execution(module: nn.Module, parameter: str, run: Any, state: Mapping[str, Tensor], device: Any) -> None:
    """Let an execution continue from what a checkpoint holds of it; delayed scales that are not there begin anew.

    Args:
        module: what the execution is installed in.
        parameter: the name of its weight there.
        run: the execution.
        state: its entries of the checkpoint; shapes as ``run.state`` returns them.
        device: where the weight lies.
    """
    begun = {name: value for name, value in _first(run.state(device)).items() if name not in state}
    run.load_state({**begun, **state}, device)
    _LOADED.setdefault(module, {})[parameter] = _histories(run.state(device))


def weights_were_loaded(module: nn.Module, *, whole: bool) -> None:
    """Begin the delayed scales of a layer anew, or (``whole``) those of every layer of a model."""
    for one in module.modules() if whole else (module,):
        for parameter, run in _executions(one):
            device = place_of(next(iter(one.parameters()), None))
            now = _histories(run.state(device))
            before = _LOADED.get(one, {}).get(parameter)
            if now and (before is None or not _equal(now, before)):
                run.load_state(_first(now), device)


def place_of(weight: Tensor | None) -> torch.device:
    """Return where what is remembered of a layer lies: beside its weight, of any shape; on meta is no place."""
    return torch.device("cpu") if weight is None or weight.is_meta else weight.device


def _executions(module: nn.Module) -> Iterator[tuple[str, Any]]:
    found = module.__dict__.get(ATTRIBUTE)
    if found is not None:
        yield from getattr(found, "executions", {"weight": found}).items()


def _histories(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != "random"}


def _first(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return delayed scales as they are before the first step: no history; Transformer Engine's scales begin at 1."""
    return {
        name: torch.ones_like(value) if name.endswith(".scale") and value.dim() else torch.zeros_like(value)
        for name, value in _histories(state).items()
    }


def _equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name].to(value.device)) for name, value in first.items()
    )
