"""One training step that can be played again, under another policy, without the script's help.

While the script takes a step, every call of the model is noted with its inputs, random state and autocast, and every
torch function applied to the model's outputs or parameters on the way to ``backward`` is put on a tape. Played again,
the model is called with the same inputs, the tape runs on its new outputs, and ``backward`` gives the gradients that
this batch would have had; losses computed outside the model are recomputed too. What does not lead to the loss (a
metric that is summed up, a value that is printed) is left out: it would change what the script holds. Inputs and
targets are copied: a script may load its next batch into the same memory before its step is played. Nothing else is
kept: what a call made is noted by number, so that logits live as long as they do in a step that is not recorded.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from autoprec.graph.places import caller
from autoprec.trial.inside.observe.discovery import loss_parameters
from autoprec.trial.inside.sensitivity.gradients import local_part

#: Its functions about the stack of modes have no types.
_modes: Any = torch.overrides


@dataclass(frozen=True, slots=True)
class _Made:
    """Stands, among the arguments of a call, for what an earlier call of the same micro-batch made."""

    number: int


@dataclass(slots=True, eq=False)
class _Call:
    """One call of the model, or one torch function on the way to the loss; ``made``: the numbers of its outputs."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[int | None, ...]
    autocast: tuple[bool, torch.dtype]
    differentiable: bool
    random: Any = None
    sync: bool | None = None
    where: str = ""

    @property
    def writes(self) -> bool:
        """Whether it changes its first argument in place."""
        name = getattr(self.run, "__name__", "")
        return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


@dataclass(slots=True, eq=False)
class _Micro:
    """One forward and backward: calls in order, then the tensors backward was called on."""

    calls: list[_Call] = field(default_factory=list)
    losses: tuple[Tensor | _Made, ...] = ()


