"""The state of a wrapped optimizer as checkpoints hold it: that of a plain optimizer, in FP32, and back again.

``torch.optim.Optimizer.load_state_dict`` casts every floating-point entry of the state to the dtype of its parameter,
whatever it was saved in. For parameters of 16 bits that would round exact weights and decoded moments before they are
encoded again, so what is stored here passes by that cast. An optimizer may also load before it is wrapped: for such
parameters the codes themselves travel beside the state, in the entry of the first parameter group, which torch leaves
as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from autoprec.optim.codecs import Codec
from autoprec.optim.tensor import StoredTensor, decoded
from autoprec.optim.weights import EXACT, StoredWeights, storable

#: The entry of a parameter group that holds what a policy remembers.
ENTRY = "autoprec"
_CODES = "optimizer.codes"
_ATTRIBUTE = "_autoprec_checkpoint"
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer, of any shape, in the order in which its checkpoints number them."""
    for group in optimizer.param_groups:
        yield from group["params"]


class _AsSaved:
    """A loaded tensor that torch does not see as one, and so leaves as it is."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def hook_checkpoints(optimizer: torch.optim.Optimizer) -> None:
    """Register what writes and reads the checkpoints of an optimizer, once: nothing as long as none is attached.

    The hooks stay, because the optimizer may be wrapped for another phase while it loads a checkpoint.
    """
    if _ATTRIBUTE not in optimizer.__dict__:
        attach(optimizer, None)
        optimizer.register_state_dict_post_hook(_plain)
        optimizer.register_load_state_dict_pre_hook(_hide)
        optimizer.register_load_state_dict_post_hook(_encode)


def attach(optimizer: torch.optim.Optimizer, checkpoint: Checkpoint | None) -> None:
    """Say what the hooks of an optimizer ask; None takes it off."""
    optimizer.__dict__[_ATTRIBUTE] = checkpoint


def _attached(optimizer: torch.optim.Optimizer) -> Checkpoint | None:
    found: Checkpoint | None = optimizer.__dict__.get(_ATTRIBUTE)
    return found


def _plain(optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> dict[str, Any]:
    found = _attached(optimizer)
    return document if found is None else found.plain(optimizer, document)


def _hide(optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> dict[str, Any]:
    found = _attached(optimizer)
    return document if found is None else found.hide(optimizer, document)


def _encode(optimizer: torch.optim.Optimizer) -> None:
    found = _attached(optimizer)
    if found is not None:
        found.encode(optimizer)


@dataclass(frozen=True)
class Checkpoint:
    """What hooks of ``state_dict`` and ``load_state_dict`` do (:func:`hook_checkpoints`).

    ``codecs``: how each entry of the state is stored, None as the optimizer itself keeps it; ``moments``: entries that
    must be there wherever the state is not empty (Adam's).
    """

    weights: StoredWeights
    codecs: Mapping[str, Codec | None]
    moments: tuple[str, ...] = ()

    def plain(self, optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> dict[str, Any]:
        """Post-hook of ``state_dict``: decoded values, and exact weights that no parameter holds."""
        state = {}
        for key, held in document["state"].items():
            state[key] = {name: decoded(value) for name, value in held.items()} if isinstance(held, dict) else held
        for key, parameter in enumerate(parameters_of(optimizer)):
            exact = self.weights.checkpoint(parameter)
            if exact:
                state[key] = (state.get(key) or self._before_the_first_step(parameter)) | exact
        return {**document, "state": state}

    def _before_the_first_step(self, parameter: Tensor) -> dict[str, Tensor]:
        if not self.moments:
            return {}
        zeros = {name: torch.zeros_like(parameter.detach(), dtype=torch.float32) for name in self.moments}
        return {"step": torch.zeros((), dtype=torch.float32)} | zeros

    def hide(self, optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> dict[str, Any]:
        """Pre-hook of ``load_state_dict``: keep the values of what is stored here from being cast."""
        names = {EXACT, *(name for name, how in self.codecs.items() if how is not None)}
        numbers = chain.from_iterable(group["params"] for group in document["param_groups"])
        state = dict(document["state"])
        for key, parameter in zip(numbers, parameters_of(optimizer), strict=False):  # torch refuses another length
            held = state.get(key)
            if isinstance(held, dict) and parameter.dtype is not torch.float32:
                hidden = {name: _AsSaved(held[name]) for name in names if isinstance(held.get(name), Tensor)}
                state[key] = held | hidden
        return {**document, "state": state}

    def encode(self, optimizer: torch.optim.Optimizer) -> None:
        """Post-hook of ``load_state_dict``: store what is in the state in the policy's formats."""
        codes: dict[str, Tensor] = {}
        for group in optimizer.param_groups:
            codes |= group.get(ENTRY, {})
        for number, parameter in enumerate(parameters_of(optimizer)):
            state = optimizer.state.get(parameter)
            if state is None:
                continue
            for name, value in state.items():
                if isinstance(value, _AsSaved):
                    state[name] = value.value.to(parameter.device)
            exact = state.pop(EXACT, None)
            if exact is not None and self.weights.codec is not None:
                known = _decoded_from(codes, number, EXACT, self.weights.codec, parameter, exact)
                self.weights.restore(parameter, exact if known is None else known.exact())
            for name, how in self.codecs.items():
                value = state.get(name)
                if isinstance(value, Tensor) and how is not None and self.stores(parameter):
                    known = _decoded_from(codes, number, name, how, parameter, value)
                    state[name] = StoredTensor.store(value.float(), how) if known is None else known
            narrow_moments(parameter, state)

    def codes(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return the codes and scales of what is stored for parameters that are not FP32.

        Args:
            optimizer: whose state they are.

        Returns:
            Tensors by name, of the shapes and dtypes of the format: one entry for each part.
        """
        found: dict[str, Tensor] = {}
        for number, parameter in enumerate(parameters_of(optimizer)):
            if parameter.dtype is torch.float32:
                continue
            stored = {name: optimizer.state.get(parameter, {}).get(name) for name in self.codecs}
            for name, value in (stored | {EXACT: self.weights.beside_of(parameter)}).items():
                if isinstance(value, StoredTensor):
                    key = _key(number, name, value.codec)
                    found |= {f"{key}.{index}": part for index, part in enumerate(value.parts)}
        return found

    def stores(self, parameter: Tensor) -> bool:
        """Say whether a parameter, of any shape, is updated here: a matrix with any part in low precision."""
        if not storable(parameter):
            return False
        return parameter in self.weights or (parameter.dim() >= 2 and any(self.codecs.values()))


def narrow_moments(parameter: Tensor, state: dict[str, Any]) -> None:
    """Give plain moments of a parameter its dtype, as the optimizer itself keeps them.

    Args:
        parameter: of any shape and dtype.
        state: of the parameter; moments of its shape are replaced.
    """
    for name in _MOMENTS:
        value = state.get(name)
        if isinstance(value, Tensor) and not isinstance(value, StoredTensor) and parameter.is_floating_point():
            state[name] = value.to(parameter.dtype)


def _key(number: int, name: str, how: Codec) -> str:
    return f"{_CODES}.{number}.{name}.{how.name}"


def _decoded_from(
    codes: Mapping[str, Tensor], number: int, name: str, how: Codec, parameter: Tensor, value: Tensor
) -> StoredTensor | None:
    """Return what the codes of a checkpoint hold of an entry; None where it is not what the entry was rounded from.

    A plain optimizer that has trained meanwhile passes on codes that are out of date.
    """
    parts: list[Tensor] = []
    while (part := codes.get(f"{_key(number, name, how)}.{len(parts)}")) is not None:
        parts.append(part.to(parameter.device, copy=True))
    if not parts:
        return None
    known = StoredTensor(tuple(parts), how, parameter.shape)
    agrees = torch.equal(known.exact().to(parameter.dtype), value.to(parameter.dtype))
    return known if agrees else None
