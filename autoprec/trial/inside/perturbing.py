"""Runs that the reference is compared with: every trained weight rounded once to bfloat16, or no training at all."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.protocol import STILL


def perturb_run(found: Found, perturb: str) -> None:
    """Change what a run of the reference does, as :attr:`autoprec.trial.protocol.TrainSpec.perturb` says.

    Args:
        found: the models and their weights.
        perturb: see there.
    """
    if perturb == STILL:
        register_optimizer_step_pre_hook(_without_rate)
    else:
        round_weights(found, perturb)


def _without_rate(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = 0.0 * group["lr"]


def round_weights(found: Found, perturb: str = "bf16") -> None:
    """Round every trained weight once to bfloat16: the smallest change of precision there is.

    ``bf16`` rounds to nearest, ``bf16:K`` up or down at random by the seed K (stochastic rounding), without touching
    the script's own random streams. Weights that are bfloat16 already stay as they are.
    """
    _, _, seed = perturb.partition(":")
    generator = torch.Generator().manual_seed(int(seed)) if seed else None
    with torch.no_grad():
        for parameter in found.parameters:
            if parameter.is_complex():  # its real and imaginary parts, in place
                parameter = torch.view_as_real(parameter)
            value = parameter if generator is None else _dithered(parameter, generator)
            parameter.copy_(value.to(torch.bfloat16).to(parameter.dtype))


def _dithered(parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a float32 copy whose bits below bfloat16 were carried up at random, in proportion to their value."""
    value = parameter.detach().to(torch.float32).contiguous()
    dither = torch.randint(0, 1 << 16, value.shape, generator=generator, dtype=torch.int32).to(value.device)
    rounded = ((value.view(torch.int32) + dither) & -(1 << 16)).view(torch.float32)
    return torch.where(torch.isfinite(rounded), rounded, value)
