"""Find the model that is being trained: by whose parameters the optimizers own, never by name or type."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from autoprec.applying.units import tunable_units
from autoprec.support.living import living
from autoprec.trial.inside.observe.hooks import parameters_of

#: Modules that only carry another one: the user's model is the child that owns the same parameters.
_WRAPPERS = (
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.distributed",
    "accelerate",
    "lightning.fabric",
    "lightning.pytorch.overrides",
    "lightning.pytorch.strategies",
    "pytorch_lightning.overrides",
    "deepspeed",
    "timm.task",
)


@dataclass(slots=True)
class Found:
    """What a script trains.

    Attributes:
        roots: innermost user models, the one with the most trained parameters first.
        optimizers: those that own parameters of the roots; the first is primary: its steps are counted.
        parameters: the trainable parameters of all roots, in order.
        notes: what a person should know about it.
        copied: the optimizers train copies of the parameters, which the script copies back.
    """

    roots: list[nn.Module]
    optimizers: list[Optimizer]
    parameters: list[torch.Tensor]
    notes: list[str] = field(default_factory=list)
    copied: bool = False

    @property
    def root(self) -> nn.Module:
        """The primary model."""
        return self.roots[0]

    @property
    def root_parameters(self) -> list[torch.Tensor]:
        """The trained parameters of the primary model, of any shapes."""
        mine = {id(p) for p in self.root.parameters()}
        own = [p for p in self.parameters if id(p) in mine]
        # Inside functional_call other tensors stand for the parameters.
        return own or (self.parameters if len(self.roots) == 1 else [])

    @property
    def backward_only(self) -> bool:
        """True where no optimizer steps the model's own parameters: each backward counts as one step."""
        return self.copied or not self.optimizers


def _owned_numel(module: nn.Module, owned: set[int]) -> int:
    return sum(p.numel() for p in module.parameters() if id(p) in owned)


def _innermost(module: nn.Module, owned: set[int]) -> nn.Module:
    total = _owned_numel(module, owned)
    while type(module).__module__.startswith(_WRAPPERS):
        inner = [child for child in module.children() if _owned_numel(child, owned) == total]
        if len(inner) != 1:
            break
        module = inner[0]
    return module


def _without_copies(module: nn.Module, owned: set[int], called: nn.Module | None) -> nn.Module:
    """Return the model inside a module that holds it beside copies of it, as EMA wrappers do.

    That is a child with all trained parameters, where the rest has the same parameters once more, untrained; unless the
    training step calls more than the child.
    """
    total = _owned_numel(module, owned)
    for child in module.children():
        inside = list(child.modules())
        if _owned_numel(child, owned) != total or (called is not None and all(called is not one for one in inside)):
            continue
        own = {id(p) for p in child.parameters()}
        rest = Counter(tuple(p.shape) for p in module.parameters() if id(p) not in own)
        if not Counter(tuple(p.shape) for p in child.parameters()) - rest:
            return _without_copies(child, owned, called)
    return module


def _tops(owned: set[int], called: nn.Module | None) -> list[nn.Module]:
    """Return the outermost modules that own trained parameters, largest share first, wrappers removed."""
    modules = living(nn.Module)
    children = {id(child) for module in modules for child in module.children()}
    candidates = [m for m in modules if id(m) not in children]
    sized = [(m, size) for m in candidates if (size := _owned_numel(m, owned))]
    if not sized:  # a module that contains itself through a child hides every top
        sized = [(m, size) for m in modules if (size := _owned_numel(m, owned))]
    sized.sort(key=lambda pair: (-pair[1], -len(list(pair[0].modules()))))
    out: list[nn.Module] = []
    covered: set[int] = set()
    for module, _ in sized:
        fresh = {id(p) for p in module.parameters() if id(p) in owned} - covered
        if not fresh:
            continue
        covered |= fresh
        inner = _innermost(_without_copies(_innermost(module, owned), owned, called), owned)
        if all(inner is not other for other in out):
            out.append(inner)
    return out


