"""Find the model that a script trains, and stop at its first training step.

Usually that is the first call in training mode of a module whose parameters an optimizer has. Where the forward cannot
be seen (``model.forward(x)``, a functional call) the first optimizer step finds the model; where there is no optimizer,
the first backward pass finds it through the graph of the loss. A script may also name its model
(:func:`autoprec.register`). Where a step is only judged, weights of no module are found too (:mod:`.observe.loose`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoprec.applying.compiling import compiled_graphs, note_compiled
from autoprec.backends.casts import stance
from autoprec.trial.inside.observe.discovery import Found, discover, holds_copies, loss_parameters
from autoprec.trial.inside.observe.hooks import Events, Hooks, parameter_ids
from autoprec.trial.inside.observe.loose import (
    LooseWeights,
    Watch,
    are_plain_weights,
    loose_weights_of,
    plain_leaves,
)

#: After this many training forwards without a backward, or steps of tensors that no module owns, none will come.
_MOST_FORWARDS, _MOST_UNOWNED = 5000, 50

_COPIES = (
    "the optimizer's tensors belong to no module: they are taken for copies of the weights that the loss reaches, and "
    "each backward counts as one step"
)

_LOOSE = "the weights belong to no module: tensors that a loss reaches and the script updates are taken for them"

#: Receives what was found, and the module call that is about to run: the module, its arguments and keyword arguments.
Arrived = Callable[[Found, nn.Module, tuple[Any, ...], dict[str, Any]], None]


class FirstStep(Events):
    """Watches a script until its first training step.

    Args:
        hooks: the hooks of this process.
        arrived: called once, inside the first training forward of the model.
        gave_up: called with a code where no step will be seen: ``no_backward``, ``no_module`` or ``functional``.
        judges: the step is only judged: weights need belong to no module, and a module's forward need not be called.

    Attributes:
        pass_over: models to ignore, as the driver has seen that the script soon goes on with another.
        forwards: calls in training mode so far.
        found: what is trained, once that is known.
    """

    def __init__(self, hooks: Hooks, arrived: Arrived, gave_up: Callable[[str], None], *, judges: bool = False) -> None:
        self._hooks, self._arrived, self._gave_up = hooks, arrived, gave_up
        self._judges = judges
        self._watch: Watch | None = None  # of tensors that no module holds, and may be weights
        self._trained: list[torch.Tensor] = []  # what a watch that has ended has seen updated
        self._passed_loose = False  # such tensors are trained before the model is
        self._leaves: list[torch.Tensor] = []  # what the last loss reached
        self._next: Found | None = None  # to stop for when this backward has ended
        self.pass_over = self.forwards = self._unowned = self._passed = 0
        self.found: Found | None = None
        self._registered: Found | None = None
        self._unowned_optimizers = False  # a step was taken by optimizers whose tensors belong to no module
        self._awaited: nn.Module | None = None  # whose forward should have followed the last backward
        self._eager = False  # a step of what the script compiles runs as eager code, so that its forward is seen
        #: Parameters of models that are trained for a few steps before the real one; held, so that no id comes back.
        self._passed_over: dict[int, torch.Tensor] = {}

    def watch(self) -> None:
        """Begin to watch."""
        self._hooks.watch(self._on_training_call)
        self._hooks.events = self
        if self._judges:
            self._hooks.plain = are_plain_weights

    def register(self, found: Found) -> None:
        """Take what the script names itself: nothing has to be discovered."""
        self._registered = found

    def boundary(self, model: nn.Module) -> None:
        """Take the end of a step for a training forward, in a loop whose forwards cannot be seen."""
        if self.found is not None:
            self._hooks.announce(model)
        elif self._registered is not None:
            self._stop(self._registered, model, (), {})

    def why(self) -> str:
        """Return the code of why the script ended without a step; empty where what the hooks counted says it."""
        return "no_module" if self._unowned and not self.forwards else ""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the living optimizers, without those of models that were passed over."""
        known = self._passed_over
        return [o for o in self._hooks.optimizers if not known or not parameter_ids(o) <= known.keys()]

    def _stop(self, found: Found, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._hooks.unwatch()
        self._hooks.events = Events()
        self._end_watch()
        if not isinstance(found.root, LooseWeights):
            self._hooks.plain = None
        self.found = found
        if self._eager:
            torch.compiler.set_stance("default")
            if self._hooks.unseen is None:
                note_compiled(found.root)
        self._arrived(found, module, args, kwargs)

    # ---------------------------------------------------------------- events
    def forward_ended(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Note what the losses, of any shapes, reach, and whether what the last ones reached was updated since."""
        if not self._judges:
            return
        self._leaves, watch = loss_parameters(tensors), self._watch
        self._trained = watch.trained(plain_leaves(tensors)) if watch is not None else []
        self._end_watch()

    def before_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        if not self.optimizers():
            self._without_optimizer(tensors)
        elif self._unowned_optimizers:
            self._with_copies(tensors)

    def after_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:  # noqa: ARG002
        if self._next is not None:
            self._stop_unseen(self._next)
        elif self._watch is not None:
            self._watch.begin()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        self._without_forward()

    def transformed(self) -> None:
        self._gave_up("functional")

    def _on_training_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forwards += 1
        # A script may evaluate in training mode for hours: without one backward no step will come.
        if self.forwards == _MOST_FORWARDS and not self._hooks.backwards:
            self._gave_up("no_backward")
        if self._registered is not None:
            mine = {id(p) for p in self._registered.root.parameters()}
            if any(id(p) in mine for p in module.parameters()):
                self._stop(self._registered, module, args, kwargs)
            return
        optimizers = self.optimizers()
        if not optimizers:
            return  # perhaps there never is one: the first backward tells (see before_backward)
        owned = set[int]().union(*map(parameter_ids, optimizers))
        if not any(id(p) in owned for p in module.parameters()):
            return  # a loss module or a frozen tower
        found = discover(optimizers, called=module)
        if found is not None and not self._pass_over(found):
            self._stop(found, module, args, kwargs)

    def _pass_over(self, found: Found) -> bool:
        """Ignore this model from now on, if the driver has seen that the script soon goes on with another."""
        if self.pass_over <= self._passed:
            return False
        self._passed += 1
        self._passed_over |= {id(p): p for p in found.parameters}
        return True

    def _without_forward(self) -> None:
        """A step was taken and no training forward seen (``model.forward(x)``, a functional call): stop after it."""
        if not self._hooks.backwards:
            return
        if self._registered is not None:
            self._uncover()
            return
        optimizers = self.optimizers()
        if not optimizers or self._searched_in_vain():
            return
        found = discover(optimizers)
        loose = loose_weights_of(optimizers, self._leaves) if found is None else []
        if loose:
            of_loose = Found([LooseWeights(loose)], optimizers, loose, [_LOOSE])
            if not self._pass_over(of_loose):
                self._stop_unseen(of_loose)
        elif found is None:
            self._unowned_optimizers = True
            self._count_unowned()
        elif not self._uncover() and not self._pass_over(found):
            found.notes.append("the model's forward is not called through the module: the first step finds the model")
            self._stop_unseen(found)

    def _stop_unseen(self, found: Found) -> None:
        """Stop at the end of a step of a model whose forwards cannot be seen."""
        self._hooks.unseen = found.root
        self._stop(found, found.root, (), {})

    def _uncover(self) -> bool:
        """Let the next step run as eager code if anything was compiled: what Dynamo goes through calls no module.

        Returns:
            False where it was already done, or nothing was compiled.
        """
        if self._eager or not compiled_graphs() or stance() != "default":
            return False
        self._eager = True
        torch.compiler.set_stance("force_eager")
        return True

    def _without_optimizer(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """A backward ran without an optimizer: the next training forward is the place to stop."""
        leaves = [leaf for leaf in loss_parameters(tensors) if id(leaf) not in self._passed_over]
        if not leaves or self._searched_in_vain():
            return
        found = discover((), loss_leaves=leaves)
        if found is None and self._hooks.functional is not None:
            root = self._hooks.functional
            weights: list[torch.Tensor] = [p for p in root.parameters() if p.requires_grad]
            found = Found([root], [], weights, ["called through functional_call: each backward counts as one step"])
        if found is None and not self._passed_loose:
            self._count_unowned()
            if self._judges:
                self._look_at_loose(tensors)
        if found is None:
            return
        if self._judges and self._awaited is found.root:  # it was not called for this loss
            self._next = found
            return
        self._awaited = found.root
        self._hooks.watch_next(found.root, lambda *call: self._stop(found, *call))

    def _look_at_loose(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Find tensors of no module that were updated since the last backward."""
        leaves = plain_leaves(tensors)
        if self._trained:
            found = Found([LooseWeights(self._trained)], [], self._trained, [_LOOSE])
            self._passed_loose = self._pass_over(found)
            self._next = None if self._passed_loose else found
        elif leaves:
            self._watch = Watch(leaves)

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def _with_copies(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Find a model whose optimizer has copies of its weights, such as FP32 ones, by what the loss reaches."""
        found = None if self._searched_in_vain() else discover((), loss_leaves=loss_parameters(tensors))
        optimizers = self.optimizers()
        if found is not None and holds_copies(optimizers, found.parameters):
            found.optimizers, found.copied, found.notes = optimizers, True, [_COPIES]
            self._hooks.watch_next(found.root, lambda *call: self._stop(found, *call))

    def _searched_in_vain(self) -> bool:
        """Whether to let this step pass: a search over all living objects costs tens of ms, a script takes many steps.

        After many searches that found no module one is made only each time the number of steps has doubled.
        """
        if self._unowned < _MOST_UNOWNED:
            return False
        self._unowned += 1
        return self._unowned.bit_count() != 1

    def _count_unowned(self) -> None:
        self._unowned += 1
        if self._unowned >= _MOST_UNOWNED:
            self._gave_up("no_module")
