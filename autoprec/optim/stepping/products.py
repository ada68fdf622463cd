"""The products of matrices in an optimizer's step, in a dtype that a policy names.

Muon makes updates orthogonal by Newton-Schulz iterations, Shampoo and SOAP precondition them from both sides, GaLore
projects them: large products, which no layer runs. torch's Muon and Keller Jordan's iterate in bf16, others in fp32,
and a CPU multiplies one of the two several times faster than the other. Around the step a dispatch mode computes each
such product in the wanted dtype, and returns it in the operands' own. What is between two products stays the script's.

What the step compiles stays compiled: Inductor leaves products to torch, where the mode sees them. A step that is
compiled as a whole, ``torch.compile(optimizer.step)``, runs uncompiled.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.numerics.plan import NATIVE
from autoprec.optim.stepping.modes import never_compiled
from autoprec.policy.sections import PRODUCTS
from autoprec.precision.recipes import KEEP

_ATTRIBUTE = "_autoprec_products"
_aten = torch.ops.aten
#: Operators of products, and the position of the first factor; addends go before the factors.
_FACTORS: dict[Any, int] = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
}
#: The same where they write into a tensor: what is given as ``out``, or the addend itself.
_WRITING: dict[Any, Any] = {
    _aten.mm.out: _aten.mm.default,
    _aten.bmm.out: _aten.bmm.default,
    _aten.addmm.out: _aten.addmm.default,
    _aten.baddbmm.out: _aten.baddbmm.default,
    _aten.addmm_.default: _aten.addmm.default,
    _aten.baddbmm_.default: _aten.baddbmm.default,
}


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes products of large matrices in the wanted dtype; counts them, and the steps that had any."""

    def __init__(self, wanted: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._least, operands = PRODUCTS[wanted]
        self._dtype, self._operands = NATIVE[wanted], {NATIVE[name] for name in operands}
        self.count = self.steps = 0
        self.begins = False  # a step, which has multiplied nothing yet

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch's wrapper would import its compiler on the first operator (seconds)."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: else what Dynamo meets first under this mode would stay uncompiled for good."""
        return True

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plain = _WRITING.get(func, func)
        if plain not in _FACTORS:
            return func(*args, **kwargs)
        if any(hasattr(one, "__tensor_flatten__") and one is not FakeTensor for one in types):
            return NotImplemented  # the subclass takes it apart (DTensor); its inner products come back here
        if not self._is_meant(*args[_FACTORS[plain] :][:2]):
            return func(*args, **kwargs)
        own = args[_FACTORS[plain]].dtype
        into = kwargs.pop("out", args[0]) if plain is not func else None
        cast = [one.to(self._dtype) if isinstance(one, torch.Tensor) else one for one in args]
        result = plain(*cast, **kwargs)
        self.count, self.steps, self.begins = self.count + 1, self.steps + self.begins, False
        if into is None:
            return result.to(own)
        return into.resize_(result.shape).copy_(result)

    def _is_meant(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        if isinstance(first, FakeTensor) or first.is_meta:  # a graph is being traced
            return False
        if first.dtype not in self._operands or second.dtype != first.dtype or first.layout != torch.strided:
            return False
        if first.shape[-2] * first.shape[-1] * second.shape[-1] < self._least:
            return False
        trained = torch.is_grad_enabled() and (first.requires_grad or second.requires_grad)
        return not trained and torch._C._current_graph_task_id() == -1


@dataclass
class ProductsOfStep:
    """What is around the step of an optimizer: the mode while one is wanted, and what it has seen."""

    mode: _Products | None = None
    steps: int = 0
    step: Any = None
    before: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Products that were computed in the wanted dtype so far."""
        return 0 if self.mode is None else self.mode.count


def products_of(optimizer: torch.optim.Optimizer) -> ProductsOfStep | None:
    """Return what :func:`set_products` has put around the step of an optimizer; None for nothing."""
    return optimizer.__dict__.get(_ATTRIBUTE)


def multiplies(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether the step of an optimizer may multiply matrices: Muon's, and of those that are not torch's any."""
    own = type(optimizer).step
    return not own.__module__.startswith("torch.optim.") or isinstance(optimizer, torch.optim.Muon)


def set_products(optimizer: torch.optim.Optimizer, wanted: str) -> None:
    """Let the step of an optimizer compute its products in another dtype, or as the script has it.

    Args:
        optimizer: before or after its first step; one whose step multiplies nothing is left alone.
        wanted: a name of :data:`autoprec.policy.sections.PRODUCTS`, or ``keep``.
    """
    held = products_of(optimizer)
    if held is None:
        if wanted == KEEP or not multiplies(optimizer):
            return
        held = _put_around(optimizer)
    held.mode, held.steps = (None if wanted == KEEP else _Products(wanted)), 0
    if wanted == KEEP and optimizer.__dict__.get("step") == held.step:  # else a scheduler has wrapped it since
        del optimizer.step, optimizer.__dict__[_ATTRIBUTE]
        optimizer.__dict__.update(held.before)


def _put_around(optimizer: torch.optim.Optimizer) -> ProductsOfStep:
    """Replace the step of an optimizer by one that runs under the mode of the time."""
    held, step = ProductsOfStep(), optimizer.step

    @functools.wraps(step)
    def under_mode(_self: torch.optim.Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        mode, given = held.mode, () if closure is None else (closure,)
        if mode is None:
            return step(*given, *args, **kwargs)
        held.steps, mode.begins = held.steps + 1, True
        with mode:
            return step(*(_outside(mode, one) for one in given), *args, **kwargs)

    held.before = {"step": optimizer.__dict__["step"]} if "step" in optimizer.__dict__ else {}
    held.step = types.MethodType(never_compiled(under_mode), optimizer)
    optimizer.step = held.step  # type: ignore[method-assign]
    setattr(optimizer, _ATTRIBUTE, held)
    return held


def _outside(mode: _Products, closure: Callable[..., Any]) -> Callable[..., Any]:
    """Return a closure that runs forward and backward outside the mode, which is the last one entered."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            return closure(*args, **kwargs)
        finally:
            mode.__enter__()  # type: ignore[no-untyped-call]

    return plain if callable(closure) else closure
