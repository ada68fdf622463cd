"""Policies under DDP, FSDP2 and tensor parallelism, applied before or after the wrapping: two processes over gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoprec import Policy
from autoprec.applying.policy import remove_policy
from autoprec.applying.swap import execution_of
from autoprec.policy import LayerRule
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


def on_ranks(
    measure: Callable[[int, str], Any], hows: tuple[str, ...], folder: Path, ranks: int
) -> list[dict[str, Any]]:
    """Run ``measure(rank, how)`` on ranks of gloo; return what each found."""

    def work(rank: int) -> None:
        dist.init_process_group("gloo")
        torch.save({how: measure(rank, how) for how in hows}, folder / f"out.{rank}")
        dist.destroy_process_group()

    ended = run_ranks(work, cwd=folder, ranks=ranks)
    assert ended.returncode == 0, ended.stderr
    return [torch.load(folder / f"out.{rank}") for rank in range(ranks)]


on_two_ranks = partial(on_ranks, ranks=2)


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
    """Three training forwards, each a step or all of them one, and evaluations on rank 0 alone; then all scales."""
    model = Routed()
    DELAYED.apply(model)
    if how.startswith("ddp"):
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    elif how.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard

        for layer in (model.base, *model.experts):
            fully_shard(layer)
        wrapped = fully_shard(model)
    else:
        wrapped = model
    generator, optimizer = torch.Generator().manual_seed(rank), torch.optim.SGD(wrapped.parameters(), 0.0)
    for step in range(3):
        x = torch.randn(16, 32, generator=generator) * (rank + 1)
        wrapped(x, rank if step < 2 and not how.startswith("fsdp2") else 0).square().mean().backward()
        if rank == 0 and not how.startswith("fsdp2"):
            with torch.no_grad():
                model(x * 100, 0)
        if step == 2 or not how.endswith("accumulated"):
            optimizer.step()
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
    shared_by = ("ddp", "fsdp2", "ddp accumulated", "fsdp2 accumulated")
    first, second = on_two_ranks(delayed_scales, (*shared_by, "alone"), tmp_path)
    for how in shared_by:
        assert first[how] == second[how], how
    steps = {how: {key.split()[0]: history for key, (_, history) in first[how].items()} for how in shared_by}
    assert steps["ddp"] == {"base": 3, "experts.0": 3, "experts.1": 2}  # nobody called it in the last step
    assert steps["ddp accumulated"] == {"base": 1, "experts.0": 1, "experts.1": 1}
    assert (steps["fsdp2"]["base"], steps["fsdp2 accumulated"]["base"]) == (3, 1)
    assert len(first["ddp"]) == 9  # also the operands of experts that a rank has not called
    assert first["ddp"]["experts.1 grad_output e5m2"][0] not in (0.0, 1.0)
    shared = first["alone"].keys() & second["alone"].keys()
    assert all(first["alone"][key][0] != second["alone"][key][0] for key in shared if " weight " not in key)


def kept(_rank: int, how: str) -> tuple[int, list[list[float]]]:
    """Bytes saved for the backward pass that are not a weight's own, under FSDP2; and the gradients of two steps."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    name, *words = how.split()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).to(torch.bfloat16)
    policy = Policy.model_validate({"recipes": {"r": BUILTIN_RECIPES[name]}, "default": "r"})
    if "first" in words:
        policy.apply(model)
    for layer in () if "alone" in words else (*model, model):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    if "first" not in words:
        policy.apply(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grads, total, weights = [], 0, set()
    for layer in model:
        layer.register_forward_pre_hook(lambda m, _: weights.add(m.weight.untyped_storage()._cdata))

    def pack(saved: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += 0 if saved.untyped_storage()._cdata in weights else saved.numel() * saved.element_size()
        return saved

    for step in range(2):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).bfloat16().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            out = model(x)
        out.float().square().mean().backward()
        found = [p.grad for p in model.parameters()]
        full = [getattr(g, "full_tensor", lambda g=g: g)() for g in found]
        grads.append(torch.cat([g.flatten() for g in full]).tolist())
        optimizer.step()
        optimizer.zero_grad()
    return total, grads


@pytest.mark.slow
def test_fsdp2_keeps_no_codes_of_gathered_weights(tmp_path: Path) -> None:
    """Codes kept from forward to backward are a byte of every weight of the model on each rank."""
    names = ("fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "mxfp8")
    cases = ("bf16", *names, "fp8_tensorwise first", *(f"{name} alone" for name in names))
    first, second = on_two_ranks(kept, cases, tmp_path)
    assert first == second
    for name in names:
        scales = 2 * 4 * (128 + 64 + 128 * 64 // 32 if name in ("fp8_rowwise", "mxfp8") else 2)  # of both steps' inputs
        assert first[name][0] <= first["bf16"][0] + scales, name
        keeps = name in ("fp8_tensorwise", "fp8_delayed")  # the others' dgrad has codes of its own
        assert not keeps or first[f"{name} alone"][0] > first[name][0] + 2 * 64 * 128, name
        assert first[name][1] == first[f"{name} alone"][1], name
    assert first["fp8_tensorwise first"] == first["fp8_tensorwise"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Token ids to logits, whose class says nothing of how it is sharded."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(32, 32), nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard_tower(model: Tower, how: str) -> None:
    """Shard by tensor parallelism: plain, with FSDP2 around it, or with sequence parallelism (and a sharded loss)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    pairs = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if how.startswith("sequence"):
        loss = how.endswith("loss")
        made = Shard(-1) if loss else Replicate()
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=made, use_local_output=not loss)
        embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(model, pairs["tp"], {"embed": embed, "norm": SequenceParallel(), "head": head})
        plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1))}
        plan["down"] = RowwiseParallel(output_layouts=Shard(1))
    for block in model.blocks:
        parallelize_module(block, pairs["tp"], plan)
    if how == "fsdp2":
        for block in (*model.blocks, model):
            fully_shard(block, mesh=pairs["dp"])


def train_tower(recipe: str, how: str, *, down: str = "", depth: int = 2, compiled: bool = False) -> dict[str, Any]:
    from torch.distributed.tensor.parallel import loss_parallel

    model = Tower(depth)
    if how != "whole":
        shard_tower(model, how)
    recipes = {"f": BUILTIN_RECIPES[recipe], "down": BUILTIN_RECIPES[down or recipe]}
    rules = [{"match": "*.down", "recipe": "down"}]
    document = {"recipes": recipes, "layers": rules, "default": "f", "activations": "bf16"}
    policy = Policy.model_validate(document)
    policy.apply(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    called = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        ids = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with loss_parallel() if how.endswith("loss") else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(called(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        losses.append(float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss))
    counters = torch._dynamo.utils.counters
    graphs = counters["stats"].get("unique_graphs", 0), sum(counters["graph_break"].values())
    return {"losses": losses, "ok": policy.audit(model).ok, "graphs": graphs}


@pytest.mark.slow
def test_sharded_layers_are_part_of_one_compiled_graph(tmp_path: Path) -> None:
    """Scales of a whole tensor, which ranks agree on, and those of rows, side by side."""

    def measure(_rank: int, how: str) -> Any:
        return [train_tower("fp8_tensorwise", how, down="fp8_rowwise", depth=1, compiled=on) for on in (False, True)]

    for eager, compiled in (rank["tp"] for rank in on_two_ranks(measure, ("tp",), tmp_path)):
        assert compiled["graphs"] == (1, 0)
        assert compiled["losses"] == eager["losses"]
        assert eager["ok"]
        assert compiled["ok"]


@pytest.mark.slow
def test_sequence_parallelism_and_a_sharded_loss_train_as_the_whole_model_does(tmp_path: Path) -> None:
    hows = ("whole", "sequence", "sequence and loss")
    found = on_two_ranks(lambda _rank, how: train_tower("fp8_tensorwise", how), hows, tmp_path)
    assert found[0] == found[1]
    for how in hows:
        assert found[0][how]["ok"]
        assert found[0][how]["losses"] == pytest.approx(found[0]["whole"]["losses"], rel=3e-3)


@pytest.mark.slow
def test_tensor_parallelism_inside_of_fsdp2(tmp_path: Path) -> None:
    found = on_ranks(lambda _rank, how: train_tower("fp8_tensorwise", how), ("whole", "fsdp2"), tmp_path, ranks=4)
    for rank in found:
        assert rank["fsdp2"]["ok"]
        assert rank["fsdp2"]["losses"] == pytest.approx(rank["whole"]["losses"], rel=3e-3)


class Experts(nn.Module):
    """Four experts, or those of them that this rank holds; returns what each of them makes of the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(4, 32, 64) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up.to_local() if hasattr(self.up, "to_local") else self.up
        return torch.bmm(x.expand(up.shape[0], -1, -1), up)


def experts_gradient(rank: int, how: str) -> tuple[bool, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    experts = Experts()
    model = nn.Sequential(nn.Linear(32, 32), experts)
    if how == "sharded":
        mesh = init_device_mesh("cpu", (2,))
        model[1].up = nn.Parameter(distribute_tensor(model[1].up.detach(), mesh, [Shard(0)]))
    POLICY.model_copy(update={"layers": DELAYED.layers, "default": "f"}).apply(model)
    model(torch.randn(16, 32, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    run = execution_of(model[1]).executions["up"]
    gradient = model[1].up.grad
    mine = gradient.to_local() if how == "sharded" else gradient[2 * rank : 2 * rank + 2]
    return run.executed.get("wgrad", "").startswith("fp8"), mine.clone()


@pytest.mark.slow
def test_experts_that_ranks_share_run_their_recipe(tmp_path: Path) -> None:
    for rank in on_two_ranks(experts_gradient, ("whole", "sharded"), tmp_path):
        (one, whole), (other, sharded) = rank["whole"], rank["sharded"]
        assert one
        assert other
        assert torch.equal(whole, sharded)


def experts_cut_inside(_rank: int, _how: str) -> tuple[bool, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Sequential(nn.Linear(32, 32), Experts())
    model[1].up = nn.Parameter(distribute_tensor(model[1].up.detach(), init_device_mesh("cpu", (2,)), [Shard(2)]))
    policy = POLICY.model_copy(update={"layers": (LayerRule(match="1.up", recipe="f"),), "default": "keep"})
    policy.apply(model)
    model(torch.randn(16, 32)).square().sum().backward()
    audit = policy.audit(model)
    (row,) = (row for row in audit.layers if row.name == "1.up")
    return audit.ok, row.reason


@pytest.mark.slow
def test_experts_cut_inside_are_told_not_to_run_their_recipe(tmp_path: Path) -> None:
    for rank in on_two_ranks(experts_cut_inside, ("inside",), tmp_path):
        ok, reason = rank["inside"]
        assert not ok
        assert reason == "no F.linear, matmul or einsum by this weight was seen"
