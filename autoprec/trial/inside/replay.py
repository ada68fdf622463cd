"""Gradient errors where a process must not be forked (CUDA, process groups): replay one recorded step per policy.

During the reference step every call of the model is noted with its inputs, random state and autocast, and every torch
function that the script applies to the model's outputs on the way to ``backward`` is put on a tape. A probe applies
its policy, calls the model again with the same inputs, plays the tape on the new outputs and runs backward, so losses
computed outside the model are recomputed too. Every rank does the same, in the same order.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from autoprec.errors import AutoPrecError
from autoprec.trial.inside.applying import apply_document
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Events, Hooks, raw_loss
from autoprec.trial.inside.sensitivity import (
    NOISE_BATCHES,
    Gradients,
    StateSample,
    Weights,
    is_over,
    local_part,
    relative_error,
)
from autoprec.trial.protocol import TrialSpec

__all__ = ["Replay"]


@dataclass(slots=True)
class _Call:
    """One call of the model, or one torch function on the way to the loss."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    autocast: tuple[bool, torch.dtype]
    random: Any = None
    sync: bool | None = None


@dataclass(slots=True)
class _Micro:
    """One forward and backward: calls in order, then the tensors backward was called on."""

    calls: list[_Call] = field(default_factory=list)
    losses: tuple[torch.Tensor, ...] = ()
    scale: float = 1.0


def _random_state(device: torch.device) -> Any:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: Any, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


class _Tape(TorchFunctionMode):
    """Notes every torch function with an argument that depends on the model's outputs."""

    def __init__(self, owner: Replay) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        if not self._owner.busy and getattr(func, "__name__", "") != "backward":
            flat = tree_flatten((args, named))[0]
            if any(isinstance(x, torch.Tensor) and id(x) in self._owner.tracked for x in flat):
                self._owner.note(func, tuple(args), named, out)
        return out