@_disable_dynamo  # the first training forward may be inside torch.compile, which would trace this
def discover(
    optimizers: Sequence[Optimizer], *, loss_leaves: Iterable[torch.Tensor] = (), called: nn.Module | None = None
) -> Found | None:
    """Find the trained models now; None when no living module owns a trained parameter.

    Args:
        optimizers: every living optimizer, or none in a script that updates its weights itself.
        loss_leaves: without an optimizer, the parameters a loss reaches (:func:`loss_parameters`), of any shapes.
        called: the module whose call begins a training step, where that is known.
    """
    trained: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        trained |= {id(p): p for p in parameters_of(optimizer) if p.requires_grad}
    if not optimizers:
        trained = {id(p): p for p in loss_leaves}
    owned = set(trained)
    roots = _tops(owned, called)
    if not roots:
        return None
    roots.sort(key=lambda root: not tunable_units(root))  # a model with nothing to decide about comes last
    mine = {id(p) for p in roots[0].parameters()}
    share = [(sum(p.numel() for p in parameters_of(o) if id(p) in mine), o) for o in optimizers]
    ordered = [o for size, o in sorted(share, key=lambda pair: -pair[0])]
    in_roots = {id(p) for root in roots for p in root.parameters()}
    ordered = [o for o in ordered if any(id(p) in in_roots for p in parameters_of(o))]
    parameters = _ordered_parameters(roots, owned)
    notes = _notes(roots, optimizers, trained, in_roots)
    return Found(roots, ordered, parameters, notes)


def _ordered_parameters(roots: Sequence[nn.Module], owned: set[int]) -> list[torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}
    for root in roots:
        for parameter in root.parameters():
            if id(parameter) in owned:
                seen.setdefault(id(parameter), parameter)
    return list(seen.values())


def _notes(
    roots: Sequence[nn.Module], optimizers: Sequence[Optimizer], trained: dict[int, torch.Tensor], in_roots: set[int]
) -> list[str]:
    notes = []
    if not optimizers:
        notes.append("no torch Optimizer: each backward counts as one step")
    if len(roots) > 1:
        names = ", ".join(type(root).__name__ for root in roots)
        notes.append(f"several models are trained ({names}); the policy is for {type(roots[0]).__name__}")
    loose = len(set(trained) - in_roots)
    if loose:
        notes.append(f"{loose} trained tensors belong to no module")
    return notes


def loss_parameters(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves a loss reaches, walking its autograd graph to the AccumulateGrad nodes.

    Args:
        tensors: what backward is called on, of any shape.
    """
    seen: set[Any] = set()
    leaves: dict[int, torch.Tensor] = {}
    stack: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        stack.extend(following for following, _ in node.next_functions if following is not None)
    return list(leaves.values())


def holds_copies(optimizers: Iterable[Optimizer], weights: Sequence[torch.Tensor]) -> bool:
    """Say whether optimizers train copies of weights: most of them by their shapes, or all of them in one tensor.

    Args:
        optimizers: whose tensors belong to no module.
        weights: of the model that the loss reaches, of any shapes.
    """
    copies = [p for optimizer in optimizers for p in parameters_of(optimizer)]
    total = sum(p.numel() for p in weights)
    shared = Counter(p.shape for p in weights) & Counter(p.shape for p in copies)
    alike = sum(shape.numel() * count for shape, count in shared.items())
    return 2 * alike > total or any(p.numel() == total for p in copies)


def batch_size(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Return the samples of one call's inputs, of an integer ``[batch, length]`` where there is one; 0 if unseen."""
    flat: list[torch.Tensor] = []
    stack: list[Any] = [*reversed(list(kwargs.values())), *reversed(list(args))]
    while stack and len(flat) < 32:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            flat.append(value)
        elif isinstance(value, (list, tuple)):
            stack.extend(reversed(value))
        elif isinstance(value, dict):
            stack.extend(reversed(list(value.values())))
    shaped = [t for t in flat if t.dim() >= 1]
    tokens = [t for t in shaped if t.dim() == 2 and not t.is_floating_point() and t.dtype != torch.bool]
    return next((t.shape[0] for t in [*tokens, *shaped]), 0)


def is_running(model: nn.Module) -> bool:
    """Say whether a model's forward is on the stack; a script may also call the model's parts alone."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in ("forward", "_call_impl") and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
