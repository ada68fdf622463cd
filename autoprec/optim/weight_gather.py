"""FP8 weights on the wire: what FSDP2 gathers before a layer runs.

FSDP2 keeps a shard of every weight in FP32 on each rank and gathers the whole before each use. A layer that multiplies
FP8 codes rounds the weight anyway, so its shard may travel as codes: E4M3 with one exact FP32 scale per 256 values,
1.016 bytes per value instead of 4 (or 2). The shard itself, the optimizer's, stays as it is. Here as in MS-AMP's O3
(weights are gathered in FP8) and torchao's ``enable_fsdp_float8_all_gather``; the layer then quantises the weight it
got by its own recipe, so the two roundings add where their scales differ.

FSDP2 asks a shard for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (torch/distributed/fsdp, its extensions for
tensor subclasses); here they are attributes of the plain local tensor, so that no Parameter changes its type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.optim.codecs import BlockCodec
from autoprec.optim.communication import _BLOCK, _pack, _unpack
from autoprec.policy import Policy, resolve

_CODEC = BlockCodec("e4m3", _BLOCK)
_NAMES = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


@dataclass
class GatheredWeights:
    """What :func:`install_weight_gather` did: weights that travel in FP8, and why the others do not.

    ``sent_bytes`` counts what this rank has sent, ``plain_bytes`` what it would have sent in FP32.
    """

    names: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    sent_bytes: int = 0
    plain_bytes: int = 0
    shards: list[_Shard] = field(default_factory=list, repr=False)

    def stop(self) -> None:
        """Let every weight travel as it is again, from the next gathering on."""
        for shard in self.shards:
            shard.codes = False


@dataclass
class _Shard:
    """The two functions of one sharded weight.

    FSDP2 takes neither back once it has gathered, so a weight that no longer travels in FP8 (its layer went over to
    another recipe) goes through them as it is.
    """

    parameter: Any  # torch.distributed.fsdp's FSDPParam
    report: GatheredWeights
    codes: bool = True
    sent: bool | None = None  # as codes, when it was last gathered

    def before(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], int]:
        """Return the codes and scales of this rank's shard as bytes, and how many values they are."""
        del outer_size, outer_stride, module
        flat = self.parameter._sharded_param_data
        if self.sent is not self.codes:
            self.parameter.all_gather_outputs = []  # buffers of the other size, which FSDP2 would use again
            self.sent = self.codes
        if not self.codes:
            return (flat.to(mp_policy.param_dtype or flat.dtype),), flat.numel()
        blocks = -(-flat.numel() // _BLOCK) * _BLOCK
        packed = _pack(nn.functional.pad(flat.float(), (0, blocks - flat.numel())).view(1, -1), _CODEC).view(-1)
        ranks = mesh.size()
        self.report.sent_bytes += packed.numel() * (ranks - 1)
        self.report.plain_bytes += 4 * flat.numel() * (ranks - 1)
        return (packed,), flat.numel()

    def after(
        self, outputs: tuple[Tensor, ...], values: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        (packed,) = outputs
        size: torch.Size = self.parameter._orig_size
        if packed.dtype is torch.uint8:
            blocks = -(-values // _BLOCK) * _BLOCK
            ranks = packed.numel() // (blocks + 4 * (blocks // _BLOCK))
            packed = _unpack(packed.view(ranks, -1), blocks, _CODEC)[:, :values].reshape(-1)
        whole = packed[: size.numel()].view(size)
        if out is None:
            made = whole.to(dtype)
            return made, (made,)
        same_version: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
        with torch.no_grad(), same_version(out):
            out.copy_(whole)
        return None


def _sharded(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            yield from () if group is None else group.fsdp_params


def is_sharded(model: nn.Module) -> bool:
    """Say whether FSDP2 gathers weights of a model before they are used."""
    return next(_sharded(model), None) is not None


def _is_ours(parameter: Any) -> bool:
    before = getattr(parameter._sharded_local_tensor, _NAMES[0], None)
    return isinstance(getattr(before, "__self__", None), _Shard)


def _refusal(parameter: Any) -> str:
    """Return why a sharded weight travels as it is, or an empty string."""
    shard, ours = parameter._sharded_local_tensor, _is_ours(parameter)
    if not ours and any(hasattr(shard, name) for name in _NAMES):
        return "another library gathers it in a form of its own"
    if not ours and hasattr(parameter, "_unsharded_param"):
        return "it has been gathered before: apply the policy before the first step"
    if shard.size() != parameter.padded_sharded_param_size or parameter._orig_size[0] % parameter.mesh_info.mesh.size():
        return "it is not sharded evenly"
    if parameter.post_forward_mesh_info not in (None, parameter.mesh_info):
        return "it is resharded to a part of the ranks after the forward"
    return "it is sharded in two dimensions" if getattr(parameter, "is_dtensor", False) else ""


def _wanted(model: nn.Module, policy: Policy) -> dict[str, Tensor]:
    """Return the weights of linear layers whose forward multiplies in FP8, by name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    plans = resolve(policy, list(layers), strict=False)
    chosen = {name: plan.fprop for name, plan in plans.items()}
    return {name: layers[name].weight for name, recipe in chosen.items() if recipe and recipe.format == "fp8"}


def install_weight_gather(model: nn.Module, policy: Policy) -> GatheredWeights | None:
    """Let FSDP2 gather the weights of FP8 layers in FP8; before the first step, since FSDP2 sets its buffers up then.

    Later it changes which of those weights travel in FP8.

    Args:
        model: under ``fully_shard``, or not.

    Returns:
        What was done; None when the model is not sharded (nothing is gathered).
    """
    found = {id(parameter.sharded_param): parameter for parameter in _sharded(model)}
    if not found:
        return None
    from torch.distributed.fsdp._fully_shard._fsdp_param import ExtensionsData

    report = GatheredWeights()
    for parameter in filter(_is_ours, found.values()):
        parameter._sharded_local_tensor.fsdp_pre_all_gather.__self__.codes = False
    wanted = _wanted(model, policy) if policy.communication.weights != "keep" else {}
    for name, weight in wanted.items():
        parameter = found.get(id(weight))
        why = "FSDP2 does not hold it" if parameter is None else _refusal(parameter)
        if why or parameter is None:
            report.refused[name] = why
            continue
        shard, functions = parameter._sharded_local_tensor, _Shard(parameter, report)
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = functions.before, functions.after
        parameter._extensions_data = ExtensionsData()
        report.names += (name,)
        report.shards.append(functions)
    return report
