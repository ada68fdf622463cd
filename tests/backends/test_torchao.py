"""The torchao backend: agreement with the emulation, and what torchao cannot express."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autoprec import Policy
from autoprec.backends import get, torchao
from autoprec.backends.torchao import TorchaoBackend, float8_config
from autoprec.errors import UnsupportedError
from autoprec.numerics.linear import LinearExecution
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe
from tests.backends import block_kernels
from tests.backends.block_kernels import BLOCK, compare, multiplied, on_cpu
from tests.conformance.backends import BackendSuite

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
    assert "Triton kernels for NVIDIA GPUs" in backend.capability(BUILTIN_RECIPES["fp8_block"], **asks).reason
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


def triton_fp8_gemm_1x128_128x128(
    a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor, block_size: int = 128, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """``[M, K]`` by ``[K, N]``, with the checks of torchao's function; scales of the weight's squares."""
    assert a.stride(-1) == b.stride(-2) == a_s.stride(-2) == b_s.stride(-2) == 1
    assert a_s.shape[0] % 256 == 0  # kernels read the scales of whole tiles, unmasked
    assert b_s.shape[1] % 2 == 0
    return multiplied((a, b.t()), (a_s, b_s.t())).to(out_dtype)


def triton_fp8_gemm_1x128_128x1(
    a: Tensor, b: Tensor, a_s: Tensor, b_s: Tensor, block_size: int = 128, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The same with scales of tiles on both sides."""
    assert a.stride(-1) == b.stride(-2) == a_s.stride(-2) == b_s.stride(-1) == 1
    assert a_s.shape[0] % 256 == b_s.shape[1] % 256 == 0
    return multiplied((a, b.t()), (a_s, b_s.t())).to(out_dtype)


PRODUCTS = (triton_fp8_gemm_1x128_128x128, triton_fp8_gemm_1x128_128x1)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for a Hopper GPU with torchao's block products."""
    module = types.ModuleType(torchao._BLOCKS)
    for product in PRODUCTS:
        setattr(module, product.__name__, product)
    monkeypatch.setitem(sys.modules, torchao._BLOCKS, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_the_stand_ins_have_the_signatures_of_the_installed_torchao() -> None:
    spec = importlib.util.find_spec("torchao")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "prototype/blockwise_fp8_training/kernels.py").read_text(encoding="utf-8")
    theirs = {node.name: node.args for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for product in PRODUCTS:
        ours = inspect.signature(product).parameters
        assert [argument.arg for argument in theirs[product.__name__].args] == list(ours)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("tokens", [256, 101])
@pytest.mark.parametrize("name", ["block", "wgrad in bf16", "wgrad alone"])
def test_blocks_compute_what_the_emulation_computes(name: str, tokens: int) -> None:
    compare(TorchaoBackend(), block_kernels.PLANS[name], tokens=tokens)
    compare(TorchaoBackend(), block_kernels.PLANS["float32 scales"], tokens=tokens, most=4e-3)


@pytest.mark.usefixtures("products")
class TestBlocks(BackendSuite):
    backend = on_cpu(TorchaoBackend())

    def refusal(self, plan: LayerPlan) -> str | None:
        blocks = any(recipe is not None and "block" in recipe.describe() for recipe in plan.recipes)
        return super().refusal(plan) if blocks else "not in blocks"


def test_blocks_that_no_kernel_runs_are_refused(products: None, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, asks = TorchaoBackend(), {"gemm": "fprop", "m": 0, "k": 256, "n": 384, "device": "cuda"}
    assert backend.capability(BLOCK, **asks)
    assert "N = 100 is not a multiple of 128" in backend.capability(BLOCK, **asks | {"n": 100}).reason
    with monkeypatch.context() as amd:
        amd.setattr(torch.version, "hip", "6.4")
        assert "NVIDIA GPUs only" in backend.capability(BLOCK, **asks).reason
    with pytest.raises(UnsupportedError, match="row"):
        backend.bind(LayerPlan(fprop=BLOCK, wgrad=ROW), nn.Identity(), name="x", seed=0)
    monkeypatch.setitem(sys.modules, torchao._BLOCKS, None)
    assert "not installed" in backend.capability(BLOCK, **asks).reason  # Triton is missing
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    assert "9.0, this device has 8.9" in backend.capability(BLOCK, **asks).reason


INTERPRETED = """\
from torchao.prototype.blockwise_fp8_training import kernels
from autoprec.backends.torchao import TorchaoBackend
from tests.backends.block_kernels import PLANS, compare
import torch
for name in ("triton_fp8_gemm_1x128_128x128_kernel", "triton_fp8_gemm_1x128_128x1_kernel"):
    getattr(kernels, name).configs = getattr(kernels, name).configs[:1]  # nothing to tune
for tokens in (128, 101):  # without a rounding of sums to bfloat16, which Triton's interpreter cuts off
    compare(TorchaoBackend(), PLANS["float32 scales"], tokens=tokens, dtype=torch.float32, most=1e-6)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_torchaos_own_kernels_in_tritons_interpreter() -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
