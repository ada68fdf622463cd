"""The ``deepgemm`` backend: FP8 in blocks through DeepSeek's kernels.

DeepGEMM multiplies what its caller has cast (https://github.com/deepseek-ai/DeepGEMM, 2.1 to 2.6). Casts are ours, so
that scales follow the recipe: those of its ``utils`` clamp amax at 1e-4 always, ours where ``amax_epsilon`` says so.

=============  =====================  =======================================================================
GEMM           scales                 ``fp8_gemm_nt``
=============  =====================  =======================================================================
fprop, dgrad   1x128, 128x128 weight  ``recipe=(1, 128, 128)``, returns bfloat16
wgrad          1x128, 1x128           ``recipe=(1, 1, 128)``, float32; on compute capability 9.0 added to zeros
=============  =====================  =======================================================================

Scales are float32 on 9.0, which the library lays out as its TMA loads want them; on 10.x it packs them to UE8M0, so
they must be powers of two. Kernels are compiled the first time (nvcc), for the sizes of features, not of tokens. Sums
are kept in float32 every 128 values, which is ``accumulation: full``. Not run on a GPU yet.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.backends.base import Backend, feature_sizes
from autoprec.backends.library import BLOCK, block_execution, block_refusal, is_block
from autoprec.backends.scaled_mm import block_squares, block_tiles
from autoprec.errors import MissingDependencyError
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.operand import QuantizedOperand
from autoprec.numerics.plan import GemmStep, multiply_emulated
from autoprec.policy import LayerPlan
from autoprec.precision.hardware import Capability
from autoprec.precision.recipes import Gemm, Recipe
from autoprec.support.optional import require


@functools.cache
def _library() -> Any:
    """Return DeepGEMM, asked for once: its version is read from files, which is too slow for every product."""
    return require("deep_gemm", purpose="backend 'deepgemm'")


def _deep_gemm(left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, square: bool) -> Tensor:
    """Multiply codes ``[M, K]`` by ``[N, K]``; squares return bfloat16, tiles float32."""
    library = _library()
    shape, device = (left.shape[0], right.shape[0]), left.device
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    if not hopper:  # what packs scales to UE8M0 stops at NaN, and packs infinity to UE8M0's NaN
        scale_left, scale_right = (s.nan_to_num(nan=torch.inf, posinf=torch.inf) for s in (scale_left, scale_right))
    a, b = (left, scale_left), (right, scale_right)
    if square:
        out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        library.fp8_gemm_nt(a, b, out, recipe=(1, BLOCK, BLOCK))
        return out
    # Hopper's kernel adds to what is there
    out = (torch.zeros if hopper else torch.empty)(shape, dtype=torch.float32, device=device)
    library.fp8_gemm_nt(a, b, out, c=out if hopper else None, recipe=(1, 1, BLOCK), compiled_dims="mn")
    return out


@torch.library.custom_op("autoprec::deep_gemm", mutates_args=())
def _deep_gemm_in_a_graph(left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, square: bool) -> Tensor:
    """:func:`_deep_gemm` in a compiled graph, of bytes."""
    first, second = (x.view(torch.float8_e4m3fn) for x in (left, right))
    return _deep_gemm(first, second, scale_left, scale_right, square)


@_deep_gemm_in_a_graph.register_fake
def _deep_gemm_shape(left: Tensor, right: Tensor, _scale_left: Tensor, _scale_right: Tensor, square: bool) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=torch.bfloat16 if square else torch.float32)


def _multiply(a: QuantizedOperand, b: QuantizedOperand, step: GemmStep, out_dtype: torch.dtype) -> Tensor:
    if a.codes.numel() == 0 or b.codes.numel() == 0:
        return multiply_emulated(a, b, step, out_dtype)
    left, scale_left = block_tiles(a, step.axes[0])
    right, scale_right = (block_squares if b.spec.square else block_tiles)(b, step.axes[1])
    if torch.compiler.is_compiling():
        codes = [x.view(torch.uint8) for x in (left, right)]
        out: Tensor = torch.ops.autoprec.deep_gemm(*codes, scale_left, scale_right, b.spec.square)
    else:
        out = _deep_gemm(left, right, scale_left, scale_right, b.spec.square)
    rows = a.rows if step.axes[0] == 1 else a.columns
    columns = b.rows if step.axes[1] == 1 else b.columns
    return out[:rows, :columns].to(out_dtype)


class DeepGemmBackend(Backend):
    """DeepGEMM's block products on Hopper and Blackwell."""

    name = "deepgemm"
    experimental = frozenset({"cuda"})

    def available(self, device: str) -> Capability:
        """Say whether there is a GPU, and DeepGEMM can be imported."""
        if not device.startswith("cuda") or not torch.cuda.is_available():
            return Capability(False, "DeepGEMM runs on NVIDIA GPUs only")
        try:
            require("deep_gemm", purpose="backend 'deepgemm'")
        except MissingDependencyError as error:
            return Capability(False, f"{error.what}; {error.fix}")
        return Capability(True, "DeepGEMM's products of FP8 in blocks")

    def capability(self, recipe: Recipe, *, gemm: Gemm, m: int, k: int, n: int, device: str) -> Capability:
        """Say whether DeepGEMM runs one GEMM under a recipe; 0 stands for a size not known yet."""
        if not is_block(recipe):
            if not recipe.scaled:
                return Capability(True, "plain casts are torch's")
            return Capability(False, f"DeepGEMM multiplies FP8 in blocks here, not {recipe.describe()}")
        if not (found := self.available(device)):
            return found
        major, minor = torch.cuda.get_device_capability(device)
        if major not in (9, 10):
            return Capability(False, f"DeepGEMM needs compute capability 9.0 or 10.x, this device has {major}.{minor}")
        if major == 10 and recipe.scaling is not None and not recipe.scaling.power_of_2:
            return Capability(False, "DeepGEMM takes scales that are powers of two only on compute capability 10.x")
        refusal = block_refusal(recipe, gemm, feature_sizes(gemm, m, k, n))
        return Capability(False, refusal) if refusal else Capability(True, "deep_gemm.fp8_gemm_nt")

    def bind(self, plan: LayerPlan, module: nn.Module, *, name: str, seed: int) -> LinearExecution:
        """Return an execution whose block products are DeepGEMM's.

        Raises:
            UnsupportedError: the plan has other scaled GEMMs.
        """
        del module, name
        return block_execution(plan, _multiply, seed=seed, backend=self.name)
