"""A linear layer whose weight is sharded (tensor parallelism): each rank runs its recipe on its part of the weight.

``parallelize_module`` makes weights and their layers' inputs DTensors. Few operators of quantisation have a sharding
rule there, and some give wrong values without an error (integer views of amaxes that are not reduced yet). So a layer
is computed on local tensors, and its product gets the placement that ``F.linear`` on DTensors would give it:

===============  ==============  =================
weight [N, K]    input [.., K]   product [.., N]
===============  ==============  =================
Shard(0)         Replicate       Shard(last)
Shard(1)         Shard(last)     Partial (a sum)
Replicate        Replicate       Replicate
===============  ==============  =================

A scale of a whole tensor is that of the tensor on all ranks: amaxes of sharded operands are reduced (:func:`reduced`).
Scales of rows and blocks are those of a rank's part, as on its own GEMM: a row that is cut in two has two scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoprec.errors import UnsupportedError

#: Operand (input, weight, grad_output) -> the process groups over which it is cut into parts.
Groups = Mapping[str, tuple[Any, ...]]


def is_dtensor(tensor: Any) -> bool:
    """Say whether a tensor is a DTensor; imports nothing."""
    return type(tensor).__name__ == "DTensor"


def reduced(amax: Tensor, groups: tuple[Any, ...]) -> Tensor:
    """Return the largest amax over process groups; NaN and infinity become infinity, which a scale answers alike."""
    if not groups:
        return amax
    largest = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


class _AddedOnce(torch.autograd.Function):
    """A replicated bias for a product that ranks sum: the first one adds it, all of them know its gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, first: bool) -> Tensor:
        del ctx
        return bias.clone() if first else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grad_output, None


def run_sharded(
    run: Callable[[Tensor, Tensor, Tensor | None, Groups], Tensor],
    input: Any,
    weight: Any,
    bias: Any,
    *,
    name: str,
) -> Tensor:
    """Return ``input @ weight.T + bias`` as a DTensor, by ``run`` on local tensors.

    Args:
        run: called with the parts of input ``[..., K]``, weight ``[N, K]`` and bias ``[N]``, and with the process
            groups over which each operand is cut.
        input, weight: DTensors on one mesh; the input is redistributed to what the weight needs.
        bias: a DTensor ``[N]`` or None.
        name: the layer's, for messages.

    Raises:
        UnsupportedError: the input is not a DTensor, lies on another mesh, or the weight has another placement.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, last = weight.device_mesh, input.ndim - 1
    if any(not is_dtensor(one) or one.device_mesh != mesh for one in (input, bias) if one is not None):
        raise UnsupportedError(
            "the weight is a DTensor, and its input or bias is not one over the same ranks",
            where=f"layer '{name}'",
            fix="let parallelize_module prepare the layer's input (ColwiseParallel, RowwiseParallel)",
        )
    wanted: list[Any] = []
    made: list[Any] = []
    biases: list[Any] = []
    grads: list[Any] = []
    groups: dict[str, tuple[Any, ...]] = {"input": (), "weight": (), "grad_output": ()}
    row: tuple[Any, ...]
    cut: tuple[str, ...]
    first = True
    for dimension, placement in enumerate(weight.placements):
        group = (mesh.get_group(dimension),)
        if type(placement) is Shard and placement.dim == 0:
            row, cut = (Replicate(), Shard(last), Shard(0), Partial()), ("weight", "grad_output")
        elif type(placement) is Shard and placement.dim == 1:
            row, cut = (Shard(last), Partial(), Replicate(), Shard(last)), ("weight", "input")
            first = first and mesh.get_local_rank(dimension) == 0
        elif type(placement) is Replicate:
            row, cut = (Replicate(),) * 4, ()
        else:
            raise UnsupportedError(
                f"the weight has the placement {placement}, which no recipe is computed for",
                where=f"layer '{name}'",
                fix="shard it by ColwiseParallel or RowwiseParallel, or keep this layer as the script wrote it",
            )
        for kept, one in zip((wanted, made, biases, grads), row, strict=True):
            kept.append(one)
        for operand in cut:
            groups[operand] += group
    x = input.redistribute(placements=wanted).to_local(grad_placements=grads)
    b = None if bias is None else bias.redistribute(placements=biases).to_local()
    if b is not None and any(type(one) is Partial for one in made):
        b = _AddedOnce.apply(b, first)  # type: ignore[no-untyped-call]
    out = run(x, weight.to_local(), b, groups)
    shape = torch.Size((*input.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(out, mesh, made, run_check=False, shape=shape, stride=stride)
