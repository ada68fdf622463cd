"""The conformance suite on every backend of ours, and on one that is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoprec.backends import BACKENDS, Backend, Capability, Execution, get
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.conformance.backends import PLANS, BackendSuite, BoundLayer, reference_gemms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore")]  # torchao warns on import
if DEVICE == "cuda":  # so that -m gpu, which the day on a GPU runs, selects the suite there
    pytestmark.append(pytest.mark.gpu)


class TestEmulated(BackendSuite):
    backend = get("emulated")
    device = DEVICE

    @pytest.mark.parametrize("name", PLANS)
    def test_it_runs_everything(self, name: str) -> None:
        assert self.refusal(PLANS[name]) is None


class TestNative(BackendSuite):
    backend = get("native")
    device = DEVICE


class TestTorchao(BackendSuite):
    backend = get("torchao")
    device = DEVICE


class TestTransformerEngine(BackendSuite):
    backend = get("transformer_engine")
    device = DEVICE
    __test__ = backend.available(DEVICE).ok

    def known_gap(self, plan: LayerPlan, check: str) -> str:
        delayed = plan.fprop is not None and plan.fprop.scaling is not None and plan.fprop.scaling.scale == "delayed"
        if check == "test_non_finite_values_show" and delayed:
            return "TE's cast saturates infinities under a scale from earlier steps; NaN shows"
        return ""


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_that_is_not_available_says_why(name: str) -> None:
    available = get(name).available(DEVICE)
    assert available.ok or len(available.reason) > 10


class WrongExecution(Execution):
    """Answers one percent too much, loses NaN, and draws from the global random stream."""

    def __call__(self, input, weight, bias, *, training=True):
        torch.rand(1)
        return (
            get("emulated").bind(self.plan, nn.Linear(1, 1), name="x", seed=0)(input.nan_to_num(), weight, bias) * 1.01
        )


class Wrong(Backend):
    """Claims everything, and returns wrong numbers, so that the suite is seen to fail."""

    name = "wrong"

    def available(self, device: str) -> Capability:
        return Capability(True, "yes")

    def capability(self, recipe, **asks) -> Capability:
        return Capability(recipe.format != "int8", "" if recipe.format == "int8" else "yes")

    def bind(self, plan, module, *, name, seed):
        return WrongExecution(plan, backend=self.name)


def wrong_suite() -> BackendSuite:
    suite = BackendSuite()
    suite.backend = Wrong()
    return suite


@pytest.mark.parametrize(
    "check",
    [
        "test_same_arithmetic_as_in_float64",
        "test_says_what_ran",
        "test_non_finite_values_show",
        "test_the_global_random_stream_is_left_alone",
    ],
)
def test_the_suite_finds_what_is_wrong(check: str) -> None:
    with pytest.raises(AssertionError):
        getattr(wrong_suite(), check)(PLANS["fp8_tensorwise"])


@pytest.mark.parametrize("check", ["test_a_ragged_batch", "test_an_empty_batch", "test_evaluation"])
def test_the_suite_passes_what_is_right(check: str) -> None:
    getattr(wrong_suite(), check)(PLANS["fp8_tensorwise"])


def test_a_refusal_without_a_reason_is_empty_and_fails_in_the_fixture() -> None:
    assert wrong_suite().refusal(PLANS["int8"]) == ""
    assert wrong_suite().refusal(PLANS["bf16"]) is None


def test_the_reference_multiplies_quantised_operands() -> None:
    layer = BoundLayer(get("emulated"), PLANS["bf16"], "cpu")
    weight = layer.module.weight.detach()
    exact = reference_gemms(layer.x, weight, layer.grad, LayerPlan())
    eight = reference_gemms(layer.x, weight, layer.grad, LayerPlan.uniform(BUILTIN_RECIPES["fp8_tensorwise"]))
    assert torch.equal(exact["fprop"], layer.x.double() @ weight.double().t())
    assert torch.equal(exact["dgrad"], layer.grad.double() @ weight.double())
    assert torch.equal(exact["wgrad"], layer.grad.double().t() @ layer.x.double())
    for gemm in exact:
        error = (eight[gemm] - exact[gemm]).norm() / exact[gemm].norm()
        assert 0.005 < error < 0.1, "FP8 rounds by a few percent"
