"""Which GEMMs of a recorded step are costed, at the recorded shapes or at the shapes of a larger model.

``--cost-scale width=16,depth=4,tokens=32`` evaluates the cost of a model whose hidden sizes are 16 times, whose
number of blocks is 4 times and whose tokens per step are 32 times those of the stand-in that was recorded; numerics
stay those of the stand-in. ``seq`` says how much of ``tokens`` is sequence length (attention grows with it again).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import lru_cache

from autoprec.errors import UsageError, nearest
from autoprec.graph.report import GraphReport, Layer

_NUMBERED = re.compile(r"(^|\.)\d+(\.|$)")


@dataclass(frozen=True, slots=True)
class CostScale:
    """Factors from the recorded model to the one whose cost is asked; 1 everywhere changes nothing."""

    width: float = 1.0
    depth: float = 1.0
    tokens: float = 1.0
    seq: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value <= 1e6:
                raise UsageError(f"cost scale {field.name}={value:g} is not a factor", fix="use a number above 0")

    @classmethod
    def parse(cls, text: str) -> CostScale:
        """Read ``width=16,depth=4,tokens=32`` (any subset, any order).

        Raises:
            UsageError: an unknown key, a key twice, or a value that is not a positive number.
        """
        known = [field.name for field in fields(cls)]
        found: dict[str, float] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            key, separator, value = part.partition("=")
            key = key.strip()
            if key not in known:
                close = nearest(key, known)
                hint = f"did you mean '{close[0]}'? " if close else ""
                raise UsageError(f"unknown cost scale '{key}'", fix=f"{hint}valid: {', '.join(known)}")
            if key in found:
                raise UsageError(f"cost scale '{key}' is given twice", fix="give it once")
            try:
                found[key] = float(value) if separator else float("nan")
            except ValueError:
                found[key] = float("nan")
            if not found[key] > 0:
                raise UsageError(f"cost scale '{part}' is not KEY=FACTOR", fix="e.g. width=16,depth=4,tokens=32")
        return cls(**found)

    @property
    def is_identity(self) -> bool:
        """True when nothing is scaled."""
        return all(getattr(self, field.name) == 1.0 for field in fields(self))

    def describe(self) -> str:
        """Return the text form; empty when nothing is scaled."""
        return ",".join(f"{f.name}={getattr(self, f.name):g}" for f in fields(self) if getattr(self, f.name) != 1.0)


@dataclass(frozen=True, slots=True)
class GemmWork:
    """The GEMMs of one layer (or of one of its calls): ``[tokens, inp] x [inp, out]`` and its two gradients.

    ``copies`` counts how often this work runs in one step: calls, batch entries apart, times repeated depth.
    ``batch`` counts entries of a batched or grouped GEMM. ``grouped`` are the entries of one grouped GEMM: experts,
    each with a share of the tokens. ``steps`` of the copies run one after the other on one weight (the state of a
    recurrent layer): their operands are cast once.
    """

    tokens: int
    inp: int
    out: int
    batch: int
    copies: float
    roles: tuple[str, ...]
    grouped: bool = False
    steps: float = 1.0

    @property
    def casts(self) -> float:
        """How often operands are cast in one step."""
        return self.copies / self.steps

    def dims(self, role: str) -> tuple[int, int, int]:
        """Return M, K, N of one role."""
        if role == "dgrad":
            return self.tokens, self.out, self.inp
        if role == "wgrad":
            return self.out, self.tokens, self.inp
        return self.tokens, self.inp, self.out

    @property
    def flops(self) -> float:
        """Floating-point operations of all three products in one step: 2 M K N each, for every copy."""
        return 2.0 * self.tokens * self.inp * self.out * self.batch * self.copies * len(self.roles)

    def elements(self, operand: str) -> float:
        """Return how many values one operand has, batch entries included."""
        if operand == "input":
            return float(self.tokens) * self.inp * self.batch
        if operand == "weight":
            return float(self.inp) * self.out * self.batch
        return float(self.tokens) * self.out * self.batch


def block_of(name: str) -> str:
    """Return the repeated block that a module sits in (``h.3.`` of ``h.3.mlp``); empty outside blocks."""
    found = _NUMBERED.search(name)
    return name[: found.end()] if found else ""


@lru_cache(maxsize=65536)
def in_block(name: str) -> bool:
    """Say whether a module sits in a repeated block: a component of its name is a number (``h.3.mlp``)."""
    return _NUMBERED.search(name) is not None


def short_dtype(text: str) -> str:
    """Return fp32, bf16, fp16 or fp64 for however a dtype is spelled; unknown means fp32."""
    lowered = text.lower()
    if "bfloat16" in lowered or "bf16" in lowered:
        return "bf16"
    if "float16" in lowered or "fp16" in lowered or "half" in lowered:
        return "fp16"
    return "fp64" if "float64" in lowered or "double" in lowered else "fp32"


def _up(value: int, factor: float) -> int:
    return max(1, round(value * factor))


def _keeps_outputs(layer: Layer, outputs: int) -> bool:
    """Say whether a layer has as many outputs in a wider model: they count something else than features."""
    return outputs == 1 or not {"head", "router", "narrow"}.isdisjoint(layer.flags)


def layer_works(layer: Layer, scale: CostScale) -> tuple[GemmWork, ...]:
    """Return the GEMMs of a layer at scaled shapes.

    Width scales both feature sizes inside repeated blocks; heads and routers keep their output size (vocabularies,
    classes and experts do not widen, nor does a single gate) and the first layer its input size. Depth repeats what
    sits in a numbered block. A recurrent layer multiplies inputs of all steps at once, and fewer rows step by step.
    """
    by_role: dict[str, list[tuple[int, int, int, int, int]]] = {}
    for gemm in layer.gemms:
        if gemm.role in ("fprop", "recompute"):
            shape = (gemm.m, gemm.k, gemm.n)
        elif gemm.role == "dgrad":
            shape = (gemm.m, gemm.n, gemm.k)
        else:  # [out, tokens] x [tokens, in]; recorders that write it transposed give the same sizes
            shape = (gemm.k, gemm.n, gemm.m)
        by_role.setdefault(gemm.role, []).append((*shape, gemm.batch, gemm.calls))
    source = next((by_role[role] for role in ("fprop", "recompute", "dgrad", "wgrad") if role in by_role), [])
    roles = tuple(role for role in ("fprop", "recompute", "dgrad", "wgrad") if role in by_role)
    block = in_block(layer.name)
    first = "first" in layer.flags and not block
    works: list[GemmWork] = []
    grouped = "grouped" in layer.flags
    most = max((row[0] for row in source), default=0)
    sequences = sum(row[4] for row in source if row[0] == most)
    for tokens, inp, out, batch, calls in source:
        if grouped:  # recorded with the tokens of all experts; each meets a weight of its own
            batch = max(1, layer.parameters // (inp * out))
            tokens = -(-tokens // batch)
        stepwise = layer.kind == "rnn" and tokens < most
        longer = scale.seq if stepwise else 1.0
        of_state = sum(row[4] for row in source if row[1:3] == (inp, out) and row[0] < most) if stepwise else 0
        works.append(
            GemmWork(
                tokens=_up(tokens, scale.tokens / longer),
                inp=inp if first and not (layer.kind == "rnn" and works) else _up(inp, scale.width),
                out=out if _keeps_outputs(layer, out) else _up(out, scale.width),
                batch=batch,
                copies=calls * (scale.depth if block else 1.0) * longer,
                roles=roles,
                grouped=grouped,
                steps=max(1.0, of_state / sequences) * longer,
            )
        )
    return tuple(works)


def scaled_parameters(report: GraphReport, scale: CostScale) -> float:
    """Return how many parameters of the scaled model one rank holds (weights by their shapes, the rest by width)."""
    total = float(report.model.get("parameters", 0)) or float(sum(layer.parameters for layer in report.layers))
    if scale.is_identity:
        return total * report.held
    known = scaled = 0.0
    for layer in report.layers:
        outputs = next((gemm.n for gemm in layer.gemms if gemm.role == "fprop"), 0)
        kept = _keeps_outputs(layer, outputs) or ("first" in layer.flags and not in_block(layer.name))
        grow = scale.width * (1.0 if kept else scale.width)
        known += layer.parameters
        scaled += layer.parameters * grow * (scale.depth if in_block(layer.name) else 1.0)
    return (scaled + max(0.0, total - known) * scale.width) * report.held
