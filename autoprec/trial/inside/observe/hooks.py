"""The few global points where a training loop can be watched without the script knowing.

Patched: ``Optimizer.__init__`` and the global optimizer step hooks, ``torch.autograd.backward`` and ``grad`` (where it
differentiates by parameters), ``functional_call``, ``GradScaler.scale``, ``step`` and ``update``, ``clip_grad_norm_``,
casts of modules and ``load_state_dict`` (:mod:`.sources`), and, only until the first training forward,
``nn.Module.__call__``. Nothing is a module hook, so Dynamo sees an ordinary model.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoprec.graph.places import caller
from autoprec.trial.inside.observe.functional import FunctionalLoop
from autoprec.trial.inside.observe.sources import Sources
from autoprec.trial.inside.patching import wrapped

OnCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class Events:
    """What a watcher may react to; every method does nothing unless overridden."""

    def forward_ended(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """A top-level backward from these tensors, of any shapes, follows: modes are left here, not inside of it."""

    def before_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """A top-level backward starts from these tensors: losses of shape ``[]``, or vectors with gradients."""

    def after_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """A top-level backward from these tensors, of any shape, has ended."""

    def before_closure(self, optimizer: Optimizer, call: int) -> None:
        """An optimizer evaluates its closure for the ``call``-th time (from 1) in one step."""

    def gradients_ready(self, optimizer: Optimizer) -> None:
        """All gradients of this optimizer's step are there and nothing has been updated yet."""

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has updated its parameters."""

    def skipped_step(self, optimizer: Optimizer) -> None:
        """A GradScaler found non-finite gradients and did not step the optimizer."""

    def transformed(self) -> None:
        """Gradients are taken with a transform of ``torch.func``, which nothing here can follow."""

    def captured(self) -> None:
        """A top-level backward is about to be captured in a CUDA graph, whose replays nothing here sees."""

    def clipped(self, parameters: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
        """Gradients were clipped.

        Args:
            parameters: the parameters whose gradients they are, of any shapes.
            norm: norm of the gradients before, of shape ``[]``.
            max_norm: what they were clipped to.
        """


def is_capturing(device: torch.device) -> bool:
    """Say whether what runs on a device now is captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def raw_loss(tensor: torch.Tensor) -> torch.Tensor:
    """Return the loss a GradScaler scaled, the weighted sum of a vector that backward is called on, or the tensor.

    Args:
        tensor: what backward is called on, of any shape.
    """
    return getattr(tensor, "_autoprec_raw", tensor)


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that an optimizer updates, of any shapes."""
    return (p for group in optimizer.param_groups for p in group["params"])


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the ``id`` of each parameter that an optimizer updates."""
    return set(map(id, parameters_of(optimizer)))


def _steps_for(held: Any, optimizer: Optimizer) -> bool:
    """Say whether what an optimizer holds is the one that updates its parameters (that of SAM, or of Lookahead)."""
    return isinstance(held, Optimizer) and held is not optimizer and parameter_ids(optimizer) <= parameter_ids(held)


def _weigh(roots: tuple[torch.Tensor, ...], weights: Any) -> None:
    """``losses.backward(w)`` has the gradients of the scalar ``sum(w * losses)``: that is the loss of such a step."""
    given = (weights,) if isinstance(weights, torch.Tensor) else tuple(weights or ())
    for root, weight in zip(roots, given, strict=False):
        if isinstance(weight, torch.Tensor) and root.numel() != 1 and weight.shape == root.shape:
            root._autoprec_raw = (raw_loss(root).detach() * weight.detach()).sum()  # type: ignore[attr-defined]