class Replay(Events):
    """Answers the probes of one ``sensitivity`` trial without forking; ``done`` receives the payload."""

    def __init__(
        self,
        spec: TrialSpec,
        found: Found,
        hooks: Hooks,
        done: Callable[[dict[str, Any]], None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._beat, self._began = beat, time.monotonic()
        self._spec, self._found, self._hooks, self._done = spec, found, hooks, done
        self._device = found.parameters[0].device
        self._gradients = Gradients(found.root_parameters, 1, shared=False)
        self._squares = self._deviation = 0.0
        self._micros = [_Micro()]
        self._mode: _Tape | None = None
        self._kept: list[Any] = []
        self._batch = 0
        self._unclip: dict[int, float] = {}
        self._loss = self._batch_loss = 0.0
        self._rows: list[dict[str, Any]] = []
        self._weights: Weights | None = None
        self._state: StateSample | None = None
        self._lost: dict[str, Any] = {"lost_updates": None, "lost_state": {}}
        self._original: Any = None
        self.tracked: dict[int, Any] = {}
        self.busy = False

    # ---------------------------------------------------------------- recording
    def start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Begin inside a training forward: this very call is the first of the recorded step."""
        owned = {id(p) for p in self._found.root.parameters()}
        original = self._original = nn.Module.__call__

        def __call__(called: nn.Module, *inner: Any, **named: Any) -> Any:  # noqa: N807
            outer = not self.busy and called.training and torch.is_grad_enabled()
            if not outer or not any(id(p) in owned for p in called.parameters()):
                return original(called, *inner, **named)
            return self._record_call(called, inner, named)

        nn.Module.__call__ = __call__  # type: ignore[method-assign]
        self._mode = _Tape(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._hooks.events = self

    def _record_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = tree_map(
            lambda x: x.detach().clone().requires_grad_(x.requires_grad) if _is_leaf(x) else x, (args, kwargs)
        )
        random = _random_state(self._device)
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
        self._micros[-1].calls.append(_Call(run, args, kwargs, outputs, autocast, random, sync))
        self._kept.append((args, kwargs, outputs))  # ids must stay unique for as long as they are compared
        for tensor in tree_flatten(outputs)[0]:
            if isinstance(tensor, torch.Tensor):
                self.tracked[id(tensor)] = tensor

    # ---------------------------------------------------------------- events of the reference steps
    def before_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        raw = [raw_loss(t).detach() for t in tensors if t.numel() == 1]
        self._batch_loss += sum(float(local_part(t)) for t in raw)
        if self._batch == 0:
            micro = self._micros[-1]
            micro.losses = tensors
            if raw and hasattr(tensors[0], "_autoprec_raw") and float(raw[0]):
                micro.scale = float(tensors[0].detach()) / float(raw[0])
            self.busy = True

    def after_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:  # noqa: ARG002
        if self._batch == 0:
            self._micros.append(_Micro())
            self.busy = False
        if self._found.backward_only:
            self._ready()

    def clipped(self, parameters: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
        size = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if math.isfinite(size) and size > max_norm > 0:
            self._unclip |= {id(p): (size + 1e-6) / max_norm for p in parameters}

    def gradients_ready(self, optimizer: Optimizer) -> None:
        if optimizer is self._found.optimizers[0]:
            self._ready()

    def after_step(self, optimizer: Optimizer) -> None:
        if self._weights is not None:  # from the first complete gradients on, weights stay as they are
            if self._state is not None and math.isfinite(lost := self._weights.lost_in_bf16()):
                self._lost = {"lost_updates": lost, "lost_state": self._state.lost_in_bf16()}
                self._state = None
            self._weights.restore(optimizer)

    def _ready(self) -> None:
        if self._batch == 0:
            self._stop_recording()
        self._store()
        if self._batch == 0:
            self._loss = self._batch_loss
            self._probe_all()
            self._weights, self._state = Weights(self._found), StateSample(self._found)
        self._batch += 1
        self._batch_loss, self._unclip = 0.0, {}
        if self._batch >= NOISE_BATCHES or self._found.backward_only:
            self._finish()

    def _stop_recording(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None
        nn.Module.__call__ = self._original  # type: ignore[method-assign]

    def _store(self) -> None:
        if self._batch:
            self._deviation += self._gradients.fold(self._batch, self._unclip, self._grads())
            return
        self._gradients.store(0, self._unclip, self._grads())
        self._squares = self._gradients.square(0)

    def _grads(self) -> list[torch.Tensor | None]:
        return [None if p.grad is None else local_part(p.grad) for p in self._found.root_parameters]

    # ---------------------------------------------------------------- probes
    def _probe_all(self) -> None:
        micros = [micro for micro in self._micros if micro.losses]
        kept = [p.grad for p in self._found.parameters]
        random = _random_state(self._device)
        events, self._hooks.events = self._hooks.events, Events()
        for probe in self._spec.probes:
            if self._rows and self._is_over():
                break
            for parameter in self._found.parameters:
                parameter.grad = None
            try:
                apply_document(probe.policy or _NOTHING, self._found, self._spec.backend)
                loss = sum(self._play(micro) for micro in micros)
                row = self._compared(loss, micros[0].scale if micros else 1.0)
            except (AutoPrecError, RuntimeError, ValueError, TypeError) as error:
                row = {"gradient_error": None, "loss": None, "nonfinite": False, "failed": str(error)[:300]}
            self._rows.append({"id": probe.id, **row})
            self._beat()
        apply_document(_NOTHING, self._found, self._spec.backend)
        for parameter, grad in zip(self._found.parameters, kept, strict=True):
            parameter.grad = grad
        _set_random_state(random, self._device)
        self._hooks.events = events
        self._kept.clear()
        self._micros.clear()
        self.tracked.clear()

    def _play(self, micro: _Micro) -> float:
        """Run one recorded forward and backward under the policy applied now; returns the unscaled loss."""
        made: dict[int, Any] = {}

        def fresh(value: Any) -> Any:
            return made.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for call in micro.calls:
            if call.random is not None:
                _set_random_state(call.random, self._device)
            if call.sync is not None:
                call.run.require_backward_grad_sync = call.sync  # type: ignore[attr-defined]
            args, kwargs = tree_map(fresh, (call.args, call.kwargs))
            with torch.autocast(self._device.type, dtype=call.autocast[1], enabled=call.autocast[0]):
                outputs = call.run(*args, **kwargs)
            old, new = tree_flatten(call.outputs)[0], tree_flatten(outputs)[0]
            for before, after in zip(old, new, strict=True):
                if isinstance(before, torch.Tensor):
                    made[id(before)] = after
        losses = [fresh(loss) for loss in micro.losses]
        value = sum(float(local_part(loss.detach())) for loss in losses if loss.numel() == 1)
        torch.autograd.backward(losses)
        return value / micro.scale

    def _compared(self, loss: float, scale: float) -> dict[str, Any]:
        factor = {id(p): 1.0 / scale for p in self._found.parameters} if scale != 1.0 else {}
        error2, norm2 = self._gradients.compare(0, factor, self._grads())
        value = relative_error(*self._over_ranks(error2, norm2))
        finite = math.isfinite(value) and math.isfinite(loss)
        return {
            "gradient_error": value if finite else None,
            "loss": loss if math.isfinite(loss) else None,
            "nonfinite": not finite,
        }

    def _over_ranks(self, *values: float) -> list[float]:
        """Add up over the shards of all ranks; replicated gradients are the same everywhere."""
        if not any(hasattr(p, "to_local") for p in self._found.parameters):
            return list(values)
        both = torch.tensor(values, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(both)
        return [float(x) for x in both]

    def _is_over(self) -> bool:
        """Whether the time is used up, by the clock of the first rank: all ranks answer the same probes."""
        over = is_over(self._began, self._spec.within_s)
        if self._spec.within_s is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            told = torch.tensor(int(over), device=self._device)
            torch.distributed.broadcast(told, 0)
            over = bool(told)
        return over

    def _finish(self) -> None:
        seen = self._batch
        spread = self._deviation / max(seen - 1, 1), self._squares
        noise = relative_error(*self._over_ranks(*spread)) if seen > 1 else float("nan")
        self._done(
            {
                "probes": self._rows,
                "gradient_noise": noise,
                "noise_batches": seen,
                "reference_loss": self._loss,
                **self._lost,
                "method": "replay",
            }
        )


_NOTHING: dict[str, Any] = {"schema": "autoprec.policy/1"}


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is None
