"""What this machine gains from low precision, in one sentence: ``doctor`` prints it, ``demo`` acts on it.

A CPU gains from bf16 only where it has bf16 instructions (AMX, AVX512_BF16; on ARM, BF16 of Armv8.6). Elsewhere
PyTorch's bf16 GEMMs convert every operand, one element after the other, and are many times slower than fp32. INT8 gains
with and without integer instructions (VNNI), FP8 never: there it is emulated. What decides is a linear layer of the
demo's size, forward and backward with its casts, under the three recipes in turn; the names of units only explain it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from autoprec.precision.hardware import cpu_bf16_units, cpu_int8_units

#: Tokens, inputs and outputs: an MLP's first layer in the demo. 15 ms in fp32, half a second where bf16 is converted.
_LAYER = (512, 384, 1536)
_ROUNDS = 8
#: A recipe that takes this many times as long as fp32 in one round is not timed again.
_HOPELESS = 3.0
#: A layer that takes more than this share of its fp32 time gains too little to be seen in a whole step.
_WORTH = 0.9


@dataclass(frozen=True, slots=True)
class Here:
    """What training on this machine could gain: ratios are the time of a linear layer over fp32's.

    ``gpus`` counts usable GPUs; where there are any, the CPU is not asked (ratios are 0). ``units`` multiply bf16,
    ``int8_units`` int8. ``gpu_memory``: bytes of the first GPU.
    """

    gpus: int
    units: tuple[str, ...]
    bf16_ratio: float
    int8_units: tuple[str, ...] = ()
    int8_ratio: float = 1.0
    gpu_memory: int = 0

    @property
    def gains(self) -> bool:
        """True when a measured search has something to find."""
        return self.gpus > 0 or min(self.bf16_ratio, self.int8_ratio) < _WORTH

    @property
    def sentence(self) -> str:
        """What is fast or slow here, and what that means for a search."""
        if self.gpus:
            return f"{self.gpus} usable GPU{'s' if self.gpus > 1 else ''}: `autoprec search` measures there"
        known = {"bf16": (self.units, self.bf16_ratio), "int8": (self.int8_units, self.int8_ratio)}
        parts = [
            f"{form} linear layers {_compared(ratio)} ({', '.join(units) if units else f'no {form} instructions'})"
            for form, (units, ratio) in known.items()
        ]
        means = "so `autoprec search` has something to find on it"
        if not self.gains:
            means = "so low precision gains nothing on it; a GPU can be rehearsed for"
        return f"on this CPU {' and '.join(parts)}, {means}"


def _compared(ratio: float) -> str:
    return f"are {1 / ratio:.1f} times as fast as fp32" if ratio < 1 else f"take {ratio:.1f} times as long as fp32"


def look_here() -> Here:
    """Time one linear layer in fp32, bf16 and INT8 on one thread, unless there is a GPU; about a second."""
    import torch

    if torch.cuda.is_available():
        return Here(torch.cuda.device_count(), (), 0.0, (), 0.0, torch.cuda.get_device_properties(0).total_memory)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fp32, bf16, int8 = _seconds([_layer_step(recipe) for recipe in ("fp32", "bf16", "int8_tensor")])
    finally:
        torch.set_num_threads(threads)
    return Here(0, cpu_bf16_units() or (), bf16 / fp32, cpu_int8_units() or (), int8 / fp32)


def _layer_step(recipe: str) -> Callable[[], object]:
    """Return a function that runs one linear layer forward and backward, as a policy runs it on this CPU."""
    import torch

    from autoprec.backends import choose
    from autoprec.policy import LayerPlan
    from autoprec.precision.recipes import BUILTIN_RECIPES

    tokens, inputs, outputs = _LAYER
    x, weight, grad = (torch.randn(shape) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    x.requires_grad_(), weight.requires_grad_()
    plan, layer = LayerPlan.uniform(BUILTIN_RECIPES[recipe]), torch.nn.Linear(1, 1)
    execution = choose("auto", "cpu").bind(plan, layer, name=recipe, seed=0)
    return lambda: torch.autograd.grad(execution(x, weight, None), (x, weight), grad)


def _seconds(runs: list[Callable[[], object]]) -> list[float]:
    """Return the least CPU seconds of each run, timed in turn so that other work on the machine slows all alike.

    The first round is a warm-up; what is hopelessly slower than the first run then is not timed again.
    """
    least = [float("inf")] * len(runs)
    for number in range(_ROUNDS):
        for which, run in enumerate(runs):
            if number and least[which] > _HOPELESS * least[0]:
                continue
            began = time.process_time()
            run()
            spent = max(time.process_time() - began, 1e-9)
            least[which] = min(least[which], spent)
    return least


def cores() -> int:
    """Return the CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
