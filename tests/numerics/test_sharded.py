"""Layers sharded by tensor parallelism compute what the whole layer computes: two ranks over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoprec import Policy
from autoprec.applying.swap import execution_of
from autoprec.errors import UnsupportedError
from autoprec.numerics.sharded import any_rank, is_dtensor, reduced
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.warm import run_ranks

#: Sizes of a layer: 128 x 128 blocks and rows of 128 values fit into each half, but for the uneven one.
K, N = 256, 512
RECIPES = ("fp32", "bf16", "fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4_plain", "int8")
STYLES = ("ColwiseParallel", "RowwiseParallel")


def policy(recipe: str) -> Policy:
    return Policy.model_validate({"recipes": {"f": BUILTIN_RECIPES[recipe]}, "default": "f"})


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if is_dtensor(tensor) else tensor).detach() + 0  # waits for exchanges


def sharded(model: nn.Sequential, style: str) -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, parallel

    made = getattr(parallel, style)(input_layouts=Replicate(), output_layouts=Replicate(), use_local_output=True)
    parallel.parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": made})
    return model


def two_steps(recipe: str, style: str | None, rows: int = N) -> dict[str, Any]:
    """Return what the second step gives, and the scales of delayed recipes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, rows))
    policy(recipe).apply(model)
    model = model if style is None else sharded(model, style)
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # a step of the history is one of the optimizer
    for number in range(2):
        model.zero_grad()
        x = torch.randn(2, 16, K, generator=generator).requires_grad_()
        x.data[..., :4] *= 10  # one rank's half has larger values than the other's
        out = model(x)
        out.backward(torch.randn(out.shape, generator=generator))
        if not number:
            optimizer.step()
    run = execution_of(model[0])
    parts = {"out": out, "input": x.grad, "weight": model[0].weight.grad, "bias": model[0].bias.grad}
    delayed = {f"{operand} {spec.format}": float(one.scale) for (operand, spec), one in run.quantizers.delayed.items()}
    return {name: whole(value) for name, value in parts.items()} | {"scales": delayed, "ran": run.executed}


def measure(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{recipe} {style}": two_steps(recipe, style) for recipe in RECIPES for style in (None, *STYLES)
    }
    found |= {f"uneven {style}": two_steps("fp8_tensorwise", style, 333) for style in (None, "ColwiseParallel")}
    largest = torch.tensor([1.0, torch.nan, 3.0])[rank]
    found["any"] = [any_rank(rank == 1, torch.device("cpu")), any_rank(False, torch.device("cpu"))]
    found["reduced"] = reduced(largest, (dist.group.WORLD.group_name,))
    found["refused"] = refusals()
    return found


def refusals() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, distribute_tensor

    told = []
    model = sharded(nn.Sequential(nn.Linear(8, 8)), "ColwiseParallel")
    policy("fp8_tensorwise").apply(model)
    mesh = init_device_mesh("cpu", (2,))
    run = execution_of(model[0])
    summed = type(model[0].weight.data).from_local(torch.ones(8, 8), mesh, [Partial()])
    x = distribute_tensor(torch.ones(2, 8), mesh)
    for input, weight in ((torch.ones(2, 8), model[0].weight), (x, summed)):
        with pytest.raises(UnsupportedError) as error:
            run(input, weight, None)
        told.append(str(error.value))
    return told


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")

    def work(rank: int) -> None:
        dist.init_process_group("gloo")
        torch.save(measure(rank), folder / f"out.{rank}")
        dist.destroy_process_group()

    ended = run_ranks(work, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return [torch.load(folder / f"out.{rank}") for rank in range(2)]


def assert_same(found: dict[str, Any], expected: dict[str, Any], style: str, recipe: str) -> None:
    """Bit for bit, but for the sum over ranks: each rank's part is a product of its own, rounded to 16 bits.

    Row scales of INT8 are those of a rank's part, and finer.
    """
    summed = "input" if style == "ColwiseParallel" else "out"
    for name in {"out", "input", "weight"} - {summed}:
        assert torch.equal(found[name], expected[name]), name
    assert torch.allclose(found["bias"], expected["bias"])
    error = float((found[summed] - expected[summed]).norm() / expected[summed].norm())
    assert error < {"fp32": 1e-6, "int8": 0.02}.get(recipe, 4e-3)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_parts_together_are_the_whole_layer(recipe: str, style: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        one, expected = found[f"{recipe} {style}"], found[f"{recipe} None"]
        assert_same(one, expected, style, recipe)
        assert one["ran"] == expected["ran"]
        assert one["scales"] == ranks[0][f"{recipe} {style}"]["scales"]
        assert bool(one["scales"]) is (recipe == "fp8_delayed")


@pytest.mark.slow
def test_what_one_rank_says_all_know(ranks: list[dict[str, Any]]) -> None:
    assert [found["any"] for found in ranks] == [[True, False]] * 2
    assert any_rank(True, torch.device("cpu"))
    assert not any_rank(False, torch.device("cpu"))


@pytest.mark.slow
def test_a_weight_that_ranks_cannot_halve(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert_same(found["uneven ColwiseParallel"], found["uneven None"], "ColwiseParallel", "fp8_tensorwise")


@pytest.mark.slow
def test_what_cannot_work_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        plain, summed = found["refused"]
        assert "layer '0'" in plain
        assert "ColwiseParallel" in plain
        assert "P(sum)" in summed or "Partial" in summed


@pytest.mark.slow
def test_what_is_not_finite_on_one_rank_spoils_the_scale_of_all(ranks: list[dict[str, Any]]) -> None:
    assert [float(found["reduced"]) for found in ranks] == [torch.inf, torch.inf]


def test_without_groups_nothing_is_exchanged() -> None:
    amax = torch.tensor(torch.nan)
    assert reduced(amax, ()) is amax
    assert not is_dtensor(nn.Linear(2, 2).weight)
