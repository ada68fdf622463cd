"""Transformer Engine's global state, entered and left so that delayed scales are updated once per step.

TE updates forward scales when the outermost ``autocast`` ends, and backward scales in the backward of whichever module
came first in its context; a context per layer would make every layer the first one. Here the first-module mark is
always taken, and backward scales are updated when the next training forward begins. What TE's own Python does was
seen by running it (``tests/backends/te_scenarios.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.support.living import living
from autoprec.support.optional import require


class EngineState:
    """TE's ``autocast`` and its ``FP8GlobalStateManager``, for one policy."""

    def __init__(self, purpose: str) -> None:
        self.te = require("transformer_engine.pytorch", purpose=purpose)
        self.manager: Any = require("transformer_engine.pytorch.quantization", purpose=purpose).FP8GlobalStateManager
        self.base: type[Any] = require(
            "transformer_engine.pytorch.module.base", purpose=purpose
        ).TransformerEngineBaseModule
        self.backward_seen = False

    def __deepcopy__(self, _memo: dict[int, Any]) -> EngineState:
        """Return itself: TE's state is the process's."""
        return self

    def start_over(self) -> None:
        """Drop the buffers of modules that no policy uses any more; living modules register again when they run.

        TE's reset forgets every module, and a module believes that it is registered as long as its ``fp8_meta`` says
        so: its scales would never change again.
        """
        self.manager.reset()
        mark = self.manager.get_buffer_info()
        for module in living(self.base):
            getattr(module, "fp8_meta", {}).pop(mark, None)

    @contextlib.contextmanager
    def entered(self, recipe: Any) -> Iterator[None]:
        """Be inside ``autocast`` with a recipe object, once: what encloses it already is not entered again."""
        inside = self.manager.is_fp8_enabled()
        if inside and self.manager.get_fp8_recipe() is recipe:
            yield
            return
        if not inside and torch.is_grad_enabled():
            self.settle()
        with self.te.autocast(enabled=True, recipe=recipe):
            self.manager.is_first_fp8_module()
            yield

    def settle(self) -> None:
        """Update backward scales from what the last backward saw; a collective where ranks train together."""
        if self.backward_seen:
            self.manager.reduce_and_update_fp8_tensors(forward=False)
            self.backward_seen = False

    @contextlib.contextmanager
    def repeated(self, recipe: Any, shell: nn.Module, scale: Tensor | None) -> Iterator[None]:
        """Recompute a forward (activation checkpointing) with the scales that the first one had, learning nothing.

        Args:
            recipe: of Transformer Engine.
            shell: its module.
            scale: a copy of what the first forward used, float32 ``[operands]``; None where nothing is delayed.
        """
        state = delayed_buffers(shell)
        now = None if state is None else tuple(buffer.clone() for buffer in state)
        if state is not None and scale is not None:
            state[0].copy_(scale)
        try:
            # an outermost context that is not enabled updates nothing when it ends
            with self.te.autocast(enabled=False, recipe=recipe), self.te.autocast(enabled=True, recipe=recipe):
                self.manager.is_first_fp8_module()
                yield
        finally:  # checkpointing leaves by an exception as soon as it has what it needs
            if state is not None and now is not None:
                for buffer, value in zip(state, now, strict=True):
                    buffer.copy_(value)

    def watch(self, out: Tensor) -> None:
        """Remember that a backward pass through ``out``, ``[..., N]``, gave delayed scales something to learn."""

        def seen(_grad: Tensor) -> None:
            self.backward_seen = True

        if out.requires_grad:
            out.register_hook(seen)  # type: ignore[no-untyped-call]


def delayed_buffers(shell: Any, key: str = "scaling_fwd") -> tuple[Tensor, Tensor] | None:
    """Return scale and amax history of a module's operands, or None where it has none.

    Args:
        shell: a module of Transformer Engine.
        key: ``scaling_fwd`` or ``scaling_bwd``.

    Returns:
        Float32 ``[operands]`` and ``[length, operands]``: the module's own, not copies.
    """
    state = shell.fp8_meta.get(key)
    scale, history = getattr(state, "scale", None), getattr(state, "amax_history", None)
    return None if scale is None or history is None else (scale, history)


class DelayedMemory:
    """What delayed scaling of one TE module remembers between steps, for checkpoints.

    TE makes a module's buffers in its first forward, and quantizers hold views of them: what was loaded before is kept
    until then and copied in place, before anything is cast. Buffers are saved with as many columns as TE ever has, one
    per tensor of a direction (input, weight, output; grad_output, grad_input), so that shapes depend on the recipe
    alone.
    """

    _SLOTS = (("forward", "scaling_fwd", 3), ("backward", "scaling_bwd", 2))

    def __init__(self, shell: Any, length: int) -> None:
        self.shell, self.length = shell, length
        self.pending: dict[str, Tensor] | None = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> DelayedMemory:
        """Return itself: a copy of a model runs by the same shells, and so with the scales of the original."""
        return self

    def state(self, device: torch.device) -> dict[str, Tensor]:
        """Return scales float32 ``[tensors]`` and histories float32 ``[amax_history_len, tensors]`` per direction."""
        if self.pending is not None:
            return {name: value.to(device, copy=True) for name, value in self.pending.items()}
        found: dict[str, Tensor] = {}
        for name, key, columns in self._SLOTS:
            scale = torch.ones(columns, dtype=torch.float32, device=device)
            history = torch.zeros(self.length, columns, dtype=torch.float32, device=device)
            held = delayed_buffers(self.shell, key)
            if held is not None:
                scale[: held[0].numel()] = held[0]
                history[:, : held[1].shape[1]] = held[1]
            found |= {f"{name}.scale": scale, f"{name}.history": history}
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state`, from the next forward on.

        Args:
            state: scales ``[operands]`` and histories ``[length, operands]`` by name; they are copied.
        """
        self.pending = {name: value.detach().clone() for name, value in state.items()}

    def restore(self) -> None:
        """Put what was loaded into TE's buffers; inside the recipe's context, before the module's forward."""
        if self.pending is None:
            return
        self.shell.init_fp8_metadata(num_gemms=1)
        for name, key, _ in self._SLOTS:
            held = delayed_buffers(self.shell, key)
            if held is not None:
                held[0].copy_(self.pending[f"{name}.scale"][: held[0].numel()])
                history = self.pending[f"{name}.history"]
                rows = min(len(history), len(held[1]))
                held[1][:rows].copy_(history[:rows, : held[1].shape[1]])
        self.pending = None
