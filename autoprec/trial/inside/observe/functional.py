"""Loops that take gradients as values: ``torch.autograd.grad`` by parameters, and ``functional_call`` on a dict.

Both are steps like any other: a loss, gradients, an update by hand. Gradients that are returned instead of stored are
lent to the parameters' ``grad`` for as long as the events are handled. The transforms of ``torch.func``
(``grad``, ``vmap``) differentiate inside a level of their own, where layers with a backward of their own cannot run:
that is reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from autoprec.trial.inside.observe.hooks import Hooks


class FunctionalLoop:
    """Patches the functional ways to a gradient for one :class:`~autoprec.trial.inside.observe.hooks.Hooks`."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        #: Parameters of the functional model, by the id of the tensor that stands for each.
        self._stand_ins: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
        self._named: dict[str, torch.Tensor] = {}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors that stood for parameters in the last call of the functional model, of any shapes, by name."""
        return dict(self._named)

    def install(self) -> None:
        """Patch ``torch.autograd.grad`` and ``functional_call``."""
        self._hooks.replace(torch.autograd, "grad", self._grad)
        self._hooks.replace(torch.func, "functional_call", self._functional_call)

    def _grad(self, original: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        # A graph is created for second derivatives (a gradient penalty, MAML): no update follows from that.
        higher = args[2] if len(args) > 2 else kwargs.get("create_graph", False)
        seen_elsewhere = self._hooks.steps_reported or self._hooks.busy
        roots = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
        if seen_elsewhere or higher or not leaves or not self._are_trained(roots, leaves):
            return original(outputs, inputs, *args, **kwargs)
        with self._hooks.inside_backward(roots):
            found = original(outputs, leaves, *args, **kwargs)
        with self._lent(leaves, found):
            self._hooks.events.after_backward(roots)
        return found

    def _are_trained(self, roots: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> bool:
        if all(isinstance(leaf, nn.Parameter) or id(leaf) in self._stand_ins for leaf in leaves):
            return True
        return self._hooks.plain is not None and self._hooks.plain(roots, leaves)

    @contextlib.contextmanager
    def _lent(self, leaves: Sequence[torch.Tensor], found: Sequence[torch.Tensor | None]) -> Iterator[None]:
        lent = []
        for leaf, gradient in zip(leaves, found, strict=True):
            owner = self._stand_ins.get(id(leaf), (leaf, leaf))[1]
            if owner.grad is None and gradient is not None:
                owner.grad = gradient.detach()
                lent.append(owner)
        try:
            yield
        finally:
            for owner in lent:
                owner.grad = None

    def _functional_call(self, original: Any, module: nn.Module, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if module.training and torch.is_grad_enabled():
            if torch._C._functorch.maybe_current_level() is not None:
                self._hooks.events.transformed()
            self._hooks.functional = module
            given = [parameters] if isinstance(parameters, Mapping) else list(parameters)
            owners = dict(module.named_parameters())
            rows = (row for mapping in given for row in mapping.items() if row[0] in owners)
            self._named = {name: tensor for name, tensor in rows if isinstance(tensor, torch.Tensor)}
            self._stand_ins = {id(tensor): (tensor, owners[name]) for name, tensor in self._named.items()}
        return original(module, parameters, *args, **kwargs)
