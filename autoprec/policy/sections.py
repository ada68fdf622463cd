"""What a policy says beside its layers: operators, the optimizer, ways to compute, and what travels between ranks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from autoprec.support.validation import Frozen

OperatorPrecision = Literal["keep", "fp32"]
#: Fields of an optimizer's policy that say how it steps; the others say what is stored.
STEPPING = ("update", "products")
#: Multiplications in the smallest product that ``products`` is for, and the dtypes of its operands. Newton-Schulz of a
#: square of 160 gains nothing by bf16 on a CPU that has it, the casts included, of 192 a fifth, of 512 two thirds.
#: Without it, bf16 loses at any size (8 to 40 times slower).
PRODUCTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "bf16": (1 << 22, ("fp32",)),
    "fp32": (1 << 15, ("bf16", "fp16")),
}
#: Storage that is known to break training, with the reason a person reads (measured:
#: benchmarks/results/2026-11-22_state.json).
REFUSED_STATE: dict[tuple[str, str], str] = {
    ("weights", "bf16"): (
        "plain bf16 weights lose every update below half a unit in the last place (worst weight option measured); "
        "use bf16_kahan or bf16_stochastic"
    ),
    ("weights", "fp16"): "unscaled fp16 weights underflow; use fp16_scaled",
    ("weights", "e4m3"): "e4m3 weights without a master lose nearly every update; use e4m3_master",
    ("exp_avg", "int8_block"): "no published level stores it so; use e4m3, of about the same size",
    ("exp_avg", "fp16"): "unscaled fp16 flushes small moments to zero; use bf16 or e4m3 (scaled)",
    ("exp_avg_sq", "fp16"): "unscaled fp16 flushes most second moments to zero (71 % measured); use fp16_scaled",
    ("exp_avg_sq", "bf16"): (
        "round-to-nearest bf16 second moments stall from beta2 = 0.99 on (20x too large after a drop of the "
        "gradient); use fp16_scaled"
    ),
    ("exp_avg_sq", "e4m3"): (
        "one e4m3 scale per tensor, or a power-of-two scale, stalls the second moment and divides by epsilon; "
        "use int8_block or fp16_scaled (exact scales)"
    ),
}


class OperatorPolicy(Frozen):
    """Precision of operators beside the tunable layers; ``keep`` leaves it to the script and to ``activations``."""

    softmax: OperatorPrecision = "fp32"
    norm: OperatorPrecision = "fp32"
    embedding: OperatorPrecision = "fp32"
    loss: OperatorPrecision = "fp32"
    output: OperatorPrecision = "fp32"
    attention: Literal["keep", "fp32", "bf16", "fp16"] = Field(
        "keep", description="scaled dot-product attention (SDPA)"
    )


class OptimizerPolicy(Frozen):
    """Storage of weights, their gradients and optimizer state (bytes per value in docs/state.md), and the step.

    ``e4m3_master`` is MS-AMP O3's FP8 weight with a scaled FP16 master; the ``_tensor`` formats are MS-AMP's as well:
    one power-of-two scale per tensor. ``gradients`` is what a weight gradient is held in between backward and step.
    """

    weights: Literal["fp32", "fp16_scaled", "bf16_stochastic", "bf16_kahan", "e4m3_master"] = "fp32"
    exp_avg: Literal["fp32", "bf16", "e4m3", "e4m3_tensor"] = "fp32"
    exp_avg_sq: Literal["fp32", "fp16_scaled", "fp16_tensor", "int8_block"] = "fp32"
    gradients: Literal["fp32", "bf16", "e4m3", "e4m3_tensor"] = Field(
        "fp32", description="weight gradients between backward and step"
    )
    update: Literal["keep", "fused"] = Field(
        "keep", description="the step as the script has it, or in one kernel (torch's fused=True)"
    )
    products: Literal["keep", "bf16", "fp32"] = Field(
        "keep", description="dtype in which the step multiplies large matrices (Newton-Schulz, preconditioners)"
    )

    @property
    def stores(self) -> bool:
        """Whether anything is stored otherwise than the script does."""
        return not self.stores_as(OptimizerPolicy())

    def stores_as(self, other: OptimizerPolicy) -> bool:
        """Say whether both store alike, however they step."""
        return self.model_copy(update={name: getattr(other, name) for name in STEPPING}) == other

    @model_validator(mode="before")
    @classmethod
    def _known_to_break(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for field, value in data.items():
                reason = REFUSED_STATE.get((field, str(value)))
                if reason:
                    raise ValueError(f"{field}: {value} is refused: {reason}")
        return data


#: Classes from which on a loss in slices pays: below, the logits of some thousand tokens lie in the cache as a whole.
FEWEST_CLASSES = 4096
#: Scores of a head up to which attention is written out: of more, kernels are as fast, and they would fill the memory.
MOST_SCORES = 2**21


class ImplementationPolicy(Frozen):
    """Which of several ways torch computes a thing in; the numbers are the same but for the last bit of sums."""

    loss: Literal["keep", "chunked"] = Field(
        "keep", description=f"cross entropy over {FEWEST_CLASSES:,} classes or more, a slice of rows at a time"
    )
    attention: Literal["keep", "unfused"] = Field(
        "keep", description="scaled dot-product attention in 16 bits: torch's kernel, or two products and a softmax"
    )
    gelu: Literal["keep", "fused"] = Field(
        "keep", description="what modules compute by hand that torch has as F.gelu, by it"
    )
    layout: Literal["keep", "channels_last"] = Field(
        "keep", description="how the images and volumes lie in memory that the model is given"
    )


class CommunicationPolicy(Frozen):
    """What travels between ranks; reductions of low-precision gradients accumulate in FP32."""

    gradients: Literal["fp32", "bf16", "fp8"] = "fp32"
