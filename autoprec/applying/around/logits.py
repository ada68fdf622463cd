"""Cross entropy over a large vocabulary, a few rows at a time: ``implementation: {loss: chunked}``.

Logits of 16 bits are widened to float32 before their loss, and with them, their log-probabilities and two gradients
torch passes over tokens times vocabulary values eight times, in main memory. Here a slice of rows is widened, its loss
and its gradient computed by torch's own kernels while it lies in the cache, and the gradient written back in the
logits' dtype. The result differs from that of the whole in the last bit of sums, and in no rounding to 16 bits more.

A loss is mostly computed outside of the model's forward, where no mode of ours sees it. So the model's logits are
handed out as :class:`Logits`: float32 to whoever looks, widened when somebody does, and read in slices by
``F.cross_entropy``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.numerics.rounding import SIXTEEN_BIT
from autoprec.policy.sections import FEWEST_CLASSES

#: Values of a slice, 4 MB in float32: a GPU needs more of them at once to be busy.
_SLICE, _SLICE_GPU = 2**20, 2**25
#: What hands on all of a tensor's values, each at most once, in another shape or order.
_VIEWS = frozenset(
    getattr(owner, name)
    for owner, names in (
        (Tensor, "view reshape flatten unflatten contiguous transpose permute squeeze unsqueeze narrow movedim"),
        (torch, "reshape flatten transpose permute squeeze unsqueeze narrow movedim"),
    )
    for name in names.split()
)
_METHODS = "size dim numel ndimension is_floating_point is_contiguous stride nelement __len__"
_PROPERTIES = "shape ndim device requires_grad grad_fn is_leaf is_cuda is_cpu layout is_sparse"
#: What says how a tensor is, and reads no value of it.
_FACTS = frozenset({getattr(Tensor, name) for name in _METHODS.split()}) | {
    getattr(Tensor, name).__get__ for name in _PROPERTIES.split()
}
#: What wants the tensor that the loss is computed from.
_WATCHED = frozenset({Tensor.register_hook, Tensor.retain_grad, cast(Any, Tensor.grad).__get__})


def is_chunkable(value: Any) -> bool:
    """Say whether a tensor may be the logits of a large vocabulary that a loss is computed of."""
    return (
        isinstance(value, Tensor)
        and value.dtype in (*SIXTEEN_BIT, torch.float32)
        and value.ndim > 1
        and value.shape[-1] >= FEWEST_CLASSES
        and value.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    )


def chunked_cross_entropy(logits: Tensor, target: Any = None, *args: Any, **kwargs: Any) -> Tensor | None:
    """Return ``F.cross_entropy`` in float32, computed a slice of rows at a time; None where it has to be whole.

    Args:
        logits: ``[rows, classes]`` in 16 or 32 bits.
        target: ``[rows]``, classes.
        args, kwargs: the others of ``F.cross_entropy``.

    Returns:
        ``[]``, or ``[rows]`` with ``reduction="none"``, in float32.
    """
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given: dict[str, Any] = {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0, "weight": None}
    given |= dict(zip(names, args, strict=False)) | kwargs
    whole = given.pop("size_average", None) is not None or given.pop("reduce", None) is not None
    if whole or not is_chunkable(logits) or logits.ndim != 2 or not isinstance(target, Tensor) or target.ndim != 1:
        return None
    if target.is_floating_point() or given["reduction"] not in ("mean", "sum", "none"):
        return None
    with torch.autocast(logits.device.type, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(logits, target, _Rest(**given))  # type: ignore[no-untyped-call]
    return loss


@dataclass(frozen=True, slots=True)
class _Rest:
    """The arguments of ``F.cross_entropy`` beside logits and target."""

    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss ``[rows]`` of logits ``[rows, classes]``."""
        return F.cross_entropy(
            logits,
            target,
            None if self.weight is None else self.weight.float(),
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )

    def share(self, target: Tensor) -> Tensor:
        """Return what each row counts in the loss, ``[]`` or ``[rows]``."""
        if self.reduction != "mean":
            return torch.ones((), dtype=torch.float32, device=target.device)
        counted = target != self.ignore_index
        if self.weight is None:
            return 1.0 / counted.sum().float()
        weights = self.weight.float().index_select(0, torch.where(counted, target, 0))
        return 1.0 / (weights * counted).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The loss and, beside it, its gradient: the logits are in the cache once."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, rest: _Rest) -> Tensor:
        share = rest.share(target)
        losses, gradient = _by_slices(logits, target, rest, share)
        ctx.save_for_backward(logits, target, gradient, share)
        ctx.rest = rest
        return losses if rest.reduction == "none" else losses.sum() * share

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        logits, target, gradient, share = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is differentiated: as torch computes it
            with torch.autocast(logits.device.type, enabled=False):
                rows = ctx.rest.rows(logits.float(), target)
                loss = rows if ctx.rest.reduction == "none" else rows.sum() * share
            return (*torch.autograd.grad(loss, logits, upstream, create_graph=True), None, None)
        if ctx.rest.reduction == "none":
            exact = False
        elif upstream.device.type == "cpu":
            factor = upstream.item()
            if factor == 1.0:
                return gradient, None, None
            exact = gradient.dtype is torch.float32 or abs(math.frexp(factor)[0]) == 0.5
        else:
            exact = True  # which of both it is only the device knows
        if exact:
            return gradient * upstream.to(gradient.dtype), None, None
        # another factor would round the gradient a second time
        return _by_slices(logits, target, ctx.rest, share * upstream)[1], None, None


