"""Dynamic loss scaling for FP16, put into scripts that have none.

The scale lives inside the backward pass only: gradients are multiplied where they enter the model (at its outputs)
and divided where they leave it (at its parameters, before they are accumulated, and at its inputs). The script
therefore never sees a scaled loss or gradient: clipping, logging and accumulation need no change. Where a model
returns several tensors, the script gets copies of them: a loss computed from the logits that are returned beside it
would otherwise pass its gradient through both, multiplied twice; so it does of what the forward leaves in attributes
(``self.aux_loss``). A backward pass that enters the model nowhere, because the script calls its parts or the loss is of
what forward hooks have caught, divides nothing. A step whose gradients overflowed is left out and counted, and the
scale halved; after ``growth_interval`` good steps it doubles (Micikevicius et al., arXiv 1710.03740; constants of
``torch.amp.GradScaler``). A script with its own ``GradScaler`` is left alone. Optimizers of one model share its scale,
which changes once for all of their steps.

Limits: FSDP hands gradients to its shards past the hooks of parameters, so a sharded model is refused. A parameter that
the script also uses outside the model's forward (an explicit weight penalty) gets that part of its gradient divided
although it was never multiplied; move such a term into the forward.
"""

from __future__ import annotations

import copy
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from autoprec.errors import UnsupportedError
from autoprec.numerics.sharded import is_sharded
from autoprec.optim.guard import before_update, gradient_norm
from autoprec.support.living import living

#: Attributes that every module has.
_TORCHS_OWN = frozenset(nn.Module().__dict__)
_OWN_SCALER = "the script has its own GradScaler"
#: Where the scale stops: a loss is never divided, and 2**32 times a usual gradient is still finite in fp32.
_SMALLEST, _LARGEST = 1.0, 2.0**32


def script_has_scaler() -> bool:
    """Say whether an enabled ``GradScaler`` (torch's, or a subclass) is alive in this process."""
    return any(scaler.is_enabled() for scaler in living(torch.amp.GradScaler))