def eager() -> contextlib.AbstractContextManager[Any]:
    """Return what keeps compiled functions from being compiled anew for what happens in one step only."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


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
        if owner.busy or owner.failed:
            return func(*args, **named)
        if getattr(func, "__name__", "") == "backward" or not owner.depends((args, named)):
            return func(*args, **named)
        replaced = getattr(func, "__name__", "") == "__setitem__"  # what else its first argument held are constants
        # copied before it writes into them
        kept = owner.kept((tuple(args), named), constant=args[0] if replaced else None)
        out = func(*args, **named)
        if kept is not None:
            owner.note(func, *kept, args[0] if out is None and args else out)
        return out


class RecordedStep:
    """The step that the script takes between :meth:`start` and :meth:`stop`; :meth:`play` repeats it.

    The owner calls :meth:`before_backward` and :meth:`after_backward` around every backward pass of the step.

    Args:
        parameters: those of the recorded model; a call of a module that holds one of them is a call of the model.
        device: the device of the parameters.
        modules: modules of the model whose ``forward`` the script may call itself, past ``nn.Module.__call__``.

    Attributes:
        line: while the step is played, the script's ``file:line`` of the torch function outside the model that runs.
        failed: why the step could not be recorded (no memory for a copy of its inputs); the script's step goes on.
    """

    def __init__(self, parameters: Iterable[Tensor], device: torch.device, modules: Iterable[nn.Module] = ()) -> None:
        self._owned = {id(parameter) for parameter in parameters}
        self._modules = list(modules)
        self._forwards: list[tuple[nn.Module, Any]] = []  # with what each had of its own
        self._device = device
        self._micros = [_Micro()]
        self._mode: _Tape | None = None
        self._eager = contextlib.ExitStack()
        self._original: Any = None
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}  # with its copy
        self._copies: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # of constants, in this micro-batch
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # of what calls made, by id
        self._count = 0
        self._live: set[int] = set()  # those that no backward has gone through
        self._reaching: set[int] = set()  # those from which a backward would come to the model's parameters
        self.failed = ""
        self.busy = False
        self.line = ""

    # ---------------------------------------------------------------- recording
    def start(self) -> None:
        """Begin before, or inside, the first call of the model."""
        original = self._original = nn.Module.__call__

        def __call__(called: nn.Module, *inner: Any, **named: Any) -> Any:  # noqa: N807
            if self.busy or self.failed or torch.compiler.is_compiling() or not self._is_call_of_model(called):
                return original(called, *inner, **named)
            return self._record_call(called, partial(original, called), inner, named)

        nn.Module.__call__ = __call__  # type: ignore[method-assign]
        for module in self._modules:
            self._forwards.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = self._watched(module)
        self._mode = _Tape(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._eager.enter_context(eager())  # Dynamo would trace what the tape does

    def _watched(self, module: nn.Module) -> Callable[..., Any]:
        """Return a module's forward, which is recorded where the script calls it: a policy changes what it is."""
        original = module.forward

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.busy or self.failed or torch.compiler.is_compiling() or not self._is_call_of_model(module):
                return original(*args, **kwargs)
            return self._record_call(partial(_forward, module), original, args, kwargs)

        return forward

    def _is_call_of_model(self, called: nn.Module) -> bool:
        return called.training and torch.is_grad_enabled() and any(id(p) in self._owned for p in called.parameters())

    def stop(self) -> None:
        """End the recording; a no-op after the first time."""
        if self._mode is not None:
            _take_off(self._mode)
            self._eager.close()
            self._mode = None
            nn.Module.__call__ = self._original  # type: ignore[method-assign]
            for module, own in self._forwards:
                if own is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = own
            self._forwards.clear()

    def _record_call(
        self, run: Callable[..., Any], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``original``, as the script does, and note ``run``, which is what it comes to under any policy."""
        kept = self.kept((args, kwargs))
        random = random_state(self._device)
        with self._paused():
            outputs = original(*args, **kwargs)
        sync = getattr(run, "require_backward_grad_sync", None)
        if kept is not None:
            self.note(run, *kept, outputs, random=random, sync=sync)
        return outputs

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self.busy = True
        mode, self._mode = self._mode, None
        above = [] if mode is None else _take_off(mode)
        self._eager.close()  # a compiled model runs as it does in every step
        try:
            yield
        finally:
            if mode is not None:
                _put_on(mode, above)
                self._eager.enter_context(eager())
            self._mode, self.busy = mode, False

    def depends(self, values: Any) -> bool:
        """Say whether anything of these depends on the model's outputs, or on its parameters."""
        known = [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]
        if any(self._number(value) is not None for value in known):
            return True
        return torch.is_grad_enabled() and any(id(value) in self._owned for value in known)

    def _number(self, value: Tensor) -> int | None:
        """Return the number of what a call of this step made, for as long as it lives; None for any other tensor."""
        held, number = self._numbers.get(id(value), (None, 0))
        return number if held is not None and held() is value else None

    def kept(
        self, values: tuple[tuple[Any, ...], dict[str, Any]], constant: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return what :meth:`copied` does; None where that fails, from where on nothing is recorded."""
        try:
            args, kwargs = self.copied(values, constant)
        except Exception as error:  # measuring must never be what ends a training
            self.forget()
            self.failed = f"{type(error).__name__}: {error}"
            return None
        return args, kwargs

    def copied(self, values: Any, constant: Any = None) -> Any:
        """Return values with copies of the tensors that come from elsewhere: the script may overwrite them.

        They lead to no parameter of the model, or backward could not go through them again; ``constant`` is one of
        which that is known.
        """

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor) or id(value) in self._owned:
                return value
            number = self._number(value)
            if number is not None:  # what an earlier micro-batch made without a way back to it is a constant
                return _Made(number) if number in self._live or value.requires_grad else value
            if isinstance(value, nn.Parameter):  # of another model, whose gradients are its own affair
                return value.detach()
            if value.requires_grad and value.is_leaf:  # torch.autograd.grad may ask for its gradient later
                made = (value, value.detach().clone().requires_grad_())
                return self._leaves.setdefault(id(value), made)[1]
            return value if value is not constant and self._leads_to_model(value) else self._copy_of(value)

        return tree_map(copy, values)

    def _leads_to_model(self, value: Tensor) -> bool:
        """Say whether a tensor's gradient would go to one of the model's parameters."""
        return any(id(leaf) in self._owned for leaf in loss_parameters((value,)))

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
        """Put one call on the tape: of the model where ``random`` is its random state, else of a torch function.

        Args:
            run: what was called.
            args, kwargs: the arguments of the call.
            outputs: what it returned.
            random: state of random streams before it, of a call of the model.
            sync: whether ranks exchange gradients in its backward pass (DDP); None where that is not said.
        """
        kind = self._device.type
        autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        differentiable = torch.is_grad_enabled()
        found = tree_flatten(outputs)[0]
        grows = any(isinstance(value, Tensor) and value.requires_grad for value in found)
        if random is None and not grows and self._live.isdisjoint(_numbers_in((args, kwargs))):
            return  # detached from an earlier micro-batch
        made = tuple(self._numbered(value) for value in found)
        if random is not None or any(map(self._reaches, tree_flatten((args, kwargs))[0])):
            grown = zip(found, made, strict=True)
            self._reaching |= {number for value, number in grown if number is not None and value.requires_grad}
        where = caller() if random is None else ""
        self._micros[-1].calls.append(_Call(run, args, kwargs, made, autocast, differentiable, random, sync, where))

    def _reaches(self, value: Any) -> bool:
        """Say whether one of the kept arguments of a call leads a backward to the model's parameters."""
        if isinstance(value, _Made):
            return value.number in self._reaching
        return isinstance(value, Tensor) and (id(value) in self._owned or value.grad_fn is not None)

    def _numbered(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self._count += 1
        self._numbers[id(value)] = weakref.ref(value), self._count
        self._live.add(self._count)
        return self._count

    def before_backward(self, tensors: tuple[Tensor, ...]) -> None:
        """End the forward of one micro-batch: backward begins on these tensors, losses of shape ``[]`` or vectors."""
        if self.failed:
            return
        # a loss that reaches no parameter is of another model, which is trained in turns with this one (a
        # discriminator, which is given what the generator has made, detached)
        ours = [one for one in tensors if self._number(one) in self._reaching or self._leads_to_model(one)]
        losses = tuple(self.copied(tensor) if self._number(tensor) else tensor for tensor in ours)
        done, last = self._micros[:-1], self._micros[-1]
        needed, calls = _numbers_in(losses), list[_Call]()
        for call in reversed(last.calls):
            if not needed.isdisjoint(call.made):
                calls.insert(0, call)
                needed |= _numbers_in((call.args, call.kwargs))
        missing = needed.difference(*(call.made for call in calls))
        # backward goes once more through a forward whose graph was kept: both losses are played together
        joined = [one for one in done if any(not missing.isdisjoint(call.made) for call in one.calls)]
        calls = [*(call for one in joined for call in one.calls), *calls]
        micro = _Micro(calls, (*(loss for one in joined for loss in one.losses), *losses))
        waiting = _Micro([call for call in last.calls if call not in calls])
        self._micros = [*(one for one in done if one not in joined), micro, waiting]
        self._live = {number for call in waiting.calls for number in call.made if number is not None}
        self.busy = True

    def after_backward(self) -> None:
        """End one micro-batch; the next may begin."""
        self._copies.clear()
        self.busy = False

    # ---------------------------------------------------------------- playing
    @property
    def modules(self) -> list[nn.Module]:
        """What was called, wrappers as such."""
        return [c.run for micro in self._micros if micro.losses for c in micro.calls if isinstance(c.run, nn.Module)]

    def play(self, *, alone: bool = False) -> float:
        """Run every forward and backward again under what the model runs now; returns the summed loss.

        Gradients are added to those that the parameters have; the random state is left wherever the step leaves it.
        With ``alone`` wrappers keep their settings about exchanging gradients.

        Raises:
            RuntimeError: the step could not be recorded, or a loss depends on what was computed before the recording.
        """
        if self.failed or not any(micro.losses for micro in self._micros):
            raise RuntimeError(f"the step could not be recorded: {self.failed or 'no loss of the model was seen'}")
        return sum(self._play(micro, alone) for micro in self._micros if micro.losses)

    def _play(self, micro: _Micro, alone: bool) -> float:
        made: dict[int, Any] = {}

        def fresh(value: Any) -> Any:
            return made[value.number] if isinstance(value, _Made) else value

        for call in micro.calls:
            if call.random is not None:
                set_random_state(call.random, self._device)
            if call.sync is not None and not alone:
                call.run.require_backward_grad_sync = call.sync  # type: ignore[attr-defined]
            args, kwargs = tree_map(fresh, (call.args, call.kwargs))
            if call.writes and args and not isinstance(call.args[0], _Made):
                args = (args[0].clone(), *args[1:])
            enabled, dtype = call.autocast
            autocast = torch.autocast(self._device.type, dtype=dtype, enabled=enabled)
            self.line = call.where
            with autocast, torch.set_grad_enabled(call.differentiable):
                outputs = call.run(*args, **kwargs)
            outputs = args[0] if outputs is None and args else outputs
            for number, value in zip(call.made, tree_flatten(outputs)[0], strict=True):
                if number is not None:
                    made[number] = value
        self.line = ""
        losses = [fresh(loss) for loss in micro.losses]
        made.clear()  # what backward needs, it holds
        args = kwargs = outputs = value = None
        total = sum(float(local_part(loss.detach())) for loss in losses if loss.numel() == 1)
        torch.autograd.backward(losses)
        return total

    def forget(self) -> None:
        """Let go of what was recorded; until :meth:`stop` recording goes on, with nothing before it."""
        self._leaves.clear()
        self._copies.clear()
        self._micros[:] = [_Micro()]
        self._numbers.clear()


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _numbers_in(tree: Any) -> set[int]:
    return {value.number for value in tree_flatten(tree)[0] if isinstance(value, _Made)}


def _take_off(mode: TorchFunctionMode) -> list[Any]:
    """Take a mode off the stack; returns those above it, which the script has put on since (``torch.device``)."""
    above: list[Any] = []
    if all(one is not mode for one in _modes._get_current_function_mode_stack()):
        return above
    while (top := _modes._pop_mode()) is not mode:
        above.append(top)
    for one in reversed(above):
        _modes._push_mode(one)
    return above


def _put_on(mode: TorchFunctionMode, above: list[Any]) -> None:
    """Put a mode where :func:`_take_off` took it from."""
    for _ in above:
        _modes._pop_mode()
    _modes._push_mode(mode)
    for one in reversed(above):
        _modes._push_mode(one)
