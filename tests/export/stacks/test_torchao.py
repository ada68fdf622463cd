"""torchao: configs that fit its constraints, training under the export, and FP8 weights gathered by FSDP2.

The gathering runs on two real ranks, with the numbers it has without.
"""

from __future__ import annotations

import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoprec import Policy
from autoprec.applying.policy import apply_policy
from autoprec.export import Request, export, exporter
from autoprec.export.stacks.torchao import gathers_float8, nearest_float8
from autoprec.policy import LayerPlan, OperatorPolicy
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.optional import is_available
from tests.conformance.exporters import POLICIES
from tests.export.readers import load_source
from tests.export.toys import distance, one_rule, toy_model
from tests.warm import run_ranks


def test_torchao_never_shares_a_cast_config_and_always_names_its_dtype() -> None:
    source = export(POLICIES["mixed"], "torchao").files["precision_torchao.py"]
    casts = re.findall(r"CastConfig\(([^)]*)\)", source)
    assert len(casts) % 6 == 0
    assert all("target_dtype=torch.float8_" in cast for cast in casts)


@pytest.mark.skipif(not is_available("torchao"), reason="torchao is not installed")
@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise"])
def test_torchao_trains_under_the_export_and_agrees_with_apply(name: str) -> None:
    policy = one_rule(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = load_source(
            export(policy, "torchao", allow_lossy=True).files["precision_torchao.py"], "precision_torchao"
        )
        theirs = module.apply(toy_model().to(torch.bfloat16), emulate=True)
        ours = toy_model().to(torch.bfloat16)
        apply_policy(policy, ours, backend="emulated")
        x = torch.randn(64, 160, dtype=torch.bfloat16)
        exact = toy_model()(x.float())
        error = (ours(x).float() - exact).norm() / exact.norm()
        gap = (theirs(x) - ours(x)).float().norm() / exact.norm()
        theirs(x).sum().backward()
    assert gap < 0.3 * error
    assert theirs[0].weight.grad is not None


@pytest.mark.skipif(not is_available("torchao.float8"), reason="torchao is not installed")
@pytest.mark.parametrize("wide", [True, False])
def test_the_exported_torchao_module_returns_what_the_policy_says_of_the_output(wide: bool) -> None:
    operators = OperatorPolicy(output="fp32" if wide else "keep")
    policy = one_rule("bf16").model_copy(update={"activations": "bf16", "operators": operators})
    module = load_source(export(policy, "torchao", allow_lossy=True).files["precision_torchao.py"], "precision_torchao")
    model = module.apply(toy_model())
    with module.autocast("cpu"):
        out = model(torch.randn(4, 160))
    assert out.dtype is (torch.float32 if wide else torch.bfloat16)


@pytest.mark.skipif(not is_available("torchao.float8"), reason="torchao is not installed")
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "fp32"])
@pytest.mark.parametrize("high", [("dgrad",), ("wgrad",), ("fprop",), ("dgrad", "wgrad")], ids="+".join)
@pytest.mark.filterwarnings("ignore")
def test_a_product_in_high_precision_trains_and_agrees_with_apply(high: tuple[str, ...], autocast: bool) -> None:
    """torchao multiplies what it is given: a bf16 gradient by a float32 weight would raise in backward."""
    policy = one_rule("fp8_tensorwise", gemms=dict.fromkeys(high, "bf16"))
    policy = policy.model_copy(update={"activations": "bf16" if autocast else "keep"})
    module = load_source(export(policy, "torchao", allow_lossy=True).files["precision_torchao.py"], "precision_torchao")
    ours, theirs, exact = toy_model(), module.apply(toy_model(), emulate=True), toy_model()
    apply_policy(policy, ours, backend="emulated")
    data = torch.randn(64, 160)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        x = data.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and model is theirs):
            low = torch.bfloat16 if autocast and model is not exact else torch.float32  # of the layer before
            loss = model(x.to(low)).float().square().mean()
        loss.backward()  # outside autocast, which would cast the operands of torchao's own products
        return [tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None]

    reference, mine = gradients(exact), gradients(ours)
    assert distance(gradients(theirs), mine) < distance(mine, reference)


def test_the_nearest_plan_has_one_dtype_per_operand_and_current_scales() -> None:
    row, tensor, bf16 = (BUILTIN_RECIPES[name] for name in ("fp8_rowwise", "fp8_tensorwise", "bf16"))
    assert nearest_float8(LayerPlan.uniform(row)) == LayerPlan.uniform(row)
    blocks = nearest_float8(LayerPlan.uniform(BUILTIN_RECIPES["fp8_block"]))
    assert [r.scaling.granularity for r in blocks.scaled if r.scaling] == ["row"] * 3
    delayed = nearest_float8(LayerPlan.uniform(BUILTIN_RECIPES["fp8_delayed"]))
    assert {r.scaling.scale for r in delayed.scaled if r.scaling} == {"current"}
    mixed = nearest_float8(LayerPlan(fprop=row, dgrad=tensor, wgrad=bf16))
    assert mixed == LayerPlan(fprop=row, dgrad=row, wgrad=None), "in the dtype of the activations"
    assert nearest_float8(LayerPlan.uniform(BUILTIN_RECIPES["nvfp4"])) == LayerPlan.uniform(bf16)


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
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.save([_train(rank, gather) for gather in (False, True)], Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not is_available("torchao.float8"), reason="torchao is not installed")
def test_the_weights_travel_in_fp8_and_the_losses_are_those_without(tmp_path: Path) -> None:
    ended = run_ranks(lambda rank: _rank(rank, str(tmp_path)), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
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
