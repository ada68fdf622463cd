"""Quantisation recipes: how the operands of one GEMM are rounded, scaled and accumulated.

A linear layer runs three GEMMs in training, named as Transformer Engine names them:

=======  ==================================  ========================
GEMM     computes                            operands
=======  ==================================  ========================
fprop    output      = input  @ weight.T     input, weight
dgrad    grad_input  = grad_output @ weight  grad_output, weight
wgrad    grad_weight = grad_output.T @ input grad_output, input
=======  ==================================  ========================

A recipe applies to one GEMM; a layer may use a different one for each. Fields that do not apply to a format are
refused rather than ignored: a parameter that changes nothing must never be searched.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from autoprec.support.validation import Frozen

Gemm = Literal["fprop", "dgrad", "wgrad"]
Operand = Literal["input", "weight", "grad_output"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
OPERANDS: tuple[Operand, ...] = ("input", "weight", "grad_output")
GEMM_OPERANDS: dict[Gemm, tuple[Operand, Operand]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
#: The reserved recipe name for "as the script wrote it".
KEEP = "keep"
#: What a run without a policy is called, where nobody says otherwise.
AS_WRITTEN = "the script as written"

Eight = Literal["e4m3", "e5m2"]
Sums = Literal["full", "fast"]
_SCALED = ("fp8", "mxfp8", "nvfp4", "int8")


#: What only delayed scaling has, and its defaults.
_DELAYED = {"margin": 0, "amax_history_len": 16, "amax_compute_algo": "max"}


class Scaling(Frozen):
    """How scales are chosen for ``fp8`` and ``int8``; MXFP8 and NVFP4 carry their scaling in the format.

    ``block`` is DeepSeek-V3's scheme: 1x128 tiles of input and grad_output, 128x128 blocks of weight
    (arXiv 2412.19437, section 3.3). ``delayed`` takes the scale from the last ``amax_history_len`` steps
    (Transformer Engine's ``DelayedScaling``), per tensor only.
    """

    granularity: Literal["tensor", "row", "block"] = Field("tensor", description="how many values share one scale")
    scale: Literal["current", "delayed"] = Field("current", description="from this tensor, or from past steps")
    power_of_2: bool = Field(False, description="round scales down to a power of two (exact rescaling)")
    margin: int = Field(0, ge=-8, le=8, description="delayed: divide the scale by 2**margin")
    amax_history_len: int = Field(16, ge=1, le=4096, description="delayed: optimizer steps of amax history")
    amax_compute_algo: Literal["max", "most_recent"] = Field("max", description="delayed: which amax of the history")
    amax_epsilon: float = Field(0.0, ge=0.0, le=1.0, description="lower bound of amax, against all-zero tensors")

    @model_validator(mode="after")
    def _delayed_only(self) -> Scaling:
        if self.scale == "delayed" and self.granularity != "tensor":
            raise ValueError("delayed scaling exists per tensor only: set granularity: tensor, or scale: current")
        if self.scale == "current":
            for name, default in _DELAYED.items():
                if getattr(self, name) != default:
                    raise ValueError(f"{name} has an effect with scale: delayed only; remove it")
        return self


class Operands(Frozen):
    """The 8-bit format of each operand; E5M2 has more range, E4M3 more precision."""

    input: Eight = "e4m3"
    weight: Eight = "e4m3"
    grad_output: Eight = "e4m3"


class Accumulation(Frozen):
    """How each GEMM of a layer accumulates, where they differ: torchao and Transformer Engine have fprop alone fast."""

    fprop: Sums = "full"
    dgrad: Sums = "full"
    wgrad: Sums = "full"


#: The formats that a field of a recipe is for.
_FORMATS_WITH = {
    "scaling": ("fp8", "int8"),
    "operands": ("fp8", "mxfp8"),
    "accumulation": ("fp8",),
    "output": ("bf16", "fp16"),
    "hadamard": ("nvfp4",),
    "stochastic_rounding": ("nvfp4", "int8"),
    "weight_2d": ("nvfp4",),
}


class Recipe(Frozen):
    """One quantisation recipe.

    ``int8`` multiplies integers and sums them exactly, in all three GEMMs or in some: a scale a row as torchao's
    int8 mixed-precision training, where each operand is cast for each sum, or a scale a tensor, where one cast serves
    both. SwitchBack (arXiv 2304.13013) leaves wgrad in 16 bits; Jetfire (arXiv 2403.12422) runs all three, as here,
    with finer scales. ``stochastic_rounding`` rounds grad_output so that its expectation is exact (torchao's default).

    ``accumulation: fast`` asks for Hopper's limited-precision accumulator (``use_fast_accum``,
    ``use_split_accumulator=False``); ``full`` for FP32 accumulation; ``{fprop: fast}`` names the GEMMs that are fast.
    ``output: fp32`` is for the head: its GEMM runs on 16-bit operands and returns the FP32 accumulator, so that the
    loss reads logits that were never rounded.
    """

    format: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4", "int8"]
    scaling: Scaling | None = Field(None, description="fp8 and int8 only")
    operands: Operands | None = Field(None, description="fp8 and mxfp8 only")
    accumulation: Sums | Accumulation = Field("full", description="fp8 only; of all GEMMs, or by GEMM")
    output: Literal["keep", "fp32"] = Field(
        "keep", description="bf16 and fp16: fp32 returns fprop's FP32 sums unrounded"
    )
    hadamard: bool = Field(False, description="nvfp4 only: random Hadamard transform of the wgrad operands")
    stochastic_rounding: bool = Field(False, description="nvfp4 and int8: round grad_output stochastically")
    weight_2d: bool = Field(False, description="nvfp4 only: 16x16 scales for the weight")

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = dict(data)
            if data.get("format") in ("fp8", "int8") and data.get("scaling") is None:
                data["scaling"] = {"granularity": "row"} if data["format"] == "int8" else {}
            if data.get("format") in ("fp8", "mxfp8") and data.get("operands") is None:
                data["operands"] = {}
            if isinstance(data.get("accumulation"), dict):
                same = {data["accumulation"].get(gemm, "full") for gemm in GEMMS}
                if data["accumulation"].keys() <= set(GEMMS) and len(same) == 1:
                    data["accumulation"] = same.pop()
        return data

    @model_validator(mode="after")
    def _fields_that_apply(self) -> Recipe:
        for name, formats in _FORMATS_WITH.items():
            if self.format not in formats and getattr(self, name) != _WITHOUT[name]:
                known = " or ".join(formats)
                raise ValueError(f"{name} has no effect with format: {self.format}, only with {known}; remove it")
        kind = None if self.scaling is None else (self.scaling.granularity, self.scaling.scale)
        if self.format == "int8" and kind not in (("row", "current"), ("tensor", "current")):
            raise ValueError("int8 has current scaling with granularity row or tensor only")
        if self.operands is not None:
            for gemm, (a, b) in GEMM_OPERANDS.items():
                if getattr(self.operands, a) == getattr(self.operands, b) == "e5m2":
                    raise ValueError(f"{gemm} would multiply e5m2 by e5m2, which no GPU runs: make {a} or {b} e4m3")
        return self

    @property
    def scaled(self) -> bool:
        """True when operands are quantised with scales (8 bits or fewer)."""
        return self.format in _SCALED

    @property
    def wide_output(self) -> bool:
        """True when fprop returns FP32, which autocast would not narrow either."""
        return self.format in ("fp32", "tf32") or self.output == "fp32"

    def of_gemm(self, gemm: Gemm) -> Recipe:
        """Return the recipe as one GEMM runs it: with one word for how that accumulates."""
        if isinstance(self.accumulation, str):
            return self
        return self.model_copy(update={"accumulation": getattr(self.accumulation, gemm)})

    def backward(self) -> Recipe:
        """Return the recipe of dgrad and wgrad: gradients have the dtype of what they are of."""
        return self.model_copy(update={"output": "keep"}) if self.output == "fp32" else self

    def operand_format(self, operand: Operand) -> str:
        """Return the number format (a key of ``formats.FORMATS``) in which ``operand`` is multiplied."""
        if self.operands is not None:
            return str(getattr(self.operands, operand))
        return "e2m1" if self.format == "nvfp4" else self.format

    def canonical(self, steps: int = 0) -> Recipe:
        """Return the one recipe that stands for all that compute the same in a run of so many steps (0: any number).

        Where the latest amax counts, the history has no length; one that is longer than the run never forgets.
        """
        scaling = self.scaling
        if scaling is None or scaling.scale != "delayed":
            return self
        length = min(scaling.amax_history_len, steps) if steps else scaling.amax_history_len
        algorithm = "most_recent" if length == 1 else scaling.amax_compute_algo
        length = 1 if algorithm == "most_recent" else length
        same = scaling.model_copy(update={"amax_history_len": length, "amax_compute_algo": algorithm})
        return self.model_copy(update={"scaling": same})

    def to_dict(self) -> dict[str, Any]:
        """Return the plain-data form: everything that has an effect is spelled out, nothing else is."""
        out = self.model_dump(exclude_defaults=True, exclude={"scaling", "operands"})
        if self.scaling is not None:
            left_out = set() if self.scaling.scale == "delayed" else set(_DELAYED)
            left_out |= set() if self.scaling.amax_epsilon else {"amax_epsilon"}
            out["scaling"] = self.scaling.model_dump(exclude=left_out)
        if self.operands is not None:
            out["operands"] = self.operands.model_dump()
        return out

    def describe(self) -> str:
        """Return a short name a person recognises, such as ``fp8 row e4m3/e4m3/e4m3``; fast accumulation is named."""
        if self.format == "fp8" and self.scaling is not None and self.operands is not None:
            kind = "delayed" if self.scaling.scale == "delayed" else self.scaling.granularity
            fast = "" if self.accumulation == "full" else " fast"
            if isinstance(self.accumulation, Accumulation):
                fast += " " + "+".join(gemm for gemm in GEMMS if getattr(self.accumulation, gemm) == "fast")
            return f"fp8 {kind} {self.operands.input}/{self.operands.weight}/{self.operands.grad_output}{fast}"
        if self.format == "int8" and self.scaling is not None:
            whole = " tensor" if self.scaling.granularity == "tensor" else ""
            return f"int8{whole}{' stochastic' if self.stochastic_rounding else ''}"
        return f"{self.format} -> fp32" if self.output == "fp32" else self.format


#: What such a field is in a recipe of another format: its default.
_WITHOUT = {name: Recipe.model_fields[name].default for name in _FORMATS_WITH}


def _fp8(granularity: str = "tensor", grad: str = "e4m3", **scaling: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "format": "fp8",
            "scaling": {"granularity": granularity, **scaling},
            "operands": {"input": "e4m3", "weight": "e4m3", "grad_output": grad},
        }
    )


#: Recipes that search spaces, presets and the command line name; a policy file always spells out what it uses.
BUILTIN_RECIPES: dict[str, Recipe] = {
    "fp32": Recipe(format="fp32"),
    "tf32": Recipe(format="tf32"),
    "bf16": Recipe(format="bf16"),
    "fp16": Recipe(format="fp16"),
    "bf16_fp32_output": Recipe(format="bf16", output="fp32"),
    "fp16_fp32_output": Recipe(format="fp16", output="fp32"),
    "fp8_tensorwise": _fp8("tensor", "e5m2"),
    "fp8_tensorwise_e4m3": _fp8("tensor", "e4m3"),
    "fp8_rowwise": _fp8("row", "e4m3", power_of_2=True),
    "fp8_delayed": _fp8("tensor", "e5m2", scale="delayed"),
    "fp8_block": _fp8("block", "e4m3", power_of_2=True),
    # DeepGEMM's casts clamp amax at 1e-4; Transformer Engine's default, above, does not
    "fp8_block_fp32_scales": _fp8("block", "e4m3", amax_epsilon=1e-4),
    "mxfp8": Recipe.model_validate({"format": "mxfp8"}),
    "nvfp4": Recipe(format="nvfp4", hadamard=True, stochastic_rounding=True, weight_2d=True),
    "nvfp4_plain": Recipe(format="nvfp4"),
    "int8": Recipe.model_validate({"format": "int8"}),
    "int8_tensor": Recipe.model_validate({"format": "int8", "scaling": {"granularity": "tensor"}}),
}


def by_recipe(values: dict[str, str]) -> str:
    """Return recipes by GEMM, those that share one together: ``bf16``, or ``fp8 row (fprop, dgrad), bf16 (wgrad)``."""
    gemms: dict[str, list[str]] = {}
    for gemm in GEMMS:
        if gemm in values:
            gemms.setdefault(values[gemm], []).append(gemm)
    if len(gemms) <= 1:
        return next(iter(gemms), "-")
    return ", ".join(f"{recipe} ({', '.join(names)})" for recipe, names in gemms.items())
