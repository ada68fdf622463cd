"""Skip a step whose gradients are not finite, or out of all proportion, and count it.

Low-precision state cannot take a non-finite value back out: the amax of its block would stay infinite. Large-scale
FP8 runs (GLM, DeepSeek) skip such steps as well.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autoprec.optim.tensor import decoded

__all__ = ["StepGuard", "gradient_norm"]


def gradient_norm(parameters: list[Tensor]) -> float:
    """Return the L2 norm of all gradients (FP32 accumulation); infinity or NaN when any value is."""
    norms = [
        torch.linalg.vector_norm(decoded(p.grad), dtype=torch.float32)
        for p in parameters
        if p.grad is not None and not p.grad.is_sparse
    ]
    if not norms:
        return 0.0
    device = norms[0].device
    return float(torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms])))


@dataclass
class StepGuard:
    """Decide before an optimizer step whether it may happen.

    ``outlier``: skip when the gradient norm exceeds this multiple of the median of the last ``window`` norms
    (0: only non-finite gradients are skipped). ``limit`` consecutive outliers are taken for the new normal.
    """

    outlier: float = 0.0
    window: int = 64
    limit: int = 4
    skipped: int = 0
    nonfinite: int = 0
    consecutive: int = 0
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def admits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return False, and count, when this step must be skipped."""
        if getattr(optimizer, "found_inf", None) is not None and float(optimizer.found_inf) > 0:  # type: ignore[attr-defined]
            self.skipped += 1
            return False
        norm = gradient_norm([p for group in optimizer.param_groups for p in group["params"]])
        if not math.isfinite(norm):
            self.skipped, self.nonfinite = self.skipped + 1, self.nonfinite + 1
            return False
        if self._is_outlier(norm):
            self.skipped, self.consecutive = self.skipped + 1, self.consecutive + 1
            return False
        self.consecutive = 0
        self.norms.append(norm)
        return True

    def state(self) -> Tensor:
        """Return counters and recent norms: float64 ``[4 + window]``; the fourth counts the norms."""
        head = [self.skipped, self.nonfinite, self.consecutive, len(self.norms)]
        return torch.tensor([*head, *self.norms, *[0.0] * (self.window - len(self.norms))], dtype=torch.float64)

    def load_state(self, state: Tensor) -> None:
        """Continue from :meth:`state`."""
        skipped, nonfinite, consecutive, count, *norms = state.tolist()
        self.skipped, self.nonfinite, self.consecutive = int(skipped), int(nonfinite), int(consecutive)
        self.norms.clear()
        self.norms.extend(norms[: int(count)])

    def _is_outlier(self, norm: float) -> bool:
        if not self.outlier or len(self.norms) < 8:
            return False
        if self.consecutive >= self.limit:
            self.norms.clear()
            return False
        usual = sorted(self.norms)[len(self.norms) // 2]
        return usual > 0 and norm > self.outlier * usual
