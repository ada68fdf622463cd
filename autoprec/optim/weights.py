"""Weights and weight gradients stored in low precision, behind the parameters the model already has.

A stored weight is the same ``nn.Parameter`` object with its content exchanged for a ``StoredTensor`` (the model, the
optimizer and ``state_dict`` keys see no difference). Where the exchange is not possible (the parameter has hooks,
another holder such as DDP, or is a DTensor) the parameter keeps its dtype and holds the rounded values, while the
stored form lives beside it: the numerics are the same, the bytes are not saved, and :attr:`StoredWeights.emulated`
says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.errors import AutoPrecWarning
from autoprec.numerics.rounding import SIXTEEN_BIT
from autoprec.optim.codecs import Codec, codec
from autoprec.optim.holders import tables_among
from autoprec.optim.tensor import StoredTensor, decoded
from autoprec.policy import OptimizerPolicy

#: The entry of an optimizer's checkpoint that holds the exact value of a weight.
EXACT = "weight_exact"


#: References to a storage: of the tensor, and of the Python object that is asked for.
_ALONE = 2


def storable(parameter: Tensor) -> bool:
    """Say whether a parameter, of any shape, may be stored in fewer bits: real, and no wider than what updates it."""
    return parameter.is_floating_point() and parameter.dtype != torch.float64


def _obstacle(parameter: Tensor) -> str:
    """Return why a parameter's content cannot be exchanged, or an empty string."""
    if type(parameter) is not nn.Parameter:
        return f"it is a {type(parameter).__name__}"
    if parameter.dtype != torch.float32:
        return f"the script already keeps it in {parameter.dtype}"
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return "gradient hooks are registered on it"
    if parameter._use_count() > 1:  # type: ignore[attr-defined]
        return "a gradient accumulator holds it (DistributedDataParallel, or a graph that is still alive)"
    if torch._C._storage_Use_Count(parameter.untyped_storage()._cdata) > _ALONE:
        return "other tensors share its memory, and would not see its updates"
    return ""


def _exchange(parameter: Tensor, content: Tensor) -> None:
    """Give ``parameter`` the content of ``content``; identity, gradient flag and attributes stay."""
    fresh = nn.Parameter(content, requires_grad=parameter.requires_grad)
    fresh.__dict__.update({k: v for k, v in parameter.__dict__.items() if k not in ("parts", "codec", "_is_param")})
    gradient, parameter.grad = parameter.grad, None
    torch.utils.swap_tensors(parameter, fresh)  # type: ignore[no-untyped-call]
    parameter.grad = gradient


