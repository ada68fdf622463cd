"""FSDP2 gathers FP8 weights under the exported torchao module: on two real ranks, with the numbers it has without."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoprec.export import Request, export, exporter
from autoprec.export.stacks.torchao import gathers_float8
from autoprec.policy import LayerPlan, Policy
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.optional import is_available
from tests.export.readers import load_source

NAMES = ("fp8_tensorwise", "bf16")
POLICY = Policy.model_validate(
    {
        "recipes": {name: BUILTIN_RECIPES[name] for name in NAMES},
        "layers": [{"match": "0", "recipe": "fp8_tensorwise"}, {"match": "2", "recipe": "bf16"}],
    }
)


def _train(rank: int, gather: bool) -> tuple[list[float], set[str]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchao.float8 import fsdp_utils

    sent: set[str] = set()
    inner = fsdp_utils.WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather

    def watched(weight: Any, mesh: Any) -> Any:
        tensors, rest = inner(weight, mesh)
        sent.update(str(tensor.dtype) for tensor in tensors)
        return tensors, rest

    fsdp_utils.WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather = watched
    exported = load_source(export(POLICY, "torchao").files["precision_torchao.py"], "precision_torchao")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 16))
    exported.apply(model, emulate=True, gather_float8=gather)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(rank), []
    for _ in range(4):
        x = torch.randn(32, 64, generator=generator)
        loss = (model(x) - x[:, :16]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if gather:
            exported.after_step(model)
    fsdp_utils.WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather = inner
    return losses, sent


def _rank(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.save([_train(rank, gather) for gather in (False, True)], Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not is_available("torchao.float8"), reason="torchao is not installed")
def test_the_weights_travel_in_fp8_and_the_losses_are_those_without(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        (plain, nothing), (gathered, sent) = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert nothing == set()
        assert sent == {"torch.float8_e4m3fn"}
        assert gathered == plain


@pytest.mark.parametrize(
    ("recipes", "gathers"),
    [
        (("fp8_tensorwise", "fp8_tensorwise", "fp8_tensorwise"), True),
        (("fp8_tensorwise", "fp8_tensorwise", "bf16"), True),
        (("fp8_tensorwise", "bf16", "fp8_tensorwise"), False),
        (("fp8_rowwise", "fp8_rowwise", "fp8_rowwise"), False),
        (("bf16", "bf16", "bf16"), False),
    ],
)
def test_which_layers_can_be_gathered_in_fp8(recipes: tuple[str, ...], gathers: bool) -> None:
    plan = LayerPlan(**{g: BUILTIN_RECIPES[r] for g, r in zip(("fprop", "dgrad", "wgrad"), recipes, strict=True)})
    assert gathers_float8(plan) is gathers


def test_a_policy_without_such_layers_exports_no_switch() -> None:
    plain = POLICY.model_copy(update={"layers": ()})
    text = exporter("torchao").export(Request(plain)).files["precision_torchao.py"]
    assert "enable_fsdp_float8_all_gather" not in text
