"""GELU that a module writes by hand, in torch's one kernel: ``implementation: {gelu: fused}``.

transformers' ``NewGELUActivation`` (GPT-2's) and modules like it are eight elementwise operations forward and as many
backward, each of which reads and writes an activation of the MLP's width; under autocast in 16 bits each rounds.
``F.gelu`` reads and writes it once each way. Which of its two forms a module computes is found by calling it, so that
the name of its class does not matter beyond saying that it is a GELU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoprec.applying.raw_weights import WeightExecutions

_NAMED = re.compile("gelu", re.IGNORECASE)
#: The forms differ by 5e-4 at most; another order of operations by less than this.
_SAME = 1e-5
#: Functions that a module has to call for one kernel to gain anything.
_FEWEST_CALLS = 3

Form = Literal["none", "tanh"]


class _Calls(TorchFunctionMode):
    """Counts the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count a call."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def gelus_by_hand(root: nn.Module) -> dict[str, tuple[nn.Module, Form]]:
    """Return the modules that compute GELU by several operations: name -> (module, which form).

    A module is called with numbers from -8 to 8 where its class has GELU in its name, is not torch's own, and holds no
    parameter, buffer or other module.

    Args:
        root: the innermost model.
    """
    found = {}
    for name, module in root.named_modules():
        kind = type(module)
        if not _NAMED.search(kind.__name__) or kind.__module__.startswith("torch."):
            continue
        empty = next(module.parameters(), None) is None and next(module.buffers(), None) is None
        if empty and not module._modules and (form := _form(module)) is not None:
            found[name] = module, form
    return found


def _form(module: nn.Module) -> Form | None:
    """Return which GELU a module computes by hand, or None."""
    x = torch.linspace(-8.0, 8.0, 257, dtype=torch.float32, device="cpu")
    calls = _Calls()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), calls:
            out = module.forward(x)
    except Exception:  # whatever a module does that is no such function
        return None
    if not isinstance(out, Tensor) or out.shape != x.shape or calls.count < _FEWEST_CALLS:
        return None
    forms: tuple[Form, ...] = ("tanh", "none")
    return next((form for form in forms if torch.allclose(out, F.gelu(x, approximate=form), 0.0, _SAME)), None)


class FusedGelu(WeightExecutions):
    """Installed in a module that computes GELU by hand, which holds no weight.

    Args:
        module: is called with an activation of any shape.
        form: of ``F.gelu``.
    """

    def __init__(self, module: nn.Module, form: Form) -> None:
        super().__init__(module, {})
        self.form = form

    def describe(self) -> str:
        """Return what runs in the place of the module's forward."""
        return f"F.gelu, approximate={self.form}"

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``F.gelu`` of the input; anything but one tensor is the module's own business.

        Args:
            forward: the module's own.
            args, kwargs: of the call.
        """
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return forward(*args, **kwargs)
        return F.gelu(args[0], approximate=self.form)