def _by_slices(logits: Tensor, target: Tensor, rest: _Rest, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each row ``[rows]`` in float32, and the gradient ``[rows, classes]`` in the logits' dtype.

    Args:
        logits: ``[rows, classes]``.
        target: ``[rows]``.
        rest: further arguments of the loss.
        share: gradient of the loss of each row, ``[]`` or ``[rows]``.
    """
    gradient, losses = torch.empty_like(logits), []
    share = share.expand(len(target))
    values = _SLICE if logits.device.type == "cpu" else _SLICE_GPU
    height = max(1, values // logits.shape[1])
    for first in range(0, len(target), height):
        rows = slice(first, first + height)
        wide = logits[rows].detach().float().requires_grad_()
        with torch.enable_grad():
            loss = rest.rows(wide, target[rows])
        (gradient[rows],) = torch.autograd.grad(loss, wide, share[rows])
        losses.append(loss.detach())
    return torch.cat(losses) if losses else logits.new_zeros(0, dtype=torch.float32), gradient


@dataclass(slots=True)
class _Family:
    """The float32 tensors that were made of logits and of views of them: (tensor, its version then)."""

    made: list[tuple[Tensor, int]] = field(default_factory=list)
    watched: bool = False

    @property
    def changed(self) -> bool:
        """Whether the logits are no longer what the model returned: somebody wrote, or looks on."""
        return self.watched or any(tensor._version != version for tensor, version in self.made)


class Logits(Tensor):
    """A model's logits, float32 to whoever looks; cross entropy reads what the model computed, in slices.

    The data are those of ``plain``, in the model's own dtype. Any function but views and ``F.cross_entropy`` gets the
    widened tensor, which is made once; where somebody writes into it, the loss reads that one as well.
    """

    plain: Tensor
    family: _Family
    said: Callable[[], None] | None
    _above: tuple[Logits, Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None
    _wide: Tensor | None

    @staticmethod
    def of(plain: Tensor, said: Callable[[], None] | None = None) -> Logits:
        """Return logits that stand for a tensor.

        Args:
            plain: ``[..., classes]``, of 16 or 32 bits.
            said: called when a loss was computed of them in slices.
        """
        return _logits(plain, _Family(), said, None)

    def wide(self) -> Tensor:
        """Return the logits ``[..., classes]`` in float32, an ordinary tensor: the same one each time."""
        if self.plain.dtype is torch.float32:
            return self.plain
        if self._wide is None:
            if self._above is None:
                self._wide = self.plain.float()
            else:
                above, view, args, kwargs = self._above
                self._wide = view(above.wide(), *args, **kwargs)
            self.family.made.append((self._wide, self._wide._version))
        return self._wide

    def _viewed(self, view: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plain = view(self.plain, *args, **kwargs)
        if plain is self.plain:
            return self
        return _logits(plain, self.family, self.said, (self, view, args, kwargs)) if is_chunkable(plain) else None

    def _loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        if self.family.changed:
            return None
        found = chunked_cross_entropy(self.plain, *args, **kwargs)
        if found is not None and self.said is not None:
            self.said()
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer as the float32 tensor would."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            first = args[0] if args else kwargs.get("input")
            if isinstance(first, Logits):
                found = _answer(first, func, args[1:], {k: v for k, v in kwargs.items() if k != "input" or args})
                if found is not None:
                    return found
                if func in _WATCHED:
                    first.family.watched = True
            if func is torch.autograd.grad:  # the graph of a loss in slices begins at what the model computed
                found = func(*_mapped(args, _plain), **_mapped(kwargs, _plain))
                return tuple(each.float() if isinstance(each, Tensor) else each for each in found)
            return func(*_mapped(args, Logits.wide), **_mapped(kwargs, Logits.wide))


def _answer(logits: Logits, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function of logits is, where no value has to be widened for it; else None."""
    if func is F.cross_entropy and not any(isinstance(each, Logits) for each in args):
        return logits._loss(args, kwargs)
    if func is Tensor.dtype.__get__:  # type: ignore[attr-defined]
        return torch.float32
    if func in _FACTS:
        return func(logits.plain, *args, **kwargs)
    if is_widening(func, args, kwargs):
        return logits
    viewed = func in _VIEWS and not any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values()))
    basic = func is Tensor.__getitem__ and _is_basic(args[0])
    return logits._viewed(func, args, kwargs) if viewed or basic else None


def is_widening(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a function casts its tensor to float32 and does nothing else.

    Args:
        func: any.
        args, kwargs: what it is called with beside the tensor.
    """
    if func is Tensor.float:
        return not args and not kwargs
    return func is Tensor.to and (args, kwargs) in (((torch.float32,), {}), ((), {"dtype": torch.float32}))


def _is_basic(index: Any) -> bool:
    """Say whether an index takes each value at most once: a row taken twice has two gradients, to be added in FP32."""
    if isinstance(index, tuple):
        return all(_is_basic(each) for each in index)
    whole = isinstance(index, (int, slice)) or index is None or index is Ellipsis
    return whole or (isinstance(index, Tensor) and index.dtype is torch.bool)


def _plain(logits: Logits) -> Tensor:
    return logits.plain


def _mapped(value: Any, put: Callable[[Logits], Tensor]) -> Any:
    """Return nested containers with other tensors in the place of logits."""
    if isinstance(value, Logits):
        return put(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(each, put) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(each, put) for each in value)
    return {key: _mapped(each, put) for key, each in value.items()} if type(value) is dict else value


def _logits(plain: Tensor, family: _Family, said: Callable[[], None] | None, above: Any) -> Logits:
    with torch._C.DisableTorchFunctionSubclass():
        out = plain.as_subclass(Logits)
    out.plain, out.family, out.said, out._above, out._wide = plain, family, said, above, None
    return out