@dataclass(eq=False)
class LossScaler:
    """Scale, count, adapt. Build it with :meth:`install`.

    ``scale`` is a power of two, so scaling and unscaling change no bit of a gradient that stays in range.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0
    skipped_steps: int = 0
    inactive_reason: str = ""
    _handles: list[Any] = field(default_factory=list)
    _of: dict[int, list[Any]] = field(default_factory=dict)  # handles of each optimizer
    _overflowed: dict[int, bool] = field(default_factory=dict)  # optimizers that have stepped since the scale changed
    _held: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    _left: list[tuple[nn.Module, str, Any, Any]] = field(default_factory=list)
    _entered: set[int] = field(default_factory=set)  # backward passes under way that have entered the model
    _traced: bool = False  # a compiled graph enters, and says nothing
    _begun: bool = False  # a forward has run that a backward pass may follow

    @classmethod
    def install(cls, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> LossScaler:
        """Hook ``model`` and ``optimizers``; does nothing (see ``inactive_reason``) when the script scales itself.

        Raises:
            UnsupportedError: the model is sharded.
        """
        if is_sharded(model) or any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
            raise UnsupportedError(
                "gradients of a sharded model (FSDP) pass by what would unscale them",
                where="policy.loss_scaling",
                fix="set loss_scaling: none, and bf16 in place of fp16; or scale in the script (torch.amp.GradScaler)",
            )
        shared = _ON.get(model)
        if shared is not None and shared.active:
            shared._join(optimizers)
            return shared
        made = cls()
        if script_has_scaler():
            made.inactive_reason = _OWN_SCALER
            return made
        made._handles.append(model.register_forward_pre_hook(made._unscale_inputs, with_kwargs=True))
        made._handles.append(model.register_forward_hook(made._scale_outputs))
        made._hook_parameters(model)
        made._join(optimizers)
        _ON[model] = made
        return made

    def _join(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            self._of[id(optimizer)] = [
                optimizer.register_step_pre_hook(before_update(self._before_step)),
                optimizer.register_step_post_hook(self._after_step),
            ]

    @property
    def active(self) -> bool:
        """False when the script has its own scaler, or after :meth:`remove`."""
        return bool(self._handles)

    def remove(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Take every hook off again; those of the model when the last optimizer goes."""
        going = list(self._of) if optimizer is None else [id(optimizer)]
        handles = [handle for one in going for handle in self._of.pop(one, ())]
        if not self._of:
            handles, self._handles = handles + self._handles, []
        for handle in handles:
            handle.remove()

    def _hook_parameters(self, model: nn.Module) -> None:
        """Unscale the gradients of all that trains now: layers are thawed and added in the middle of a run."""
        for one in model.parameters():
            if not one.requires_grad or self._unscale in (one._backward_hooks or {}).values():
                continue
            if not one.is_leaf:
                raise UnsupportedError(
                    "weights that are computed for each forward (functional_call) would be unscaled more than once",
                    where="policy.loss_scaling",
                    fix="set loss_scaling: none, and bf16 in place of fp16; or scale in the script",
                )
            handle = one.register_hook(self._unscale)  # type: ignore[no-untyped-call]
            if isinstance(one, nn.Parameter):  # others, of functional_call, are here for one forward
                self._handles.append(handle)

    def _begins_beside_another(self) -> bool:
        """Say, before the first step, whether the script has made a scaler of its own since, and leave it alone."""
        first, self._begun = not self._begun and torch.is_grad_enabled(), self._begun or torch.is_grad_enabled()
        if not first or not script_has_scaler():
            return False
        self.inactive_reason = _OWN_SCALER
        self.remove()
        return True

    def _unscale_inputs(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            self._traced = True
        elif self._begins_beside_another():
            return None
        else:
            self._hook_parameters(model)
            if torch._C._current_graph_task_id() == -1:
                self._entered.clear()  # of a pass that an error has ended
        for module, name, inner, outer in self._left:
            if module.__dict__.get(name) is outer:  # the forward goes on with its own
                module.__dict__[name] = inner
        self._left.clear()
        if not torch.is_grad_enabled() or not _differentiable((args, kwargs)):
            return None
        return _each_tensor((args, kwargs), _hooked_copies(self._unscale))

    def _scale_outputs(self, model: nn.Module, _inputs: Any, output: Any) -> Any:
        found, copied = _differentiable(output), _hooked_copies(self._multiply)
        if torch.is_grad_enabled():
            self._scale_attributes(model, copied)
        if len(found) == 1 and not self._left:
            next(iter(found.values())).register_hook(self._multiply)  # type: ignore[no-untyped-call]
            return None
        return _each_tensor(output, copied) if found else None

    def _scale_attributes(self, model: nn.Module, copied: Callable[[Tensor], Tensor]) -> None:
        """Give the script copies of what the forward left in attributes, such as the auxiliary loss of a router."""

        def change(tensor: Tensor) -> Tensor:
            return tensor if tensor.grad_fn is None else copied(tensor)

        for module in model.modules():
            for name, inner in list(module.__dict__.items()):
                own = name in _TORCHS_OWN or name.startswith("__")  # what fully_shard keeps leads to all of torch
                if isinstance(inner, (Tensor, list, tuple, dict)) and not own:
                    outer = _each_tensor(inner, change)
                    if outer is not inner:
                        self._left.append((module, name, inner, outer))
                        module.__dict__[name] = outer

    def _multiply(self, gradient: Tensor) -> Tensor:
        self.enter()
        return self._across(gradient, self.scale)

    def _unscale(self, gradient: Tensor) -> Tensor | None:
        if not self._entered and not self._traced:
            return None
        return self._across(gradient, 1 / self.scale)

    def _across(self, gradient: Tensor, factor: float) -> Tensor:
        if torch.is_grad_enabled() and gradient.requires_grad:
            crossed: Tensor = _Across.apply(gradient, factor, self)  # type: ignore[no-untyped-call]
            return crossed
        return gradient * factor

    def enter(self) -> None:
        """Note that the backward pass of now has entered the model, until it ends; others may run inside of it."""
        now = torch._C._current_graph_task_id()
        if now != -1 and now not in self._entered:
            self._entered.add(now)
            leave = partial(self._entered.discard, now)
            torch.autograd.Variable._execution_engine.queue_callback(leave)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if id(optimizer) in self._overflowed:
            self._overflowed = {}
        first, known = not self._overflowed, any(self._overflowed.values())
        finite = math.isfinite(gradient_norm(parameters))
        self._overflowed[id(optimizer)] = not finite
        if finite:
            self.good_steps += first
            if self.good_steps >= self.growth_interval:
                self.scale, self.good_steps = min(self.scale * 2, _LARGEST), 0
            return
        if not known:  # otherwise another optimizer has met the same overflow
            self.skipped_steps, self.good_steps = self.skipped_steps + 1, 0
            self.scale = max(self.scale / 2, _SMALLEST)
        # Without gradients every torch optimizer leaves its parameters and state alone.
        self._held[id(optimizer)] = [(p, p.grad) for p in parameters]
        for parameter in parameters:
            parameter.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter, gradient in self._held.pop(id(optimizer), []):
            parameter.grad = gradient


#: What scales a model's gradients now.
_ON: weakref.WeakKeyDictionary[nn.Module, LossScaler] = weakref.WeakKeyDictionary()


class _Across(torch.autograd.Function):
    """A gradient that enters the scaled region (factor: the scale) or leaves it (its inverse).

    What is differentiated again (``create_graph=True``) crosses the other way: the derivative of entering is leaving,
    the factor times its inverse, and so 1 both ways.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, factor: float, scaler: LossScaler) -> Tensor:
        ctx.scaler = scaler
        return gradient * factor

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        ctx.scaler.enter()
        return grad_output, None, None


def _hooked_copies(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor]:
    """Return a function from a tensor to its copy, one per tensor, with ``hook`` on the copy's gradient."""
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def copied(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = (tensor, tensor.clone())
            made[id(tensor)][1].register_hook(hook)  # type: ignore[no-untyped-call]
        return made[id(tensor)][1]

    return copied


def _differentiable(value: Any) -> dict[int, Tensor]:
    """Return the distinct tensors in a nested value through which a gradient can pass, by identity."""
    found: dict[int, Tensor] = {}

    def look(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found[id(tensor)] = tensor
        return tensor

    _each_tensor(value, look)
    return found


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor], depth: int = 8) -> Any:
    """Return ``value`` with every tensor in it changed: containers, dataclasses, and objects that hold tensors.

    What holds no changed tensor is returned as it is; other containers and objects are copied, not modified.
    """

    def leaf(item: Any) -> Any:
        if isinstance(item, Tensor):
            return change(item)
        held = item if isinstance(item, dict) else getattr(item, "__dict__", None)
        if not held or not depth or isinstance(item, (nn.Module, type)) or callable(item):
            return item
        changed = {name: _each_tensor(inner, change, depth - 1) for name, inner in held.items()}
        if all(held[name] is inner for name, inner in changed.items()):
            return item
        twin = copy.copy(item)
        for name, inner in changed.items():
            if isinstance(item, dict):
                twin[name] = inner
            else:
                object.__setattr__(twin, name, inner)  # a frozen dataclass as well
        return twin

    leaves, layout = tree_flatten(value)
    changed = [leaf(item) for item in leaves]
    return value if all(map(operator.is_, leaves, changed)) else tree_unflatten(changed, layout)
