"""Time of one GEMM and of the quantisation around it, on a GPU: max(compute, traffic) + launch.

After torchao's ``roofline_utils`` (GEMM = max(FLOPs / peak, bytes / bandwidth); casts = counted reads and writes per
recipe), with three additions: how full the device is (tiles against units), casts per operand and layout as Transformer
Engine and torchao run them, and a fixed cost per quantised operand, which decides small layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.cost.rates import Rates
from autoprec.cost.scale import GemmWork
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import Target, alignment, recipe_family
from autoprec.precision.recipes import BUILTIN_RECIPES, Gemm, Recipe

#: Sides of the tile of a result that one unit of the device computes, and the K beyond which units share a tile.
_TILE, _SPLIT_K = 128, 2048
#: Bytes per value, where not 1: with a byte for the scale of 32 values (MXFP8), or of 16 (NVFP4: codes of 4 bits).
_OPERAND_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp64": 8.0, "mxfp8": 1.03125, "nvfp4": 0.5625}
#: The first GEMM that uses an operand reads it along one dimension, the second along the other.
_USES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("input", ("fprop", "wgrad")),
    ("weight", ("fprop", "dgrad")),
    ("grad_output", ("dgrad", "wgrad")),
)


def operand_bytes(family: str) -> float:
    """Return bytes per value of a GEMM operand, scales included."""
    return _OPERAND_BYTES.get(family, 1.0)


def gemm_seconds(
    target: Target,
    rates: Rates,
    family: str,
    m: int,
    k: int,
    n: int,
    batch: int = 1,
    *,
    backward: bool = False,
    wide: bool = False,
) -> float:
    """Return the time of one GEMM ``[m, k] x [k, n]``; inf where none exists.

    The result has 16 bits, or 32 where the operands have or it is ``wide``.

    Args:
        target: the device.
        rates: what kernels reach of its peaks.
        family: of recipes, e.g. ``bf16``, ``fp8_row``.
        m, k, n: sizes.
        batch: products of that size in one call.
        backward: dgrad or wgrad: scales are not applied apart.
        wide: whether the result has 32 bits.
    """
    peak, capability = target.peak(family), target.recipes.get(family)
    if not peak or (capability is not None and not capability.ok):
        return float("inf")
    tiles = -(-m // _TILE) * -(-n // _TILE) * batch * max(1.0, k / _SPLIT_K)
    fill = tiles / (tiles + 0.5 * target.units)
    compute = 2.0 * m * k * n * batch / (peak * rates.gemm.get(family, 0.6) * fill)
    size = operand_bytes(family)
    written = 4.0 if wide or family in ("fp32", "tf32") else 2.0
    moved = batch * (size * (m * k + k * n) + written * m * n)
    scaling = 0.0 if backward else batch * m * n * rates.epilogue.get(family, 0.0)
    speed = target.bandwidth * rates.bandwidth
    return max(compute, moved / speed) + scaling / speed + rates.launch_us * 1e-6


def _padded(size: int, family: str) -> int:
    """Return a size of a GEMM as the backends run it: with zeros up to the multiple that the kernels of 8 bits need."""
    multiple = alignment(family)
    return -(-size // multiple) * multiple


def cast_traffic(
    family: str, uses: tuple[int, ...], source: float, *, layouts: int, weight: bool = False, library: bool = True
) -> tuple[float, int]:
    """Return bytes moved per value and the number of kernels that quantise one operand.

    Args:
        uses: which of the operand's two reduction dimensions are used: (0,), (1,) or (0, 1).
        source: bytes per value of the high-precision operand.
        layouts: copies that the architecture's GEMM needs of a per-tensor 8-bit operand with two uses.
        weight: its two casts lie in different passes, so the column cast shares no read with the row cast and
            transposes on its own (as counted by torchao's ``roofline_utils``).
        library: cast by a library's own kernels. Casts compiled by torch write both layouts on every architecture
            (``torch._scaled_mm`` is called with operands contiguous along K), and MX blocks along rows and along
            columns are separate kernels (torchao).
    """
    count = len(uses)
    copies = float(min(count, layouts if library else 2))
    if family == "fp8_tensor":  # amax pass, then cast (and transpose)
        return source + source + copies, 2
    if family == "fp8_delayed":  # the scale is known: one pass with the amax on the way; then history and next scale
        return source + copies, 2
    if family in ("fp8_row", "int8"):  # along the row: one fused pass; along the column: amax pass + cast
        along_row, along_column = int(0 in uses), int(1 in uses)
        column = 2 * source + 1.0 + (2.0 if weight else 0.0)
        return along_row * (source + 1.0) + along_column * column, along_row + 2 * along_column
    if family == "fp8_block":  # one pass writes both layouts, scales are 4 bytes per 128
        return source + count * (1.0 + 4.0 / 128), 1
    if family == "mxfp8":  # one pass writes both layouts; a small kernel arranges the scales
        return source * (1 if library else count) + count * (1.0 + 1.0 / 32), 2
    if family == "nvfp4":  # amax pass, then cast with Hadamard and rounding
        return 2 * source + count * (0.5 + 1.0 / 16), 3
    return 0.0, 0


#: Operators per use of an operand that uncompiled casts launch on a GPU where no kernel of ours fuses them, counted by
#: `benchmarks/results/2026-11-23_gpu_ready.md`; GEMMs and the bias apart.
_EAGER_OPERATORS = {"int8": 28, "mxfp8": 34}


#: The same of MXFP8 tokens of experts, whose groups are padded and whose scales are arranged group by group: along
#: their rows, and for sums over each expert's rows; and kernels per use that a compiler makes of an operand.
_GROUPED_MX_OPERATORS, _GROUPED_MX_KERNELS = (57, 100), 3

#: What launching an eager layer whose casts are compiled by themselves takes the host beside its kernels, in operators:
#: 2.0 to 2.5 ms a linear in FP8 where an operator takes 10.9 us, fprop to wgrad (an H100's host, 2026-11-27).
_EAGER_LAYER, _COMPILED_CASTS = 180, ("fp8_tensor", "fp8_row", "fp8_block")


def grouped_traffic(
    family: str, uses: tuple[int, ...], source: float, *, weight: bool, eager: bool
) -> tuple[float, int]:
    """Return bytes moved per value and kernels launched that cast one operand of a grouped GEMM (``backends.experts``).

    Along its rows as any operand with row scales. For the sum over an expert's rows by one kernel that reads them twice
    and pads them; in a compiled graph weights, whose groups are known, are left to the compiler. MXFP8 has no
    kernels of its own.

    Args:
        family: of recipes, e.g. ``fp8_row``.
        uses: axes along which the operand is summed: 0, 1 or both.
        source: bytes per value that are read.
        weight: whether the operand is the weights.
        eager: whether no compiler fuses casts.
    """
    along_row, along_column = int(0 in uses), int(1 in uses)
    if family == "mxfp8":
        if not eager:
            return cast_traffic(family, uses, source, layouts=2)[0], len(uses) * _GROUPED_MX_KERNELS
        moved, launched = eager_traffic(family, uses, source)
        row, column = _GROUPED_MX_OPERATORS
        return moved, launched if weight else along_row * row + along_column * column
    compiled = cast_traffic("fp8_row", uses, source, layouts=2, weight=weight)
    if eager:
        return (along_row + along_column) * (2 * source + 1.0), 2 * along_row + along_column
    return compiled if weight else (compiled[0], along_row + along_column)


def eager_traffic(family: str, uses: tuple[int, ...], source: float) -> tuple[float, int]:
    """Return bytes moved per value and kernels launched where no compiler fuses the casts of one operand.

    FP8 goes through ``backends.casts``: once over the operand for its magnitudes (not for blocks), once per layout.
    Delayed scales and other formats are cast operator by operator: a cast reads and writes float32
    for widening, scaling and rounding, and its magnitudes are written as well.

    Args:
        family: of recipes, e.g. ``fp8_row``.
        uses: axes along which the operand is summed: 0, 1 or both.
        source: bytes per value that are read.
    """
    count = len(uses)
    if family in ("fp8_tensor", "fp8_row"):
        return 2 * source + count, 2
    if family == "fp8_block":
        return source + count, 1
    cast = (source + 4.0 if source < 4 else 0.0) + 8.0 + 5.0
    return count * (3 * source + cast), count * _EAGER_OPERATORS.get(family, 34)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of one layer in one step, split into GEMMs and casts, with its kernel count and GEMM error."""

    gemm: float
    cast: float
    kernels: float
    error: float

    @property
    def seconds(self) -> float:
        """Seconds of the layer's GEMMs and casts in one step."""
        return self.gemm + self.cast


def _source_bytes(operand: str, activations: str, script: str) -> float:
    if operand == "weight":
        return 2.0 if script in ("bf16", "fp16") and activations == "keep" else 4.0
    return 2.0 if (script if activations == "keep" else activations) in ("bf16", "fp16") else 4.0


def kept_family(activations: str, script: str) -> str:
    """Return the family in which a layer without a recipe runs."""
    return script if activations == "keep" else activations


def operand_cast(
    target: Target,
    rates: Rates,
    recipe: Recipe,
    elements: float,
    uses: tuple[int, ...],
    source: float,
    *,
    fused: bool = False,
    weight: bool = False,
    eager: bool = False,
    grouped: bool = False,
) -> tuple[float, int]:
    """Return the seconds to cast one operand to a recipe's format, and how many kernels that takes.

    Args:
        uses: which of the operand's two reduction dimensions are used: (0,), (1,) or (0, 1).
        source: bytes per value in high precision; nothing is cast when the operand has the format already.
        fused: the operator before writes the codes itself (a norm or activation fused with the cast), so one read
            of the source and one kernel are spared.
        weight: the operand is a weight, see :func:`cast_traffic`.
        eager: nobody fuses the cast, see :func:`eager_traffic`.
        grouped: the operand is one of a grouped GEMM, see :func:`grouped_traffic`.
    """
    family = recipe_family(recipe)
    if recipe.scaled:
        moved, kernels = cast_traffic(
            family, uses, source, layouts=target.layouts, weight=weight, library=rates.library
        )
        fixed = rates.quantise_us.get(family, 5.0) * 1e-6
        if grouped:
            moved, kernels = grouped_traffic(family, uses, source, weight=weight, eager=eager)
        elif eager:
            moved, kernels = eager_traffic(family, uses, source)
        if eager:
            fixed = max(fixed, kernels * rates.launch_us * 1e-6)
        if fused:
            moved, fixed = moved - source, fixed * (1.0 - 1.0 / kernels)
        speed = rates.cast.get(family, 0.5) * (rates.eager_casts.get(family, 1.0) if eager else 1.0)
        return elements * moved / (target.bandwidth * speed) + fixed, kernels
    size = operand_bytes(family)
    if size >= source:
        return 0.0, 0
    return elements * (source + size) / (target.bandwidth * rates.bandwidth) + rates.launch_us * 1e-6, 1


def layer_cost(
    target: Target,
    rates: Rates,
    work: GemmWork,
    plan: LayerPlan,
    *,
    activations: str = "keep",
    script: str = "fp32",
    weight_reuse: float = 1.0,
    input_reuse: float = 1.0,
    fused: bool = False,
    eager: bool = False,
) -> LayerCost:
    """Return the time of one layer's GEMMs and casts under a plan.

    Args:
        plan: a recipe per GEMM; ``None`` runs in the dtype of the script or of ``activations``.
        activations: autocast dtype around the model, or keep.
        script: dtype in which the script itself runs this layer.
        weight_reuse: how many calls share one cast of the weight (gradient accumulation with cached casts).
        input_reuse: how many layers share one cast of the input (q, k and v in a compiled step).
        fused: the operator before the layer writes the quantised input itself.
        eager: casts are this package's own and no compiler fuses them.
    """
    kept = kept_family(activations, script)
    gemm_time = error = 0.0
    recipes: dict[str, Recipe | None] = {}
    for role in work.roles:
        gemm: Gemm = "fprop" if role == "recompute" else role  # type: ignore[assignment]
        recipe = plan.recipe(gemm)
        family = kept if recipe is None else recipe_family(recipe)
        backward = gemm != "fprop"
        m, k, n = (_padded(size, family) for size in work.dims(role))
        wide = recipe is not None and recipe.wide_output
        seconds = gemm_seconds(target, rates, family, m, k, n, batch=work.batch, backward=backward, wide=wide)
        gemm_time += seconds
        error += seconds * rates.error.get(family, 0.2)
        if recipe is None and activations != "keep":
            recipe = BUILTIN_RECIPES[activations]
        recipes[gemm] = recipe
    cast = kernels = 0.0
    for operand, gemms in _USES:
        wanted: dict[Recipe, tuple[int, ...]] = {}
        for index, name in enumerate(gemms):
            chosen = recipes.get(name)
            if chosen is not None:
                wanted[chosen] = (*wanted.get(chosen, ()), index)
        source = _source_bytes(operand, activations, script)
        share = 1.0 / {"weight": weight_reuse, "input": input_reuse}.get(operand, 1.0)
        for chosen, uses in wanted.items():
            spent, count = operand_cast(
                target,
                rates,
                chosen,
                work.elements(operand),
                uses,
                source,
                fused=fused and operand == "input" and 0 in uses,
                weight=operand == "weight",
                eager=eager,
                grouped=work.grouped,
            )
            cast += spent * share
            kernels += count * share
    launched = len(work.roles)
    if eager and any(recipe is not None and recipe_family(recipe) in _COMPILED_CASTS for recipe in recipes.values()):
        launched += _EAGER_LAYER
    if work.grouped:  # each product is prepared by a small kernel of its own
        gemm_time += len(work.roles) * rates.launch_us * 1e-6
        kernels += len(work.roles)
    return LayerCost(
        gemm=gemm_time * work.copies,
        cast=cast * work.casts,
        kernels=kernels * work.casts + launched * work.copies,
        error=error / gemm_time if gemm_time else 0.2,
    )
