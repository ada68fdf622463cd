"""The interface of a backend: which GEMMs it can run on a device, and what runs a layer under a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from autoprec.numerics.execution import Execution
from autoprec.policy import LayerPlan
from autoprec.precision.hardware import Capability
from autoprec.precision.recipes import Gemm, Recipe


class Backend(ABC):
    """Runs GEMMs. Optional methods have defaults."""

    name: str
    #: bfloat16 is emulated in float32 where a CPU has no units for it: for trials whose time is modelled
    emulates_casts: bool = False
    #: compute capabilities on which its kernels have run; None where they need no GPU. Elsewhere they were tested on
    #: stand-ins only, and `doctor`, audits and the documentation say so
    ran_on: frozenset[tuple[int, int]] | None = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> Backend:
        """Return itself: a copy of a model goes on by the backend of the original."""
        return self

    def is_experimental(self, device: str) -> bool:
        """Say whether its kernels have never run on such a device (``cpu``, ``cuda:0``)."""
        if self.ran_on is None or not device.startswith("cuda"):
            return False
        return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) not in self.ran_on

    @abstractmethod
    def available(self, device: str) -> Capability:
        """Say whether the backend can run at all on a device (``cpu``, ``cuda:0``), with the reason."""

    @abstractmethod
    def capability(self, recipe: Recipe, *, gemm: Gemm, m: int, k: int, n: int, device: str) -> Capability:
        """Say whether one GEMM, ``[m, k] x [k, n]``, runs under a recipe; 0 stands for a size not known yet.

        Args:
            recipe: of the GEMM.
            gemm: ``fprop``, ``dgrad`` or ``wgrad``.
            m, k, n: sizes; the tokens are M of fprop and dgrad, K of wgrad.
            device: ``cpu``, ``cuda`` or ``cuda:N``.
        """

    @abstractmethod
    def bind(self, plan: LayerPlan, module: nn.Module, *, name: str, seed: int) -> Execution:
        """Return what runs ``module`` under ``plan``.

        Args:
            plan: a recipe per GEMM.
            module: whose Parameters are read in each call.
            name: of the layer, for messages.
            seed: of its random stream.

        Raises:
            UnsupportedError: the backend cannot express the plan.
        """

    def around_model(self) -> Callable[[], AbstractContextManager[Any]] | None:
        """Return what makes the context that the model's forward is run in, or None where it needs none."""
        return None

    def after_step(self) -> Callable[[], None] | None:
        """Return what is called on every rank when an optimizer has stepped, or None where nothing is pending then."""
        return None


def misaligned(gemm: Gemm, m: int, k: int, n: int, multiple: int) -> str:
    """Return which size of a GEMM is not a multiple, or nothing; tokens are padded, so any number of them will do.

    Args:
        gemm: ``fprop``, ``dgrad`` or ``wgrad``.
        m, k, n: its sizes.
        multiple: what they have to be a multiple of.
    """
    sizes = {"M": m, "K": k, "N": n}
    del sizes["K" if gemm == "wgrad" else "M"]
    wrong = (label for label, size in sizes.items() if size % multiple)
    return next((f"{gemm} {label} = {sizes[label]} is not a multiple of {multiple}" for label in wrong), "")
