"""Policies under DDP, FSDP2 and tensor parallelism, applied before or after the wrapping: two processes over gloo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoprec.applying.policy import Policy, remove_policy
from autoprec.applying.swap import execution_of
from autoprec.optim.audit import audit_optimizer
from autoprec.optim.codecs import BlockCodec
from autoprec.optim.optimizer import rewrap_optimizer
from autoprec.optim.weight_gather import is_sharded
from autoprec.policy import CommunicationPolicy
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.warm import run_ranks

POLICY = Policy.model_validate(
    {
        "recipes": {"f": BUILTIN_RECIPES["fp8_rowwise"], "b": BUILTIN_RECIPES["bf16"]},
        "layers": [{"match": "0", "recipe": "f"}, {"match": "2", "recipe": "b"}],
        "activations": "bf16",
    }
)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def wrap(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if how == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, rank: int, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 32, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare_orders(rank: int, how: str) -> dict[str, list[float]]:
    runs = {}
    for order in ("before", "after", "never", "removed"):
        model = build()
        if order in ("before", "removed"):
            POLICY.apply(model)
        wrapped = wrap(model, how)
        if order == "after":
            POLICY.apply(wrapped)
        if order == "removed":
            remove_policy(wrapped)
        runs[order] = train(wrapped, 0 if how == "tp" else rank)
        if order in ("before", "after"):
            report = POLICY.audit(wrapped)
            assert report.ok, report.to_json()
    if how == "tp":
        model = build()
        POLICY.apply(model)
        runs["whole"] = train(model, 0)
    return runs


def on_two_ranks(measure: Callable[[int, str], Any], hows: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """Run ``measure(rank, how)`` on two ranks of gloo; return what each found."""

    def work(rank: int) -> None:
        dist.init_process_group("gloo")
        torch.save({how: measure(rank, how) for how in hows}, folder / f"out.{rank}")
        dist.destroy_process_group()

    ended = run_ranks(work, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return [torch.load(folder / f"out.{rank}") for rank in range(2)]


@pytest.mark.slow
def test_order_does_not_matter_and_removal_restores(tmp_path: Path) -> None:
    saved = on_two_ranks(compare_orders, ("ddp", "fsdp2", "tp"), tmp_path)
    assert saved[0]["tp"] == saved[1]["tp"]  # ranks hold parts of one model, and see the same data
    assert saved[0]["tp"]["before"] == pytest.approx(saved[0]["tp"]["whole"], rel=2e-3)
    for runs in (runs for rank in saved for runs in rank.values()):
        assert runs["before"] == runs["after"]
        assert runs["removed"] == runs["never"]
        assert runs["before"] != runs["never"]
        assert runs["before"] == pytest.approx(runs["never"], rel=0.05)


class Routed(nn.Module):
    """Two experts, of which each rank calls one only in its first steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(32, 32)
        self.experts = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.experts[chosen](self.base(x))


DELAYED = Policy.model_validate({"recipes": {"d": BUILTIN_RECIPES["fp8_delayed"]}, "default": "d"})


def delayed_scales(rank: int, how: str) -> dict[str, list[float]]:
    """Three training forwards and an evaluation on rank 0 alone; then the scales of every layer."""
    model = Routed()
    DELAYED.apply(model)
    if how == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    elif how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in (model.base, *model.experts):
            fully_shard(layer)
        wrapped = fully_shard(model)
    else:
        wrapped = model
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        x = torch.randn(16, 32, generator=generator) * (rank + 1)
        wrapped(x, rank if step < 2 and how != "fsdp2" else 0).square().mean().backward()
        if rank == 0 and how != "fsdp2":
            with torch.no_grad():
                model(x * 100, 0)
    found = {}
    for name in ("base", "experts.0", "experts.1"):
        delayed = execution_of(model.get_submodule(name)).quantizers.delayed
        found |= {
            f"{name} {operand} {spec.format}": [float(d.scale), int((d.history > 0).sum())]
            for (operand, spec), d in delayed.items()
        }
    return found


@pytest.mark.slow
def test_delayed_scales_agree_on_all_ranks(tmp_path: Path) -> None:
    first, second = on_two_ranks(delayed_scales, ("ddp", "fsdp2", "alone"), tmp_path)
    for how in ("ddp", "fsdp2"):
        assert first[how] == second[how], how
    assert {history for _, history in first["ddp"].values()} == {2}  # three forwards, two reductions between them
    assert len(first["ddp"]) == 9  # also the operands of experts that a rank has not called
    assert first["ddp"]["experts.1 grad_output e5m2"][0] not in (0.0, 1.0)
    shared = first["alone"].keys() & second["alone"].keys()
    assert all(first["alone"][key][0] != second["alone"][key][0] for key in shared if " weight " not in key)


def _keep_weight(seen: list[torch.Tensor], layer: nn.Linear, _args: Any) -> None:
    seen.append(layer.weight.detach().clone())


def gathered(rank: int, how: str) -> dict[str, Any]:
    """Losses with weights gathered in FP8, and the weights a forward saw."""
    found: dict[str, Any] = {}
    for weights in ("keep", "fp8"):
        chosen = POLICY.model_copy(update={"communication": CommunicationPolicy(weights=weights)})
        model = wrap(build(), how)
        chosen.apply(model)
        optimizer = chosen.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        found["sharded"] = is_sharded(model)
        seen: list[torch.Tensor] = []
        model[0].register_forward_pre_hook(partial(_keep_weight, seen))
        found[weights] = train(model, rank, optimizer)
        found[f"{weights} seen"] = seen[0]
        found[f"{weights} audit"] = audit_optimizer(chosen, optimizer, model).get("communication.weights")
        for later in ("keep", weights):  # as a phase goes over, and comes back
            rewrap_optimizer(
                optimizer, chosen.model_copy(update={"communication": CommunicationPolicy(weights=later)}), model
            )
            model(torch.randn(4, 32)).sum().backward()
            found[f"{weights}, {later} later"] = torch.equal(seen[-1], model[0].weight.full_tensor())
    return found


@pytest.mark.slow
def test_fsdp2_gathers_the_weights_of_fp8_layers_in_fp8(tmp_path: Path) -> None:
    for found in (rank["fsdp2"] for rank in on_two_ranks(gathered, ("fsdp2",), tmp_path)):
        weight, row = build()[0].weight.detach(), found["fp8 audit"]
        codec = BlockCodec("e4m3", 256)
        halves = [
            codec.decode(codec.encode(half.reshape(1, -1)), torch.Size((1, half.numel()))) for half in weight.chunk(2)
        ]
        assert torch.equal(found["keep seen"], weight)
        assert torch.equal(found["fp8 seen"], torch.cat(halves, 1).view_as(weight))
        assert found["sharded"]
        assert (found["keep, keep later"], found["fp8, keep later"], found["fp8, fp8 later"]) == (True, True, False)
        assert found["fp8"] != found["keep"]
        assert found["fp8"] == pytest.approx(found["keep"], rel=0.05)
        assert (row["ok"], row["executed"], row["reason"]) == (True, "fp8", "3.94 times fewer bytes than FP32")
