"""One training step that can be played again, under another policy, without the script's help.

While the script takes a step, every call of the model is noted with its inputs, random state and autocast, and every
torch function applied to the model's outputs or parameters on the way to ``backward`` is put on a tape. Played again,
the model is called with the same inputs, the tape runs on its new outputs, and ``backward`` gives the gradients that
this batch would have had; losses computed outside the model are recomputed too. What does not lead to the loss (a
metric that is summed up, a value that is printed) is left out: it would change what the script holds. Inputs and
targets are copied: a script may load its next batch into the same memory before its step is played.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from autoprec.applying.following.gradients import local_part

__all__ = ["RecordedStep", "random_state", "set_random_state"]


@dataclass(slots=True)
class _Call:
    """One call of the model, or one torch function on the way to the loss."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    autocast: tuple[bool, torch.dtype]
    differentiable: bool
    random: Any = None
    sync: bool | None = None

    @property
    def writes(self) -> bool:
        """Whether it changes its first argument in place."""
        name = getattr(self.run, "__name__", "")
        return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


@dataclass(slots=True)
class _Micro:
    """One forward and backward: calls in order, then the tensors backward was called on."""

    calls: list[_Call] = field(default_factory=list)
    losses: tuple[Tensor, ...] = ()


def random_state(device: torch.device) -> Any:
    """Return the state of torch's random streams that a model on ``device`` draws from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(state: Any, device: torch.device) -> None:
    """Go back to a state that :func:`random_state` returned."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


class _Tape(TorchFunctionMode):
    """Notes every torch function with an argument that depends on the model's outputs."""

    def __init__(self, owner: RecordedStep) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner, named = self._owner, kwargs or {}
        if owner.busy:
            return func(*args, **named)
        if getattr(func, "__name__", "") == "backward":
            if not owner.sees_backward:
                return func(*args, **named)
            owner.before_backward((args[0],))
            out = func(*args, **named)
            owner.after_backward()
            return out
        if not owner.follows((args, named)):
            return func(*args, **named)
        replaced = getattr(func, "__name__", "") == "__setitem__"  # what else its first argument held are constants
        # copied before it writes into them
        kept_args, kept_named = owner.copied((tuple(args), named), constant=args[0] if replaced else None)
        out = func(*args, **named)
        owner.note(func, kept_args, kept_named, args[0] if out is None and args else out)
        return out


