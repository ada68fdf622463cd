"""What runs one layer under its plan, and remembers what ran: the part that every way of running a layer shares.

An audit must say what ran, not what was configured, so each execution writes down every GEMM where it happens: fprop
when the forward returns, dgrad and wgrad when the gradient of the output arrives, which is when autograd is about to
compute them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from autoprec.policy import LayerPlan


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype autocast computes in on a device type, or None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@dataclass(slots=True)
class Execution(ABC):
    """Runs one layer under its plan.

    Attributes:
        note: why something else than the plan runs, if so.
        uncompiled: why it runs outside compiled graphs, if it does.
        called: a forward has run.
        idle: the last forward had no rows to multiply.
        ran: what the last forward and backward really ran, by GEMM; empty until then.
        compute: dtype in which operands are handed over; None for what the script computes in.
        watched: the dtypes under which a backward has been seen; others are watched once more.
    """

    plan: LayerPlan
    name: str = field(default="", kw_only=True)
    backend: str = field(default="emulated", kw_only=True)
    note: str = field(default="", kw_only=True)
    uncompiled: str = field(default="", kw_only=True)
    called: bool = field(default=False, kw_only=True)
    idle: bool = field(default=False, kw_only=True)
    ran: dict[str, str] = field(default_factory=dict, kw_only=True)
    compute: torch.dtype | None = field(default=None, kw_only=True)
    watched: Any = field(default=None, kw_only=True)

    @property
    def executed(self) -> dict[str, str]:
        """What the last forward and backward ran, by GEMM."""
        return dict(self.ran)

    def describe(self) -> str:
        """Return what ``print(model)`` shows of this layer's policy."""
        return self.plan.describe()

    @abstractmethod
    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, training: bool = True) -> Tensor:
        """Return what the layer computes from ``input``, in the dtype the script would see.

        ``training`` lets delayed scaling learn from this call.
        """

    @_disable_dynamo
    def grouped(self, input: Tensor, weight: Tensor, ends: Tensor, *, training: bool = True) -> Tensor:
        """Return ``input[group] @ weight[group]`` for all groups of rows: each expert is a layer of its own.

        Args:
            input: ``[M, K]``, sorted by expert.
            weight: ``[E, K, N]``.
            ends: integers ``[E]``: the row at which each expert's rows end. The host waits for them.
            training: let delayed scaling learn from this call.

        Returns:
            ``[M, N]`` in the input's dtype, autocast or not, as ``torch._grouped_mm``; zeros for rows of no expert.
        """
        with torch.autocast(input.device.type, enabled=False):
            parts, start = [F.linear(input[:0], weight[0].t().to(input.dtype))], 0  # no rows, but a gradient for both
            for end, one in zip(ends.tolist(), weight.unbind(0), strict=True):
                if end > start:
                    parts.append(self(input[start:end], one.t(), None, training=training))
                    start = end
        rest = parts[0].new_zeros((input.shape[0] - start, weight.shape[2]))
        return torch.cat([*parts, rest])

    def state(self, device: torch.device) -> dict[str, Tensor]:  # noqa: ARG002
        """Return what this layer remembers between steps, by name: tensors whose shapes the plan alone decides."""
        return {}

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> None:  # noqa: B027
        """Continue from :meth:`state`.

        Args:
            state: tensors of any shape by name, as :meth:`state` returned them.
            device: on which the layer runs.
        """

    def record(self, out: Tensor, key: Any, labels: Mapping[str, str], *, dgrad: bool, wgrad: bool) -> None:
        """Note that fprop ran as ``labels`` say, and dgrad and wgrad where they run: when ``out``'s gradient arrives.

        One backward per ``key`` is enough: autograd runs it in the dtypes of the graph just built.

        Args:
            out: the layer's output, ``[..., N]``.
            key: what the graph depends on, such as the dtypes of autocast and of the script.
            labels: GEMM -> what it runs as.
            dgrad, wgrad: whether the input, and the weight, has a gradient.
        """
        self.ran["fprop"] = labels["fprop"]
        if not out.requires_grad or self.watched == key or torch.compiler.is_compiling():
            return
        later = {gemm: labels[gemm] for gemm, runs in (("dgrad", dgrad), ("wgrad", wgrad)) if runs}

        def seen(_grad: Tensor) -> None:
            self.watched = key
            self.ran.update(later)

        out.register_hook(seen)  # type: ignore[no-untyped-call]


def only_once(grads: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Let the gradients of ``create_graph=True`` be used but not differentiated: rounding has no second derivative.

    ``once_differentiable`` would let them pass as constants where the gradient that arrived is one.
    """
    message = (
        f"layer '{name}' cannot be differentiated twice under its recipe, as a gradient penalty or a Hessian asks "
        "(create_graph=True): keep it as the script wrote it, or in bf16"
    )
    given = [grad.detach().requires_grad_() for grad in grads if grad is not None]
    out = torch._C._functions.DelayedError(message.encode(), len(given))(*given)
    held = iter([out] if isinstance(out, Tensor) else out)
    return tuple(None if grad is None else next(held) for grad in grads)
