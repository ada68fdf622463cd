"""What all library backends share: dtypes, ragged batches, bias, and seeing what ran.

A library's product runs on a 2-D input whose rows are padded with zeros to the multiple its kernels need: zero rows
change no scale and no sum, so a ragged last batch needs no other recipe. No module is replaced and no Parameter is
copied: the library's function, or a shell module that shares the Parameters, is called from the layer's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.backends.te_state import DelayedMemory
from autoprec.errors import UnsupportedError
from autoprec.numerics.execution import Execution, autocast_dtype
from autoprec.numerics.plan import DTYPE_NAMES
from autoprec.numerics.sharded import is_dtensor
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import GEMMS, KEEP


def wants_bf16(plan: LayerPlan) -> bool:
    """True when a GEMM of the plan is bf16: then operands arrive in bfloat16, whatever the script computes in."""
    return any((recipe := plan.recipe(gemm)) is not None and recipe.format == "bf16" for gemm in GEMMS)


@dataclass(slots=True)
class LibraryExecution(Execution):
    """Runs one layer through a library.

    Attributes:
        product: ``(input [M, K], weight [N, K]) -> [M, N]``, differentiable; the weight comes as it is stored.
        labels: what the library runs, by GEMM.
        rows: multiple of M that the library's kernels need.
        memory: what the library remembers between steps, if anything.
    """

    product: Callable[[Tensor, Tensor], Tensor]
    labels: dict[str, str]
    rows: int = 1
    memory: DelayedMemory | None = None

    def state(self, device: torch.device) -> dict[str, Tensor]:
        """Return what the library remembers between steps, tensors of its own shapes by name; {} for none."""
        return {} if self.memory is None else self.memory.state(device)

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Continue from :meth:`state`; one that lacks a part is not taken.

        Args:
            state: tensors by name, of the shapes that :meth:`state` returned.
            device: on which the layer runs.
        """
        if self.memory is not None and state.keys() == self.memory.state(device).keys():
            self.memory.load(state)

    def describe(self) -> str:
        """Return what runs, and by whom, in a few words."""
        return f"{self.plan.describe()} by {self.backend}"

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, training: bool = True) -> Tensor:
        """Return ``input @ weight.T + bias`` in the dtype the script would see."""
        del training
        if is_dtensor(weight):
            raise UnsupportedError(
                f"backend '{self.backend}' runs no layer whose weight is sharded by tensor parallelism",
                where=f"layer '{self.name}'",
                fix="apply the policy with backend='native', which runs each rank's part",
            )
        self.called = True
        device = input.device.type
        autocast = autocast_dtype(device)
        out_dtype = autocast or input.dtype
        compute = self.compute or out_dtype
        x = input.to(compute).reshape(-1, input.shape[-1])
        if x.shape[0] == 0:
            return F.linear(input, weight, bias)
        padding = -x.shape[0] % self.rows
        with torch.autocast(device, enabled=False):
            out = self.product(F.pad(x, (0, 0, 0, padding)) if padding else x.contiguous(), weight)
            if out.requires_grad:  # a gradient may come expanded (sum) or transposed, which 8-bit kernels refuse
                out.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
            out = out[: x.shape[0]].to(out_dtype)
            if bias is not None:
                out = out + bias.to(out_dtype)
        out = out.reshape(*input.shape[:-1], out.shape[-1])
        labels = self._labels(out_dtype)
        self.record(out, (autocast, input.dtype), labels, dgrad=input.requires_grad, wgrad=weight.requires_grad)
        return out

    def _labels(self, script: torch.dtype) -> dict[str, str]:
        """What the GEMMs run as: one that is kept runs in ``compute``, which may not be what the script computes in."""
        if self.compute is None or self.compute is script:
            return self.labels
        other = DTYPE_NAMES[self.compute]
        return {gemm: other if label == KEEP else label for gemm, label in self.labels.items()}
