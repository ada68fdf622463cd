"""Layers of experts, and what torch's grouped GEMMs compute, group by group; no GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoprec.backends.native import NativeBackend
from autoprec.numerics.linear import LinearExecution
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES

BF16, ROWWISE, MX = (BUILTIN_RECIPES[name] for name in ("bf16", "fp8_rowwise", "mxfp8"))
ENDS = [10, 10, 43, 90, 97]  # an expert without tokens, sizes that no kernel likes, four tokens of nobody


def native(plan: LayerPlan) -> LinearExecution:
    return NativeBackend().bind(plan, torch.nn.Identity(), name="experts", seed=0)


def step(
    layer: LinearExecution, x: Tensor, weight: Tensor, gradient: Tensor, *, turned: bool = False, ends: Any = None
) -> tuple[Tensor, ...]:
    """Return what a layer gives for the tokens of experts, and both gradients."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    stops = torch.tensor(ENDS if ends is None else ends, dtype=torch.int32)
    last = int(stops[-1])
    out = layer.grouped(x, weight if turned else weight.transpose(1, 2), stops)
    out[:last].backward(gradient[:last])
    assert x.grad is not None
    assert weight.grad is not None
    return out.detach()[:last], x.grad[:last], weight.grad


def reference(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """What ``torch._scaled_grouped_mm`` computes, group by group; where it goes wrong on a GPU it does so here."""
    held = [x.to("meta") for x in (a, b, scale_a, scale_b, offs)]
    shape: Any = torch.ops.aten._scaled_grouped_mm.default(*held, bias, scale_result, out_dtype, use_fast_accum)
    if scale_a.dtype is torch.float8_e8m0fnu:
        return _mx_reference(a, b, scale_a, scale_b, offs, torch.full(shape.shape, torch.nan, dtype=out_dtype))
    assert a.shape[-1] % 16 == b.shape[-1] % 16 == b.shape[-2] % 16 == 0
    out, start = torch.full(shape.shape, torch.nan, dtype=out_dtype), 0
    for group, end in enumerate(offs.tolist()):
        if b.ndim == 3:
            product = a[start:end].float() @ b[group].float()
            out[start:end] = (product * scale_a[start:end, None] * scale_b[group]).to(out.dtype)
        else:
            assert end > start, "the kernel takes no empty sum"
            assert (end - start) % 16 == 0
            product = a[:, start:end].float() @ b[start:end].float()
            rows, columns = (x.view(len(offs), -1)[group] for x in (scale_a, scale_b))
            out[group] = (product * rows[:, None] * columns).to(out.dtype)
        start = end
    return out


def _untiled(tiles: Tensor, outer: int, groups: int) -> Tensor:
    """Read scales ``[outer, groups]`` where cuBLAS's documentation puts them: tiles of 128 x 4, outer by outer."""
    o, g = torch.arange(outer).unsqueeze(1), torch.arange(groups)
    place = (o // 128 * -(-groups // 4) + g // 4) * 512 + o % 32 * 16 + o % 128 // 32 * 4 + g % 4
    return tiles.float()[place].repeat_interleave(32, 1)


def _mx_reference(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, out: Tensor) -> Tensor:
    """Multiply as MSLK's kernel does, each group's scales where its ``set_grouped_gemm_args_kernel`` begins them."""
    assert a.is_contiguous()
    assert b.transpose(-2, -1).is_contiguous()
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    assert scale_a.shape[0] >= a.shape[0]  # both checked by GroupedBlas.cpp
    assert b.ndim == 3 or scale_b.shape[0] >= b.shape[1]
    assert offs[-1] <= a.shape[1 if b.ndim == 2 else 0]
    up = lambda size, multiple: -(-size // multiple) * multiple  # noqa: E731
    flat_a, flat_b, start, at_a, at_b = scale_a.view(-1), scale_b.view(-1), 0, 0, 0
    for group, end in enumerate(offs.tolist()):
        if b.ndim == 3:
            k, wide = a.shape[1], up(a.shape[1] // 32, 4)
            left = a[start:end].float() * _untiled(flat_a[at_a:], end - start, k // 32)
            right = b[group].float() * _untiled(flat_b[group * up(b.shape[2], 128) * wide :], b.shape[2], k // 32).t()
            out[start:end] = (left.bfloat16() @ right.bfloat16()).to(out.dtype)
            at_a += up(end - start, 128) * wide
        elif end > start:  # the kernel leaves the result of an empty sum as it is
            assert (end - start) % 32 == 0
            wide = (end - start) // 32
            left = a[:, start:end].float() * _untiled(flat_a[at_a:], a.shape[0], wide)
            right = b[start:end].float() * _untiled(flat_b[at_b:], b.shape[1], wide).t()
            out[group] = (left.bfloat16() @ right.bfloat16()).to(out.dtype)
            at_a += up(a.shape[0], 128) * up(wide, 4)
            at_b += up(b.shape[1], 128) * up(wide, 4)
        start = end
    return out
