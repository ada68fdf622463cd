"""``autoprec run`` in the script's process: the policy goes on every model it trains, one after the other.

A cross validation trains one model per fold, a sweep one per try. The policy is applied inside the first training
forward of each, and then every hook is taken off again but one: ``Optimizer.__init__`` tells that training may soon go
on with something else. So a step costs what it did without AutoPrec.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from autoprec.applying.audit import emulated_note
from autoprec.applying.policy import remove_policy
from autoprec.applying.swap import swapped_base
from autoprec.applying.units import tunable_units
from autoprec.errors import AutoPrecError
from autoprec.policy import glob_matches
from autoprec.support.plain import Document
from autoprec.support.text import visible
from autoprec.trial.inside.applying import apply_document
from autoprec.trial.inside.observe.discovery import Found, discover
from autoprec.trial.inside.observe.hooks import Events, Hooks, parameters_of
from autoprec.trial.protocol import SMALL_MODEL

#: Files beside the configuration that tell the driver what became of the policy.
APPLIED, REFUSED, LEFT = "applied", "refused", "left"
#: After this many training forwards a new optimizer that none of them needed is forgotten.
_PATIENCE = 2000
#: Steps of a first model that the policy is not for, after which no other is waited for.
_THROWN_AWAY = 10
#: A model this many times smaller than the policy's may be such a throw-away fit; any other is refused at once.
_FAR_SMALLER = 10


class PolicyRun:
    """Applies one policy to every model of a kind that the script trains.

    Args:
        config: ``policy``, ``backend``, ``run_steps`` and ``audit`` (a path or an empty string) of the run.
        hooks: those of the process; after each model only a watch on new optimizers is left of them.
        folder: where the driver looks for :data:`APPLIED` and :data:`REFUSED`.
        writer: False in every rank but the first: no messages, no audit.
    """

    def __init__(self, config: Document, hooks: Hooks, folder: Path, *, writer: bool = True) -> None:
        #: A process that the script has started, and not the script or a rank: it may train another model.
        self._child = bool(config.get("single")) and not _is_first(folder) and not _is_rank()
        self._document, self._backend = config["policy"], config.get("backend", "auto")
        self._run_steps: int | None = config.get("run_steps")
        self._audit = Path(config["audit"]) if config.get("audit") and writer else None
        self._hooks, self._folder, self._writer = hooks, folder, writer
        self._kind: tuple[type[nn.Module], frozenset[str]] | None = None
        self._policy: Any = None
        self._models: list[weakref.ref[nn.Module]] = []
        self._fresh: list[tuple[weakref.ref[Optimizer], Callable[[], None]]] = []
        self._forwards = 0
        #: Held until its audit is taken: only where one was asked for does a model live longer than the script wants.
        self._last: nn.Module | None = None
        self._audits: list[Document] = []

    def begin(self, found: Found) -> None:
        """Apply the policy to what is trained now; called inside its first training forward.

        Raises:
            SystemExit: the policy does not fit. A script that catches even this is ended at its next training step.
        """
        self._models += [weakref.ref(root) for root in found.roots]
        try:
            another = self._is_another_kind(found.root) or (self._child and bool(self._document.get("model")))
            if another and not self._is_named(found.root):
                self._leave(found.root)
            else:
                self._apply(found)
        except AutoPrecError as error:
            if self._child:
                remove_policy(found.root)
                self._leave(found.root)
            elif self._kind is not None or not found.optimizers or not self._may_be_thrown_away(found.root):
                self._refuse(error, "here, so that nothing is trained without the policy")
            else:
                self._wait_for_another(found, error)
        self._hooks.rest(self._on_optimizer)

    def _wait_for_another(self, found: Found, error: AutoPrecError) -> None:
        """Let a few steps of a small model pass that the policy neither names nor fits: a fit before the real one."""
        steps, named = itertools.count(1), self._document.get("model")
        self._leave(found.root)
        waited = "a model with a layer that the policy's rules match"
        if named:
            waited = f"the model that the policy is for ({named['class']}, {named['parameters']:,} parameters)"
        (self._folder / LEFT).touch()  # the script may end before the other model comes
        self._say(f"note: {error.what}; waiting up to {_THROWN_AWAY} steps for {waited}; then the script is ended")

        def count(*_: Any) -> None:
            if self._kind is not None:
                counted.remove()
            elif next(steps) >= _THROWN_AWAY:
                self._refuse(error, f"after {_THROWN_AWAY} steps, none of them of {waited}")

        counted = found.optimizers[0].register_step_post_hook(count)

    def _leave(self, root: nn.Module) -> None:
        if self._child:
            (self._folder / LEFT).touch()
        self._say(f"note: {type(root).__name__} is trained without the policy, which is for another model")

    def _apply(self, found: Found) -> None:
        self._policy = apply_document(self._document, found, self._backend, run_steps=self._run_steps, say=self._say)
        if self._kind is None:
            self._kind = _kind_of(found.root)
            (self._folder / APPLIED).touch()
            self._say(emulated_note(found.root))
            if self._audit is not None:
                atexit.register(self._write_audit)
        if self._audit is not None:
            self._take_audit()
            self._last = found.root

    def _is_another_kind(self, root: nn.Module) -> bool:
        """Say whether a later model is something else than a new copy of the first, such as a discriminator."""
        if self._kind is None:
            return False
        cls, names = _kind_of(root)
        built_in = cls.__module__.startswith("torch.nn.")  # any two models may be an nn.Sequential
        return cls is not self._kind[0] or (built_in and names != self._kind[1])

    def _is_named(self, root: nn.Module) -> bool:
        """Say whether a model is the one that the policy was found for; False where the policy does not say."""
        named = self._document.get("model") or {}
        return (swapped_base(root).__name__, _size(root)) == (named.get("class"), named.get("parameters"))

    def _may_be_thrown_away(self, root: nn.Module) -> bool:
        """Say whether a first model may be a fit before the real one, by what the policy says of that.

        It is one with far fewer parameters than the policy's model; where that is not named, a small one without a
        layer that a rule matches.
        """
        named = self._document.get("model") or {}
        if "class" in named:
            return _size(root) * _FAR_SMALLER <= int(named.get("parameters", 0))
        globs = [str(rule["match"]) for rule in self._document.get("layers", ())]
        matched = any(glob_matches(glob, name) for glob in globs for name in tunable_units(root))
        return _size(root) <= SMALL_MODEL and not matched

    # ---------------------------------------------------------------- the next model
    def another(self, found: Found) -> None:
        """The script names a model itself: begin with it, unless it is known."""
        if all(ref() is not found.root for ref in self._models):
            self.begin(found)

    def _on_optimizer(self, optimizer: Optimizer) -> None:
        if not self._fresh:
            self._forwards = 0
            self._hooks.watch(self._on_training_call)
        # a loop that calls model.forward(x) is not seen before its first step
        stepped = optimizer.register_step_post_hook(lambda *_: self._go_on())
        self._fresh.append((weakref.ref(optimizer), stepped.remove))

    def _on_training_call(self, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        self._forwards += 1
        fresh = {id(p) for optimizer in self._waiting() for p in parameters_of(optimizer)}
        if not fresh or self._forwards > _PATIENCE:
            self._forget()
        elif any(id(p) in fresh for p in module.parameters()):
            self._go_on()

    def _go_on(self) -> None:
        """One of the new optimizers is in use: what it trains is a new model, or one that has the policy already."""
        waiting = self._waiting()
        self._forget()
        roots = [root for ref in self._models if (root := ref()) is not None]
        known = {id(p): root for root in roots for p in root.parameters()}
        new = [o for o in waiting if not all(id(p) in known for p in parameters_of(o))]
        for optimizer in waiting:
            if all(optimizer is not other for other in new) and self._policy is not None:
                self._policy.wrap_optimizer(optimizer, model=known[id(next(parameters_of(optimizer)))])
        found = discover(new) if new else None
        if found is not None:
            self.begin(found)

    def _waiting(self) -> list[Optimizer]:
        return [optimizer for ref, _ in self._fresh if (optimizer := ref()) is not None and optimizer.param_groups]

    def _forget(self) -> None:
        for _, remove in self._fresh:
            remove()
        self._fresh = []
        self._hooks.unwatch()

    # ---------------------------------------------------------------- the end
    def _refuse(self, reason: AutoPrecError, when: str) -> NoReturn:
        """End the script: it must not go on as if it trained under the policy."""
        (self._folder / REFUSED).touch()
        # a script may swallow what is raised
        print(f"autoprec: {visible(str(reason))}\nautoprec: the script is ended {when}", file=sys.stderr, flush=True)

        def again(*_: Any) -> None:
            sys.stdout.flush()
            os._exit(1)

        self._hooks.events = _AnyBackward(again)
        self._hooks.watch(again)
        sys.exit(1)

    def _take_audit(self) -> None:
        if self._last is not None:
            row = {"model": swapped_base(self._last).__name__} | self._policy.audit(self._last).to_json()
            self._audits.append(row)
            self._last = None

    def _write_audit(self) -> None:
        self._take_audit()
        if self._audit is not None and self._audits:
            self._audit.write_text(json.dumps(merged(self._audits)), encoding="utf-8")

    def _say(self, line: str) -> None:
        if line and self._writer:
            print(f"autoprec: {visible(line)}", file=sys.stderr, flush=True)


def claim(folder: Path) -> None:
    """Claim to be the script's process, unless another one has: it is the first that imports torch."""
    with contextlib.suppress(OSError), open(folder / "first", "x", encoding="utf-8") as stream:
        stream.write(str(os.getpid()))


def _is_first(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return (folder / "first").read_text(encoding="utf-8") == str(os.getpid())
    return True


def _is_rank() -> bool:
    distributed = torch.distributed
    return "RANK" in os.environ or (distributed.is_available() and distributed.is_initialized())


class _AnyBackward(Events):
    def __init__(self, then: Any) -> None:
        self._then = then

    def before_backward(self, tensors: Any) -> None:  # noqa: ARG002
        self._then()


def _size(root: nn.Module) -> int:
    return sum(parameter.numel() for parameter in root.parameters())


def _kind_of(root: nn.Module) -> tuple[type[nn.Module], frozenset[str]]:
    return swapped_base(root), frozenset(tunable_units(root))


def merged(audits: list[Document]) -> Document:
    """Return one audit document for one or several models; of several, the first that is not as asked is in front.

    The others are in ``models``, in the order in which they were trained.
    """
    shown = next((row for row in audits if not row["ok"]), audits[-1])
    document = {key: value for key, value in shown.items() if key != "model"}
    return document if len(audits) == 1 else document | {"models": audits}
