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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoprec.errors import UnsupportedError

#: Operand (input, weight, grad_output) -> the names of the process groups over which it is cut into parts.
Groups = Mapping[str, tuple[str, ...]]
#: Dimensions of inputs for which a layer knows what :func:`layout_of` returns before a graph is traced.
NDIMS = range(1, 6)


def world_size() -> int:
    """Return the number of ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def any_rank(flag: bool, device: torch.device) -> bool:
    """Say whether any rank of the default process group says so; every rank must ask at the same step.

    One rank that leaves by itself (out of time, a loss that is not finite) or goes on by itself (a graph that was
    compiled again) leaves the others waiting in a collective.

    Args:
        flag: of this rank.
        device: on which the group's backend reduces.
    """
    if world_size() == 1:
        return flag
    value = torch.tensor(float(flag), dtype=torch.float32, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def is_dtensor(tensor: Any) -> bool:
    """Say whether a tensor is a DTensor; imports nothing."""
    return type(tensor).__name__ == "DTensor"


def fsdp_groups(model: nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP2 gathers together."""
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in groups if group is not None)


def is_sharded(model: nn.Module) -> bool:
    """Say whether FSDP2 gathers weights of a model before they are used."""
    return any(group.fsdp_params for group in fsdp_groups(model))


def reduced(amax: Tensor, groups: tuple[str, ...]) -> Tensor:
    """Return the largest amax over named process groups; NaN and infinity become infinity, which a scale answers alike.

    By torch's functional operators, which may stand in a compiled graph.

    Args:
        amax: float32 of any shape, the same on every rank.
        groups: names of the groups; nothing is sent where there are none.
    """
    if not groups:
        return amax
    largest = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)
    for group in groups:
        largest = torch.ops._c10d_functional.all_reduce(largest, "max", group)
        largest = torch.ops._c10d_functional.wait_tensor(largest)
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


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How the tensors of a sharded layer lie on its mesh; found outside of compiled graphs, and used inside of them.

    Attributes:
        mesh, placements: of the weight.
        input, grads: placements that the input is brought to, and that its gradient has.
        out, bias: placements of the product, and that the bias is brought to.
        groups: over which operands are cut.
        summed: ranks sum their products.
        first: this rank adds the bias where they do.
    """

    mesh: Any
    placements: tuple[Any, ...]
    input: tuple[Any, ...]
    grads: tuple[Any, ...]
    out: tuple[Any, ...]
    bias: tuple[Any, ...]
    groups: Groups
    summed: bool
    first: bool

    def fits(self, weight: Any) -> bool:
        """Say whether this is the layout of a weight: FSDP2 brings it from one mesh to another and back."""
        return bool(self.placements == weight.placements and self.mesh == weight.device_mesh)


def layout_of(weight: Any, ndim: int, name: str) -> Layout:
    """Return the layout of a layer whose weight is a DTensor ``[N, K]`` and whose input has ``ndim`` dimensions.

    Args:
        weight: the DTensor.
        ndim: dimensions of the input.
        name: of the layer, for the message.

    Raises:
        UnsupportedError: the weight has a placement that no recipe is computed for.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh, last = weight.device_mesh, ndim - 1
    rows: list[tuple[Any, ...]] = []
    groups: dict[str, tuple[str, ...]] = {"input": (), "weight": (), "grad_output": ()}
    row: tuple[Any, ...]
    cut: tuple[str, ...]
    first = True
    for dimension, placement in enumerate(weight.placements):
        if type(placement) is Shard and placement.dim == 0:
            row, cut = (Replicate(), Partial(), Shard(last), Shard(0)), ("weight", "grad_output")
        elif type(placement) is Shard and placement.dim == 1:
            row, cut = (Shard(last), Shard(last), Partial(), Replicate()), ("weight", "input")
            first = first and mesh.get_local_rank(dimension) == 0
        elif type(placement) is Replicate:
            row, cut = (Replicate(),) * 4, ()
        else:
            raise UnsupportedError(
                f"the weight has the placement {placement}, which no recipe is computed for",
                where=f"layer '{name}'",
                fix="shard it by ColwiseParallel or RowwiseParallel, or keep this layer as the script wrote it",
            )
        rows.append(row)
        for operand in cut:
            groups[operand] += (mesh.get_group(dimension).group_name,)
    input, grads, out, bias = zip(*rows, strict=True)
    summed = any(type(one) is Partial for one in out)
    return Layout(mesh, tuple(weight.placements), input, grads, out, bias, groups, summed, first)


def run_sharded(
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    input: Any,
    weight: Any,
    bias: Any,
    layout: Layout,
    *,
    name: str,
) -> Tensor:
    """Return ``input @ weight.T + bias`` as a DTensor, by ``run`` on local tensors.

    Args:
        run: called with the parts of input ``[..., K]``, weight ``[N, K]`` and bias ``[N]``.
        input, weight: DTensors on one mesh; the input is redistributed to what the weight needs.
        bias: a DTensor ``[N]`` or None.
        layout: of this weight, for inputs of so many dimensions.
        name: the layer's, for messages.

    Raises:
        UnsupportedError: input or bias is not a DTensor, or lies on another mesh.
    """
    from torch.distributed.tensor import DTensor

    for one in (input, bias):
        if one is not None and (not is_dtensor(one) or one.device_mesh != layout.mesh):
            raise UnsupportedError(
                "the weight is a DTensor, and its input or bias is not one over the same ranks",
                where=f"layer '{name}'",
                fix="let parallelize_module prepare the layer's input (ColwiseParallel, RowwiseParallel)",
            )
    x = input.redistribute(placements=layout.input).to_local(grad_placements=layout.grads)
    b = None if bias is None else bias.redistribute(placements=layout.bias).to_local()
    if b is not None and layout.summed:
        b = _AddedOnce.apply(b, layout.first)  # type: ignore[no-untyped-call]
    out = run(x, weight.to_local(), b)
    shape = torch.Size((*input.shape[:-1], weight.shape[0]))
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return DTensor.from_local(
        out, layout.mesh, layout.out, run_check=False, shape=shape, stride=tuple(reversed(strides))
    )
