"""Precision levels by name: the rows of MS-AMP's chart and what came after them, as parts of a policy.

A level decides everything around the GEMMs (weights, their gradients, optimizer state, communication, loss scaling)
and names a GEMM recipe of its own. Rows: Azure/MS-AMP, docs/user-tutorial/optimization-level.md;
FP8-LM, arXiv 2310.18313.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from autoprec.errors import UnknownNameError
from autoprec.policy import CommunicationPolicy, OptimizerPolicy, Policy
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe

#: MS-AMP's linear layer: delayed power-of-two scales over 16 steps, E5M2 output gradients (msamp/nn/linear.py).
_MSAMP_GEMM = Recipe.model_validate(
    {
        "format": "fp8",
        "scaling": {"granularity": "tensor", "scale": "delayed", "power_of_2": True, "amax_history_len": 16},
        "operands": {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"},
    }
)


@dataclass(frozen=True)
class Level:
    """One named level.

    ``recipe`` runs the GEMMs when the policy names none of its own; ``recipe_name`` is what a policy file calls it.
    """

    name: str
    summary: str
    recipe_name: str
    recipe: Recipe
    activations: Literal["keep", "bf16", "fp16"] = "bf16"
    optimizer: OptimizerPolicy = field(default_factory=OptimizerPolicy)
    communication: CommunicationPolicy = field(default_factory=CommunicationPolicy)
    loss_scaling: Literal["none", "dynamic"] = "none"

    def fragment(self) -> dict[str, Any]:
        """Return the sections this level decides, as plain data (everything but layers and recipes)."""
        return {
            "activations": self.activations,
            "optimizer": self.optimizer.model_dump(),
            "communication": self.communication.model_dump(),
            "loss_scaling": self.loss_scaling,
        }

    def policy(self) -> Policy:
        return Policy(
            recipes={self.recipe_name: self.recipe},
            default=self.recipe_name,
            activations=self.activations,
            optimizer=self.optimizer,
            communication=self.communication,
            loss_scaling=self.loss_scaling,
        )


_FP8_COMMUNICATION = CommunicationPolicy(gradients="fp8")


def _msamp(level: str, summary: str, weights: str, *, exact: bool) -> Level:
    """One of MS-AMP's levels, with its own formats (one power-of-two scale per tensor) or with ours."""
    gradients, first, second = (
        ("e4m3", "e4m3", "fp16_scaled") if exact else ("e4m3_tensor", "e4m3_tensor", "fp16_tensor")
    )
    moments = {} if level == "o1" else {"exp_avg": first, "exp_avg_sq": second}
    return Level(
        f"msamp-{level}{'-exact' if exact else ''}",
        f"MS-AMP {level.upper()}: {summary}" + ("; exact scales, per 128 values where in FP8" if exact else ""),
        "fp8_msamp",
        _MSAMP_GEMM,
        optimizer=OptimizerPolicy.model_validate({"weights": weights, "gradients": gradients, **moments}),
        communication=_FP8_COMMUNICATION,
    )


#: MS-AMP's levels as the package stores them, whose first moment stalls under steady gradients; and with our scales.
_MSAMP_LEVELS = tuple(
    _msamp(name, summary, weights, exact=exact)
    for exact in (False, True)
    for name, summary, weights in (
        ("o1", "FP8 GEMMs, FP8 weight gradients and communication, scaled FP16 weights", "fp16_scaled"),
        ("o2", "O1 with a first moment in FP8 and a second moment in scaled FP16", "fp16_scaled"),
        ("o3", "O2 with FP8 weights and scaled FP16 masters", "e4m3_master"),
    )
)


def _level(name: str, summary: str, recipe: str, **changes: Any) -> Level:
    return Level(name, summary, recipe, BUILTIN_RECIPES[recipe], **changes)


#: Every level, by the name search spaces and presets use.
LEVELS: dict[str, Level] = {
    made.name: made
    for made in (
        _level(
            "amp-fp16",
            "autocast to FP16 with dynamic loss scaling; weights and state FP32",
            "fp16",
            activations="fp16",
            loss_scaling="dynamic",
        ),
        _level("apex-o0", "apex O0: everything FP32", "fp32", activations="keep"),
        *(
            _level(
                f"apex-{name}",
                f"apex {name.upper()}: {what}, dynamic loss scaling; weights and state FP32",
                "fp16",
                activations="fp16",
                loss_scaling="dynamic",
            )
            for name, what in (
                ("o1", "autocast to FP16"),
                ("o2", "an FP16 model with FP32 masters (softmax and losses stay in FP32 here)"),
            )
        ),
        _level(
            "apex-o3",
            "apex O3: FP16 weights without masters or loss scaling (weights are scaled here: unscaled ones underflow)",
            "fp16",
            activations="fp16",
            optimizer=OptimizerPolicy(weights="fp16_scaled"),
        ),
        _level("amp-bf16", "autocast to BF16; weights and state FP32", "bf16"),
        _level("te", "Transformer Engine: FP8 GEMMs with delayed scaling; weights and state FP32", "fp8_delayed"),
        *_MSAMP_LEVELS,
        _level(
            "bf16-kahan",
            "BF16 weights with Kahan compensation instead of FP32 masters; BF16 gradients, FP32 state",
            "bf16",
            optimizer=OptimizerPolicy(weights="bf16_kahan", gradients="bf16"),
            communication=CommunicationPolicy(gradients="bf16"),
        ),
        _level(
            "bf16-sr",
            "BF16 weights rounded stochastically, no master; BF16 gradients, FP32 state",
            "bf16",
            optimizer=OptimizerPolicy(weights="bf16_stochastic", gradients="bf16"),
            communication=CommunicationPolicy(gradients="bf16"),
        ),
        _level(
            "bf16-sr-fp8",
            "BF16 weights rounded stochastically with O2's state and FP8 gradients: O2's bytes without FP8 GEMMs",
            "bf16",
            optimizer=OptimizerPolicy(
                weights="bf16_stochastic", gradients="e4m3", exp_avg="e4m3", exp_avg_sq="fp16_scaled"
            ),
            communication=_FP8_COMMUNICATION,
        ),
    )
}


def level(name: str) -> Level:
    """Return a level by name.

    Raises:
        UnknownNameError: with the nearest valid name.
    """
    try:
        return LEVELS[name]
    except KeyError:
        raise UnknownNameError("level", name, LEVELS) from None