def _hooked(parameter: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Hook the gradient of a parameter, also of one that is frozen now and may train later; return the handle."""
    trains = parameter.requires_grad
    parameter.requires_grad_()  # torch wants it meanwhile
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trains)
    return handle


def _current(parameter: Tensor, stored: StoredTensor) -> Tensor:
    """Return the exact FP32 value of a weight that is stored beside its parameter.

    Where something else has written to the parameter (a checkpoint, an average of weights, clipping), that counts.
    """
    held = parameter.detach()
    return torch.where(held == stored.decode().to(held.dtype), stored.exact(), held.float())


class StoredWeights:
    """The weights one optimizer keeps in low precision."""

    def __init__(self, how: Codec | None) -> None:
        self.codec = how
        self.real: list[Tensor] = []
        self.beside: dict[
            int, tuple[Tensor, StoredTensor]
        ] = {}  # by id: torch will not exchange what is weakly referenced
        self.loaded: dict[int, Tensor] = {}  # exact values of a checkpoint that had them beside, until the next step
        self.emulated: dict[str, int] = {}
        self.gradients: Codec | None = None
        self.rounded: set[int] = set()  # ids of parameters whose gradient is rounded at the step instead of stored
        self.gradients_stored = 0
        self.waiting: set[int] = set()  # ids of parameters whose stored gradient no step has used yet
        self.warned = False
        self._handles: list[Any] = []

    @classmethod
    def install(
        cls,
        parameters: Sequence[Tensor],
        choice: OptimizerPolicy,
        exact: Mapping[int, Tensor] | None = None,
    ) -> StoredWeights:
        """Exchange every matrix among ``parameters`` but embeddings, and hook its gradient storage.

        Of what the script itself keeps in 16 bits nothing is left out: vectors and embeddings lose updates as well.

        Args:
            parameters: of any shapes and dtypes.
            choice: in which formats weights and gradients are stored.
            exact: values that count in the place of a parameter's own, of its shape, by its id.
        """
        made = cls(codec("weights", choice.weights))
        made.gradients = codec("gradients", choice.gradients)
        made.take(parameters, exact)
        return made

    def take(self, parameters: Sequence[Tensor], exact: Mapping[int, Tensor] | None = None) -> None:
        """Store further parameters, of any shapes, as :meth:`install` does: those of a group that is added later."""
        embeddings = tables_among(parameters)
        for parameter in parameters:
            if not storable(parameter):
                continue
            obstacle, matrix = _obstacle(parameter), parameter.dim() >= 2 and id(parameter) not in embeddings
            if self.codec is not None and (matrix or parameter.dtype in SIXTEEN_BIT):
                self._add(parameter, obstacle, (exact or {}).get(id(parameter)))
            if not matrix:
                continue
            if self.gradients is not None and "holds it" in obstacle:  # DDP works on the gradient after our hook would
                self.rounded.add(id(parameter))
            elif self.gradients is not None:
                self._handles.append(_hooked(parameter, self._store_gradient))

    def _add(self, parameter: Tensor, obstacle: str, exact: Tensor | None) -> None:
        assert self.codec is not None
        if isinstance(parameter, StoredTensor) and parameter.codec == self.codec:  # of a copied model
            self.real.append(parameter)
            return
        values = parameter.exact() if isinstance(parameter, StoredTensor) else parameter.detach().float()
        stored = StoredTensor.store(values if exact is None else exact, self.codec)
        if not obstacle:
            try:
                _exchange(parameter, stored)
            except RuntimeError as error:  # a weak reference or another holder: torch refuses the exchange
                obstacle = str(error).splitlines()[0]
        if not obstacle:
            self.real.append(parameter)
            return
        self.emulated[obstacle] = self.emulated.get(obstacle, 0) + 1
        self.beside[id(parameter)] = (parameter, stored)
        with torch.no_grad():
            parameter.copy_(stored.decode())

    def __contains__(self, parameter: Tensor) -> bool:
        found = isinstance(parameter, StoredTensor) or id(parameter) in self.beside or id(parameter) in self.rounded
        return found or isinstance(parameter.grad, StoredTensor)

    def gradient(self, parameter: Tensor) -> Tensor:
        """Return the gradient the update uses, FP32 of the parameter's shape: decoded, or rounded now."""
        self.waiting.discard(id(parameter))
        gradient: Tensor = decoded(parameter.grad).float()
        if self.gradients is not None and id(parameter) in self.rounded:
            self.gradients_stored += 1
            return self.gradients.decode(self.gradients.encode(gradient), gradient.shape)
        return gradient

    def _store_gradient(self, parameter: Tensor) -> None:
        assert self.gradients is not None
        if parameter.grad is None:  # a hook before this one has taken the step
            return
        self.gradients_stored += 1
        if isinstance(parameter.grad, StoredTensor):  # autograd has added to it, which stored it again
            if id(parameter) in self.waiting:
                self._warn_of_accumulation()
        else:
            parameter.grad = StoredTensor.store(parameter.grad, self.gradients)
        self.waiting.add(id(parameter))

    def _warn_of_accumulation(self) -> None:
        if self.warned or self.gradients is None:
            return
        self.warned = True
        warnings.warn(
            f"gradients: {self.gradients.name} is rounded after every micro-step of gradient accumulation: over 64 of "
            "them the sum is off by about 0.8 % in bf16, 14 % in e4m3; set gradients: fp32 where many are accumulated",
            AutoPrecWarning,
            stacklevel=2,
        )

    def read(self, parameter: Tensor) -> Tensor:
        """Return the FP32 value the optimizer updates: the parameter itself, or a copy of its shape."""
        if isinstance(parameter, StoredTensor):
            if id(parameter) in self.loaded:
                self._take_loaded(parameter)
                del self.loaded[id(parameter)]
            return parameter.exact()
        found = self.beside.get(id(parameter))
        return parameter.detach().float() if found is None else _current(*found)

    def write(self, parameter: Tensor, values: Tensor, generator: torch.Generator) -> None:
        """Store updated values.

        Args:
            parameter: of any shape.
            values: FP32 of the same shape.
            generator: of the noise of stochastic rounding.
        """
        stored = self._stored(parameter)
        if stored is None:
            if values.data_ptr() != parameter.data_ptr():
                parameter.detach().copy_(values)
            return
        stored.assign(values, generator)
        if stored is not parameter:
            parameter.detach().copy_(stored.decode())

    def _stored(self, parameter: Tensor) -> StoredTensor | None:
        if isinstance(parameter, StoredTensor):
            return parameter
        return self.beside_of(parameter)

    def checkpoint(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return what an optimizer checkpoint must add: the exact value of a weight that is stored beside.

        Args:
            parameter: of any shape.

        Returns:
            One FP32 tensor of its shape by name, or nothing.
        """
        found = self.beside.get(id(parameter))
        return {} if found is None else {EXACT: _current(*found)}

    def restore(self, parameter: Tensor, values: Tensor) -> None:
        """Take over a loaded exact value; it counts where the parameter has the value that it rounds to.

        Args:
            parameter: of any shape.
            values: of the same shape, any float dtype.
        """
        stored = self.beside_of(parameter)
        if stored is not None:
            stored.assign(values.float())
        elif isinstance(parameter, StoredTensor):
            self.loaded[id(parameter)] = values.float()
            self._take_loaded(parameter)

    def _take_loaded(self, parameter: StoredTensor) -> None:
        """Put a loaded exact value in the place of what it rounds to; the model may load after the optimizer."""
        exact, held = self.loaded[id(parameter)], parameter.exact()
        rounded = StoredTensor.store(exact, parameter.codec).decode()
        if not torch.equal(known := torch.where(held == rounded, exact, held), held):
            parameter.assign(known)

    def beside_of(self, parameter: Tensor) -> StoredTensor | None:
        """Return what is stored beside a parameter, of its shape, if anything."""
        found = self.beside.get(id(parameter))
        return None if found is None else found[1]

    def exact_values(self) -> dict[int, Tensor]:
        """Return the exact values, FP32 of their shapes, of weights stored beside, by their parameters' ids."""
        return {key: _current(*found) for key, found in self.beside.items()}

    def remove(self) -> None:
        """Give every parameter its plain FP32 content back (the exact stored value)."""
        for handle in self._handles:
            handle.remove()
        for parameter in self.real:
            if isinstance(parameter, StoredTensor):
                _exchange(parameter, parameter.exact())
        for parameter, stored in self.beside.values():
            with torch.no_grad():
                parameter.copy_(_current(parameter, stored))
        self.real, self.beside, self.rounded = [], {}, set()
