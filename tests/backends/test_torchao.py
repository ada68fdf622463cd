"""The torchao backend: agreement with the emulation, and what torchao cannot express."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.backends import get
from autoprec.backends.torchao import TorchaoBackend, float8_config
from autoprec.errors import UnsupportedError
from autoprec.numerics.linear import LinearExecution
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe

pytest.importorskip("torchao", reason="torchao is not installed: pip install --no-deps torchao")

ROW, TENSOR, BF16 = (BUILTIN_RECIPES[n] for n in ("fp8_rowwise", "fp8_tensorwise", "bf16"))
PLANS = {
    "tensor": LayerPlan.uniform(TENSOR),
    "row": LayerPlan.uniform(ROW),
    "mxfp8": LayerPlan.uniform(BUILTIN_RECIPES["mxfp8"]),
    "row, wgrad kept": LayerPlan(fprop=ROW, dgrad=ROW),
    "fprop only": LayerPlan(fprop=TENSOR),
    "mxfp8, wgrad kept": LayerPlan(fprop=BUILTIN_RECIPES["mxfp8"], dgrad=BUILTIN_RECIPES["mxfp8"]),
}


@pytest.mark.parametrize("name", PLANS)
def test_it_computes_what_the_emulation_computes(name: str) -> None:
    torch.manual_seed(0)
    module, grad = nn.Linear(96, 128), torch.randn(64, 128) * 1e-3
    results = []
    for run in (TorchaoBackend().bind(PLANS[name], module, name="x", seed=0), LinearExecution(PLANS[name])):
        module.zero_grad()
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
        run(x, module.weight, module.bias).backward(grad)
        results.append((run(x, module.weight, module.bias).detach(), x.grad, module.weight.grad.clone(), run.executed))
    for theirs, ours in zip(*(r[:3] for r in results), strict=True):
        assert (theirs - ours).norm() / theirs.norm() < 2.5e-3
    assert results[0][3] == results[1][3]


def test_on_a_model_with_layers_it_does_not_run() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    policy = Policy.model_validate(
        {
            "recipes": {"f": ROW, "b": BF16},
            "layers": [{"match": "0", "recipe": "f"}, {"match": "2", "recipe": "b"}],
            "activations": "bf16",
        }
    )
    policy.apply(model, backend="torchao")
    model(torch.randn(13, 64)).sum().backward()
    report = policy.audit(model)
    assert report.ok, report.to_json()
    assert [row.backend for row in report.layers] == ["torchao", "native"]
    assert "torchao's emulation" in report.layers[0].reason


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (LayerPlan.uniform(BF16), "nothing for torchao"),
        (LayerPlan(fprop=ROW, dgrad=TENSOR), "powers of two"),
        (LayerPlan(dgrad=TENSOR, wgrad=BUILTIN_RECIPES["fp8_tensorwise_e4m3"]), "one format in both"),
        (LayerPlan(fprop=BUILTIN_RECIPES["mxfp8"]), "fprop and dgrad"),
        (LayerPlan.uniform(BUILTIN_RECIPES["fp8_block"]), "no scales in blocks"),
    ],
)
def test_what_it_cannot_express_is_refused(plan: LayerPlan, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        TorchaoBackend().bind(plan, nn.Linear(32, 32), name="x", seed=0)


def test_every_no_has_a_reason() -> None:
    backend = get("torchao")
    asks = {"gemm": "fprop", "m": 0, "k": 40, "n": 32, "device": "cpu"}
    epsilon = Recipe.model_validate({"format": "fp8", "scaling": {"amax_epsilon": 1e-3}})
    assert "delayed" in backend.capability(BUILTIN_RECIPES["fp8_delayed"], **asks).reason
    assert "no scales in blocks" in backend.capability(BUILTIN_RECIPES["fp8_block"], **asks).reason
    assert "K = 40 is not a multiple of 32" in backend.capability(BUILTIN_RECIPES["mxfp8"], **asks).reason
    assert "amax_epsilon" in backend.capability(epsilon, **asks).reason
    assert "int8" in backend.capability(BUILTIN_RECIPES["int8"], **asks).reason


def test_the_configuration_says_what_the_plan_says() -> None:
    config = float8_config(LayerPlan(fprop=ROW, dgrad=ROW), emulate=True)
    assert config.round_scales_to_power_of_2
    assert config.emulate
    assert not config.gemm_config_output.use_fast_accum
    assert config.cast_config_input.scaling_type.name == "DYNAMIC"
    assert config.cast_config_input_for_grad_weight.scaling_type.name == "DISABLED"