class Hooks:
    """Owns the patches of one process. ``events`` may be exchanged at any time; :meth:`remove` takes all of it off."""

    def __init__(self) -> None:
        self.events = Events()
        self.sources = Sources()
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._functional = FunctionalLoop(self)
        self._undo: list[Callable[[], None]] = []
        self._depth = 0
        self._steps = 0
        self._scaler: Any = None  # while it steps an optimizer
        self._watch_undo: Callable[[], None] | None = None
        self._announce: OnCall | None = None
        self._in_method = self._telling = False
        self._finished: tuple[torch.Tensor, ...] | None = None
        self.backwards = 0
        #: The GradScaler that scaled a loss last, and the line that did.
        self.scaler: tuple[Any, str] | None = None
        #: Calls of ``GradScaler.update``.
        self.rescales = 0
        #: The model whose forwards cannot be seen (``model.forward(x)``): every optimizer step announces the next.
        self.unseen: nn.Module | None = None
        #: The script tells its steps itself (``Session.observe``): gradients taken as values are not steps as well.
        self.steps_reported = False
        #: Says of losses and inputs of ``torch.autograd.grad`` whether these are weights, where no module has them.
        self.plain: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], bool] | None = None
        #: The model that the script calls through ``functional_call``.
        self.functional: nn.Module | None = None

    @property
    def stand_ins(self) -> dict[str, torch.Tensor]:
        """What stood for parameters in the last call of the functional model, of any shapes, by their names."""
        return self._functional.weights

    @property
    def optimizers(self) -> list[Optimizer]:
        """The living optimizers, oldest first, without those that only wrap another."""
        alive = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        made = [o for o in alive if isinstance(getattr(o, "param_groups", None), list)]
        return [o for o in made if not any(_steps_for(held, o) for held in vars(o).values())]

    def install(self) -> None:
        """Patch everything except ``nn.Module.__call__``."""
        self._patch_optimizers()
        self.sources.install(self.replace)
        self.replace(torch.autograd, "backward", self._backward)
        self.replace(torch.Tensor, "backward", self._backward_of)
        self._functional.install()
        self.replace(torch.amp.GradScaler, "scale", self._scale)
        self.replace(torch.amp.GradScaler, "step", self._scaled_step)
        self.replace(torch.amp.GradScaler, "update", self._rescale)
        self.replace(nn.utils, "clip_grad_norm_", self._clip)
        nn.utils.clip_grad.clip_grad_norm_ = nn.utils.clip_grad_norm_

    def remove(self) -> None:
        """Take every hook off again."""
        self.unwatch()
        while self._undo:
            self._undo.pop()()

    def rest(self, on_optimizer: Callable[[Optimizer], None]) -> None:
        """Take every patch off but a watch on optimizers that are made from now on; they may be half made."""
        self.remove()
        self._watch_optimizers(on_optimizer)

    def replace(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Let ``wrapper`` be called instead of a function, which is its first argument.

        Args:
            owner: module, class or object that has the function.
            name: the function's name there.
            wrapper: is called with the function and its arguments.
        """
        original = getattr(owner, name)
        setattr(owner, name, wrapped(original, wrapper))
        self._undo.append(lambda: setattr(owner, name, original))

    # ---------------------------------------------------------------- optimizers
    def _watch_optimizers(self, on_optimizer: Callable[[Optimizer], None]) -> None:
        def init(original: Any, optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            on_optimizer(optimizer)

        self.replace(Optimizer, "__init__", init)

    def _remember(self, optimizer: Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))
        self.sources.made(optimizer)

    def _patch_optimizers(self) -> None:
        self._watch_optimizers(self._remember)
        before = register_optimizer_step_pre_hook(self._before_step)
        after = register_optimizer_step_post_hook(self._after_step)
        self._undo += [before.remove, after.remove]

    @_disable_dynamo  # a script may compile its whole training step, and Dynamo would trace all that a watcher does
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.events.gradients_ready(optimizer)
            return None
        calls = 0

        @functools.wraps(closure)
        def counted(*inner: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            self.events.before_closure(optimizer, calls)
            out = closure(*inner, **named)
            if calls == 1:
                self.events.gradients_ready(optimizer)
            return out

        if "closure" in kwargs:
            return args, {**kwargs, "closure": counted}
        return (args[0], counted, *args[2:]), kwargs

    @_disable_dynamo
    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._steps += 1
        self.events.after_step(optimizer)
        if self.unseen is not None:
            self.announce(self.unseen)

    # ---------------------------------------------------------------- backward
    @_disable_dynamo
    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._depth:  # reentrant checkpointing calls backward inside backward
            return original(tensors, *args, **kwargs)
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        if roots and is_capturing(roots[0].device):
            self.events.captured()
        _weigh(roots, args[0] if args else kwargs.get("grad_tensors"))
        with self.inside_backward(roots):
            out = original(tensors, *args, **kwargs)
        if self._in_method:
            self._finished = roots
        else:
            self.events.after_backward(roots)
        return out

    @_disable_dynamo
    def _backward_of(self, original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Tell the end of ``tensor.backward()`` outside of it: torch function modes are not on their stack inside."""
        if self._in_method:
            return original(tensor, *args, **kwargs)
        if not self._depth:
            self.events.forward_ended((tensor,))
        self._in_method, self._finished = True, None
        try:
            out = original(tensor, *args, **kwargs)
        finally:
            self._in_method = False
        if self._finished is not None:
            self.events.after_backward(self._finished)
        return out

    @contextlib.contextmanager
    def inside_backward(self, roots: tuple[torch.Tensor, ...]) -> Iterator[None]:
        """Tell that a backward from ``roots``, of any shapes, runs, which may itself call backward."""
        if not self._in_method:
            self.events.forward_ended(roots)
        self.backwards += 1
        self.events.before_backward(roots)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def is_scaler_stepping(self) -> bool:
        """True inside the ``step`` of a GradScaler."""
        return self._scaler is not None

    @property
    def busy(self) -> bool:
        """True inside a backward."""
        return self._depth > 0

    # ---------------------------------------------------------------- GradScaler and clipping
    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        self.scaler = scaler, caller(own=True)
        if isinstance(outputs, torch.Tensor) and scaled is not outputs:
            scaled._autoprec_raw = outputs.detach()
        return scaled

    def _scaled_step(self, original: Any, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        before, self._scaler = self._steps, scaler
        try:
            out = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._scaler = None
        if self._steps == before:
            self.events.skipped_step(optimizer)
        return out

    def _rescale(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self.rescales += 1
        return original(scaler, *args, **kwargs)

    def unscale(self, factors: dict[int, float], optimizer: Optimizer, others: Sequence[Optimizer]) -> None:
        """Divide factors, by ``id``, by what gradients are still multiplied with when those of an optimizer are ready.

        A GradScaler divides the gradients of one optimizer at a time, when it steps it: those of the ``others``, which
        share its loss, are as the scaled loss left them, and so are those of a fused one, which divides them itself.

        Args:
            factors: factors by the ``id`` of parameters, changed in place.
            optimizer: the optimizer whose gradients are ready.
            others: optimizers that share its loss.
        """
        scales: dict[int, float] = {}
        if self._scaler is not None and self._scaler.is_enabled():
            states, scale = self._scaler._per_optimizer_states, float(self._scaler.get_scale())
            for other in others:
                if id(other) not in states or states[id(other)]["stage"].name == "READY":
                    scales |= dict.fromkeys(parameter_ids(other), scale)
        fused = getattr(optimizer, "grad_scale", None)
        scales |= dict.fromkeys(parameter_ids(optimizer), 1.0 if fused is None else float(fused))
        for one, scale in scales.items():
            factors[one] = factors.get(one, 1.0) / scale

    def _clip(self, original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = original(parameters, max_norm, *args, **kwargs)
        self.events.clipped(parameters, norm, float(max_norm))
        return norm

    # ---------------------------------------------------------------- the first training forward
    def watch(self, on_training_call: OnCall) -> None:
        """Call back at every grad-enabled call of a module in training mode, until :meth:`unwatch`.

        The callback runs inside ``nn.Module.__call__``, before any hook of the module.
        """
        self.unwatch()
        original = nn.Module.__call__

        @_disable_dynamo  # else Dynamo would trace all of us where it resumes after a graph break
        def tell(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            on_training_call(module, args, kwargs)

        over = False

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if over:  # torch.compile has kept this method of the module from before
                return original(module, *args, **kwargs)
            if module.training and torch.is_grad_enabled() and not self._depth and not self._telling:
                self._telling = True  # what the watcher calls itself (a parametrised weight) is not the script's
                try:
                    tell(module, args, kwargs)
                finally:
                    self._telling = False
                current = nn.Module.__call__  # the callback may have put another watcher in place of this one
                if current is not __call__:
                    return current(module, *args, **kwargs)
            return original(module, *args, **kwargs)

        self._announce = on_training_call

        def undo() -> None:
            nonlocal over
            over = True
            nn.Module.__call__ = original  # type: ignore[method-assign]
            _tell_dynamo(original)

        nn.Module.__call__ = __call__  # type: ignore[method-assign]
        _tell_dynamo(__call__)
        self._watch_undo = undo

    def watch_next(self, root: nn.Module, on_call: OnCall) -> None:
        """Call back once, at the next such call of a model or of a part of it."""
        owned = {id(p) for p in root.parameters()}

        def watcher(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # the root by identity as well: functional_call exchanges its parameters for the time of the call
            if module is root or any(id(p) in owned for p in module.parameters()):
                self.unwatch()
                on_call(module, args, kwargs)

        self.watch(watcher)

    def unwatch(self) -> None:
        """Restore ``nn.Module.__call__``: from here on a module call costs what it always did."""
        if self._watch_undo is not None:
            self._watch_undo()
            self._watch_undo = self._announce = None

    def announce(self, module: nn.Module) -> None:
        """Call the watcher as at a training forward of ``module``, where no call can be seen."""
        if self._announce is not None:
            self._announce(module, (), {})


def _tell_dynamo(call: Any) -> None:
    """Dynamo keeps ``nn.Module.__call__`` to recognise a patched one; keep it pointing at the current one."""
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "unpatched_nn_module_call"):
            module.__dict__["unpatched_nn_module_call"] = call
