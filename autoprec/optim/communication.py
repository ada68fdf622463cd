"""Gradient communication in low precision: few bits on the wire, FP32 sums, the same bits on every rank.

Summing in FP8 rounds at every hop and saturates (10 dB at 8 ranks without a pre-scale). Here only the
wire is narrow: every rank sends each other rank its share of the gradient (all-to-all), the owner of a share decodes
all contributions and averages them in FP32, encodes the mean once, and everybody gathers it. Two roundings in all,
whatever the number of ranks; ``2 (N - 1) / N`` times 1.016 bytes per value (E4M3, one FP32 scale per 256). A value
that is not finite on one rank is not finite on any rank afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autoprec.errors import UnsupportedError
from autoprec.optim.codecs import BlockCodec, CastCodec, Codec
from autoprec.support.living import living

#: Values that share an fp32 scale on the wire: it adds a sixty-fourth of what they take.
_BLOCK = 256
#: What travels, by the policy's word; None leaves torch's own FP32 all-reduce.
WIRE: dict[str, Codec | None] = {
    "fp32": None,
    "bf16": CastCodec("bf16", torch.bfloat16),
    "fp8": BlockCodec("e4m3", _BLOCK),
}
_ATTRIBUTE = "_autoprec_gradient_hook"


def _shares(flat: Tensor, ranks: int) -> Tensor:
    """Return ``flat`` as (ranks, values per rank), zero-padded; shares are whole blocks."""
    length = -(-flat.numel() // (ranks * _BLOCK)) * _BLOCK
    return nn.functional.pad(flat.float(), (0, ranks * length - flat.numel())).view(ranks, length)


def _pack(shares: Tensor, how: Codec) -> Tensor:
    """Encode (n, length) values into (n, bytes per share): codes first, then scales."""
    parts = how.encode(shares)
    return torch.cat([part.contiguous().view(torch.uint8).view(shares.shape[0], -1) for part in parts], dim=1)


def _unpack(packed: Tensor, length: int, how: Codec) -> Tensor:
    """Decode what :func:`_pack` made: (n, bytes) -> (n, length) FP32."""
    count = packed.shape[0]
    if isinstance(how, CastCodec):
        return packed.contiguous().view(-1).view(how.dtype).view(count, length).float()
    codes = packed[:, :length].contiguous().view(-1).view(torch.float8_e4m3fn)
    scales = packed[:, length:].contiguous().view(-1).view(torch.float32)
    return how.decode((codes, scales), torch.Size((count, length)))


@dataclass
class GradientHook:
    """A DDP communication hook whose precision can be changed between steps (DDP accepts one hook, once)."""

    name: str
    group: Any = None

    def __call__(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average one bucket over the ranks; the result replaces the bucket on every rank, bit for bit the same."""
        buffer, how = bucket.buffer(), WIRE[self.name]
        ranks = dist.get_world_size(self.group)
        if how is None:
            dist.all_reduce(buffer.div_(ranks), group=self.group)
        else:
            self._reduce(buffer, how, ranks)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def _reduce(self, buffer: Tensor, how: Codec, ranks: int) -> None:
        shares = _shares(buffer.view(-1), ranks)
        length = shares.shape[1]
        packed = _pack(shares, how)
        received = torch.empty_like(packed)
        dist.all_to_all_single(received, packed, group=self.group)
        mean = _unpack(received, length, how).sum(0, keepdim=True).div_(ranks)
        share = _pack(mean, how)
        gathered = torch.empty_like(packed)
        gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
        gather(gathered, share, group=self.group)
        buffer.copy_(_unpack(gathered, length, how).view(-1)[: buffer.numel()].view_as(buffer))


def find_distributed(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel wrapper around ``model`` (or ``model`` itself), None when there is none.

    What ``torch.compile`` returned, around the wrapper or inside of it, is looked through.
    """
    model = _not_compiled(model)
    if isinstance(model, DistributedDataParallel):
        return model
    wrappers = living(DistributedDataParallel)
    return next((wrapper for wrapper in wrappers if _not_compiled(wrapper.module) is model), None)


def _not_compiled(model: nn.Module) -> nn.Module:
    while isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
        model = inner
    return model


def install_gradient_hook(model: nn.Module, gradients: str, *, reserve: bool = False) -> GradientHook | None:
    """Let DDP average gradients with ``fp32``, ``bf16`` or ``fp8`` on the wire.

    Args:
        model: a DistributedDataParallel module, or the module inside one.
        gradients: the policy's ``communication.gradients``. A second call changes the precision of the first hook.
        reserve: install the hook for ``fp32``, too, which needs none: DDP takes one before its first backward only.

    Returns:
        The hook in force; None when the model is not distributed (nothing is communicated).

    Raises:
        UnsupportedError: the script registered a communication hook of its own, or the model is sharded (FSDP).
    """
    wrapper = find_distributed(model)
    if wrapper is None:
        if (gradients != "fp32" or reserve) and any(type(p).__name__ == "DTensor" for p in model.parameters()):
            raise UnsupportedError(
                "gradients of a sharded model (FSDP2, DTensor) are reduced by FSDP itself",
                where="policy.communication",
                fix="set communication.gradients: fp32 and choose reduce_dtype in FSDP's MixedPrecisionPolicy; "
                "FP8 weights can be gathered under `autoprec export --to torchao`",
            )
        return None
    hook: GradientHook | None = getattr(wrapper, _ATTRIBUTE, None)
    if hook is not None:
        hook.name = gradients
        return hook
    if gradients == "fp32" and not reserve:
        return None
    hook = GradientHook(gradients, wrapper.process_group)
    try:
        # DDP compares annotations with objects; a lambda has none to disagree about.
        wrapper.register_comm_hook(hook, lambda state, bucket: state(bucket))
    except RuntimeError as error:
        raise UnsupportedError(
            f"DistributedDataParallel refused a communication hook: {str(error).splitlines()[0]}",
            where="policy.communication",
            fix="remove the script's own register_comm_hook, or set communication.gradients: fp32",
        ) from error
    setattr(wrapper, _ATTRIBUTE, hook)
    return hook