class RecordedStep:
    """The step that the script takes between :meth:`start` and :meth:`stop`; :meth:`play` repeats it.

    Args:
        parameters: of the model that is recorded; a call of a module that holds one of them is a call of the model.
        device: where they are.
        sees_backward: note every ``Tensor.backward``; otherwise the owner tells, with :meth:`before_backward` and
            :meth:`after_backward`.
    """

    def __init__(self, parameters: Iterable[Tensor], device: torch.device, *, sees_backward: bool = False) -> None:
        self._owned = {id(parameter) for parameter in parameters}
        self._device, self.sees_backward = device, sees_backward
        self._micros = [_Micro()]
        self._mode: _Tape | None = None
        self._original: Any = None
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}  # with its copy
        self._copies: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # of constants, in this micro-batch
        self.tracked: dict[int, Any] = {}  # holds them: ids must stay unique for as long as they are compared
        self.busy = False

    # ---------------------------------------------------------------- recording
    def start(self) -> None:
        """Begin before, or inside, the first call of the model."""
        original = self._original = nn.Module.__call__

        def __call__(called: nn.Module, *inner: Any, **named: Any) -> Any:  # noqa: N807
            outer = not self.busy and not torch.compiler.is_compiling() and called.training and torch.is_grad_enabled()
            if not outer or not any(id(p) in self._owned for p in called.parameters()):
                return original(called, *inner, **named)
            return self._record_call(called, inner, named)

        nn.Module.__call__ = __call__  # type: ignore[method-assign]
        self._mode = _Tape(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End the recording; a no-op after the first time."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None
            nn.Module.__call__ = self._original  # type: ignore[method-assign]

    def _record_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = self.copied((args, kwargs))
        random = random_state(self._device)
        with self._paused():
            outputs = self._original(module, *args, **kwargs)
        sync = getattr(module, "require_backward_grad_sync", None)
        self.note(module, kept[0], kept[1], outputs, random=random, sync=sync)
        return outputs

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self.busy = True
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if mode is not None:
                mode.__enter__()  # type: ignore[no-untyped-call]
            self._mode, self.busy = mode, False

    def follows(self, values: Any) -> bool:
        """Say whether anything of these depends on the model's outputs, or on its parameters."""
        known = [id(value) for value in tree_flatten(values)[0] if isinstance(value, Tensor)]
        if any(name in self.tracked for name in known):
            return True
        return torch.is_grad_enabled() and any(name in self._owned for name in known)

    def copied(self, values: Any, constant: Any = None) -> Any:
        """Return values with copies of the tensors that come from elsewhere: the script may overwrite them.

        They lead to no parameter of the model, or backward could not go through them again; ``constant`` is one of
        which that is known.
        """

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor) or id(value) in self.tracked or id(value) in self._owned:
                return value
            if isinstance(value, nn.Parameter):  # of another model, whose gradients are its own affair
                return value.detach()
            if value.requires_grad and value.is_leaf:  # torch.autograd.grad may ask for its gradient later
                made = (value, value.detach().clone().requires_grad_())
                return self._leaves.setdefault(id(value), made)[1]
            reaches = value is not constant and _leaves_of(value) & self._owned
            return value if reaches else self._copy_of(value)

        return tree_map(copy, values)

    def _copy_of(self, value: Tensor) -> Tensor:
        """Return a copy of a constant: one for all calls that see the same, as blocks of a model see one mask."""
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_meta:
            return value.detach().clone()
        held, made = self._copies.get(id(value), (None, value))
        # by its values: not every write counts as one (numpy's into shared memory, those by .data)
        if held is None or held() is not value or not torch.equal(value, made):
            made = value.detach().clone()
            self._copies[id(value)] = weakref.ref(value), made
        return made

    def note(
        self,
        run: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Any,
        random: Any = None,
        sync: Any = None,
    ) -> None:
        """Put a call on the tape and follow its outputs."""
        kind = self._device.type
        autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        differentiable = torch.is_grad_enabled()
        self._micros[-1].calls.append(_Call(run, args, kwargs, outputs, autocast, differentiable, random, sync))
        for tensor in tree_flatten(outputs)[0]:
            if isinstance(tensor, Tensor):
                self.tracked[id(tensor)] = tensor

    def before_backward(self, tensors: tuple[Tensor, ...]) -> None:
        """End the forward of one micro-batch: backward begins on these tensors."""
        micro = self._micros[-1]
        micro.losses = tensors
        needed, calls = {id(tensor) for tensor in tensors}, []
        for call in reversed(micro.calls):
            if needed & _ids(call.outputs):
                calls.append(call)
                needed |= _ids((call.args, call.kwargs))
        micro.calls = calls[::-1]
        if self.sees_backward and all(call.random is None for call in calls):
            micro.losses = ()  # of another model, which is trained in turns with this one
        self.busy = True

    def after_backward(self) -> None:
        """End one micro-batch; the next may begin."""
        self._micros.append(_Micro())
        self._copies.clear()
        self.busy = False

    # ---------------------------------------------------------------- playing
    @property
    def complete(self) -> bool:
        """Whether there is a loss, and the model was called on the way to it."""
        return any(call.random is not None for micro in self._micros if micro.losses for call in micro.calls)

    def play(self) -> float:
        """Run every forward and backward again under what the model runs now; returns the summed loss.

        Gradients are added to those that the parameters have; the random state is left wherever the step leaves it.
        """
        return sum(self._play(micro) for micro in self._micros if micro.losses)

    def _play(self, micro: _Micro) -> float:
        made: dict[int, Any] = {}

        def fresh(value: Any) -> Any:
            return made.get(id(value), value) if isinstance(value, Tensor) else value

        for call in micro.calls:
            if call.random is not None:
                set_random_state(call.random, self._device)
            if call.sync is not None:
                call.run.require_backward_grad_sync = call.sync  # type: ignore[attr-defined]
            args, kwargs = tree_map(fresh, (call.args, call.kwargs))
            if call.writes and args and args[0] is call.args[0]:
                args = (args[0].clone(), *args[1:])
            enabled, dtype = call.autocast
            autocast = torch.autocast(self._device.type, dtype=dtype, enabled=enabled)
            with autocast, torch.set_grad_enabled(call.differentiable):
                outputs = call.run(*args, **kwargs)
            outputs = args[0] if outputs is None and args else outputs
            old, new = tree_flatten(call.outputs)[0], tree_flatten(outputs)[0]
            for before, after in zip(old, new, strict=True):
                if isinstance(before, Tensor):
                    made[id(before)] = after
        losses = [fresh(loss) for loss in micro.losses]
        value = sum(float(local_part(loss.detach())) for loss in losses if loss.numel() == 1)
        torch.autograd.backward(losses)
        return value

    def forget(self) -> None:
        """Let go of everything that was recorded."""
        self._leaves.clear()
        self._copies.clear()
        self._micros.clear()
        self.tracked.clear()


def _ids(tree: Any) -> set[int]:
    return {id(value) for value in tree_flatten(tree)[0] if isinstance(value, Tensor)}


def _leaves_of(value: Tensor) -> set[int]:
    """Return the ids of the leaves that a tensor's gradient would go to."""
    waiting, seen, found = [value.grad_fn], set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add(id(getattr(node, "variable", None)))
        waiting += [previous for previous, _ in node.next_functions]
    return found
