"""The three GEMMs of a linear layer: numbers, dtypes, memory, and everything a training script may do around them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autoprec.errors import UnsupportedError
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.plan import GemmStep
from autoprec.numerics.rounding import fast_bf16_gemm
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.conformance.backends import reference_gemms

DETERMINISTIC = [n for n, r in BUILTIN_RECIPES.items() if not r.stochastic_rounding]
MIXED = st.sampled_from([None, *(BUILTIN_RECIPES[n] for n in DETERMINISTIC)])


def tensors(m: int, k: int, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).requires_grad_()
    weight = (torch.randn(n, k, generator=generator) * 0.1).requires_grad_()
    bias = torch.randn(n, generator=generator).requires_grad_()
    return x, weight, bias, torch.randn(m, n, generator=generator) * 1e-3


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 70), st.integers(1, 150), st.integers(1, 80), MIXED, MIXED, MIXED)
def test_any_plan_matches_the_same_quantised_arithmetic_in_float64(m, k, n, fprop, dgrad, wgrad) -> None:
    plan = LayerPlan(fprop=fprop, dgrad=dgrad, wgrad=wgrad)
    x, weight, _, grad = tensors(m, k, n, seed=m)
    out = LinearExecution(plan)(x, weight, None)
    out.backward(grad)
    wanted = reference_gemms(x.detach(), weight.detach(), grad, plan)
    for found, gemm in ((out, "fprop"), (x.grad, "dgrad"), (weight.grad, "wgrad")):
        error = (found.detach().double() - wanted[gemm]).norm() / (wanted[gemm].norm() + 1e-30)
        # bfloat16 output rounding; next to nothing where the plan computes in float32
        assert error < (1e-5 if plan.recipe(gemm) is None else 4e-3)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_bias(name: str) -> None:
    x, weight, bias, grad = tensors(24, 32, 16)
    layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES[name]))
    out = layer(x, weight, bias)
    out.backward(grad)
    assert torch.allclose(out, layer(x, weight, None) + bias, atol=2e-2)
    assert (bias.grad - grad.sum(0)).norm() <= 1e-2 * grad.sum(0).norm()


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_output_dtypes_are_those_of_the_script(name: str, autocast: torch.dtype | None, dtype: torch.dtype) -> None:
    x, weight, bias, _ = (t.detach().to(dtype).requires_grad_() for t in tensors(8, 32, 16))
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        out = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES[name]))(x, weight, bias)
    expected = dtype if autocast is None or dtype is torch.float64 else autocast  # autocast leaves float64 alone
    recipe = BUILTIN_RECIPES[name]
    if (expected is autocast and recipe.wide_output) or (recipe.output == "fp32" and expected is torch.bfloat16):
        expected = torch.float32
    assert out.dtype is expected
    out.sum().backward()
    assert (x.grad.dtype, weight.grad.dtype, bias.grad.dtype) == (dtype, dtype, dtype)


def test_a_bf16_plan_under_autocast_is_autocast() -> None:
    x, weight, bias, _ = tensors(16, 64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["bf16"]))(x, weight, bias)
        theirs = F.linear(x, weight, bias)
    assert torch.equal(ours, theirs)
    assert len(saved_bytes(LayerPlan.uniform(BUILTIN_RECIPES["bf16"]))) == 2


def saved_bytes(plan: LayerPlan, m: int = 64, k: int = 128, n: int = 256) -> list[int]:
    """Bytes of what is kept for the backward pass, parameters not counted."""
    x, weight, bias, _ = tensors(m, k, n)
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() != weight.untyped_storage().data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        LinearExecution(plan)(x, weight, bias)
    return list(kept.values())


@pytest.mark.parametrize(("name", "limit"), [("fp8_tensorwise", 1.05), ("fp8_rowwise", 1.1), ("mxfp8", 1.1)])
def test_8_bit_codes_are_what_is_kept(name: str, limit: float) -> None:
    input_bytes, weight_bytes = 64 * 128, 256 * 128
    kept = sum(saved_bytes(LayerPlan.uniform(BUILTIN_RECIPES[name])))
    # where the product is float32, rounded values are kept as they are, in bfloat16
    limit = limit + 1.0 if name == "fp8_tensorwise" and not fast_bf16_gemm("cpu") else limit
    assert kept <= limit * (input_bytes + weight_bytes)
    # an input that wgrad reads as it came needs no copy
    assert sum(saved_bytes(LayerPlan(fprop=BUILTIN_RECIPES[name]))) <= 64 * 128 * 4 + 64


def end_step(layer: LinearExecution) -> None:
    """Let delayed scales learn what they have seen, as after an optimizer's step."""
    for scale in layer.quantizers.delayed.values():
        scale.roll()


@pytest.mark.parametrize("name", ["bf16", "fp8_rowwise", "fp8_delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_recomputes_the_same(name: str, reentrant: bool) -> None:
    plan = LayerPlan.uniform(BUILTIN_RECIPES[name])
    found = []
    for recompute in (False, True):
        x, weight, bias, grad = tensors(32, 64, 48)
        layer = LinearExecution(plan)
        for step in range(3):

            def body(x: torch.Tensor, layer=layer, weight=weight, bias=bias, step=step) -> torch.Tensor:
                return F.gelu(layer(x * 2**step, weight, bias))

            out = checkpoint(body, x, use_reentrant=reentrant) if recompute else body(x)
            out.backward(grad)
            end_step(layer)
        learned = {key: d.history for key, d in layer.quantizers.delayed.items()}
        found.append((x.grad, weight.grad, learned))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2].keys() == found[1][2].keys()
    assert all(torch.equal(history, found[1][2][key]) for key, history in found[0][2].items())


def test_gradients_accumulate_over_micro_batches() -> None:
    layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["fp8_rowwise"]))
    x, weight, bias, grad = tensors(32, 64, 48)
    layer(x, weight, bias).backward(grad)
    once = weight.grad.clone()
    layer(x, weight, bias).backward(grad)
    assert torch.equal(weight.grad, 2 * once)


def test_frozen_weights_and_first_layers_run_only_what_is_needed() -> None:
    layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["fp8_tensorwise"]))
    x, weight, bias, grad = tensors(8, 32, 16)
    layer(x.detach(), weight, bias).backward(grad)
    assert set(layer.executed) == {"fprop", "wgrad"}
    layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["fp8_tensorwise"]))
    layer(x, weight.detach(), bias).backward(grad)
    assert set(layer.executed) == {"fprop", "dgrad"}


def test_evaluation_teaches_delayed_scaling_nothing() -> None:
    layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["fp8_delayed"]))
    x, weight, bias, grad = tensors(8, 32, 16)
    layer(x, weight, bias).backward(grad)
    end_step(layer)
    before = [d.history.tolist() for d in layer.quantizers.delayed.values()]
    with torch.no_grad():
        layer(x * 100, weight, bias)
    layer(x * 100, weight, bias, training=False)
    end_step(layer)
    assert [d.history.tolist() for d in layer.quantizers.delayed.values()] == before


def test_double_backward_is_refused_rather_than_wrong() -> None:
    layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["fp8_tensorwise"]))
    x, weight, bias, _ = tensors(8, 32, 16)
    (grad,) = torch.autograd.grad(layer(x, weight, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        grad.sum().backward()


def test_a_copied_layer_goes_on_with_a_history_of_its_own() -> None:
    layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["fp8_delayed"]))
    x, weight, bias, _ = tensors(8, 32, 16)
    layer(x, weight, bias)
    end_step(layer)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x / 2, weight, bias), layer(x / 2, weight, bias))
    layer(x * 8, weight, bias)
    end_step(layer)
    device = torch.device("cpu")
    assert float(layer.state(device)["fprop.input.scale"]) * 4 < float(twin.state(device)["fprop.input.scale"])
    assert twin.plan == layer.plan


@pytest.mark.filterwarnings("ignore")  # Dynamo's own deprecations
@pytest.mark.parametrize("name", ["bf16", "fp8_rowwise", "mxfp8", "nvfp4"])
def test_compiled_graphs_are_whole_and_equal(name: str) -> None:
    plan = LayerPlan.uniform(BUILTIN_RECIPES[name])
    x, weight, bias, _ = tensors(16, 64, 32)
    eager = LinearExecution(plan)(x, weight, bias)
    layer = LinearExecution(plan)
    torch._dynamo.reset()
    traced: list[int] = []

    def backend(module: torch.fx.GraphModule, _inputs: object) -> object:
        traced.append(len(module.graph.nodes))
        return module.forward

    graph = torch.compile(layer, backend=backend, fullgraph=True)
    assert torch.equal(graph(x, weight, bias), eager)
    assert torch.equal(graph(x, weight, bias), eager)
    assert len(traced) == 1
    assert set(layer.executed) == {"fprop", "dgrad", "wgrad"}
    nn.init.zeros_(weight)
    assert torch.equal(graph(x, weight, bias), LinearExecution(plan)(x, weight, bias))


class _Twice(TorchFunctionMode):
    """Doubles what a layer's own code begins with in either pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.Tensor.reshape else out


@pytest.mark.filterwarnings("ignore")  # Dynamo's own deprecations
@pytest.mark.parametrize("compiled", [False, True])
def test_a_mode_around_the_model_sees_nothing_of_how_a_layer_casts(compiled: bool) -> None:
    x, weight, bias, grad = tensors(16, 64, 32)
    layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["fp8_rowwise"]))
    torch._dynamo.reset()
    call: Any = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    plain = layer(x, weight, bias)
    expected = torch.autograd.grad(plain, (x, weight), grad)
    with _Twice():
        out = call(x, weight, bias)
    assert torch.equal(out, plain)
    assert all(map(torch.equal, torch.autograd.grad(out, (x, weight), grad), expected))


@pytest.mark.filterwarnings("ignore")  # Dynamo's own deprecations
def test_stochastic_rounding_of_gradients_is_part_of_the_graph_and_another_one_in_every_step() -> None:
    layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["nvfp4"]))
    x, weight, bias, grad = tensors(32, 64, 48)
    torch._dynamo.reset()
    graph = torch.compile(layer, backend="eager", fullgraph=True)
    before = torch.get_rng_state()

    def gradient(call: Any, factor: float = 1.0) -> torch.Tensor:
        (found,) = torch.autograd.grad(call(x, weight, bias), x, grad * factor)
        return found / factor

    exact, drawn = grad @ weight.detach(), [gradient(graph, 1 + k / 64) for k in range(16)]
    assert torch.equal(drawn[0], gradient(graph))
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.get_rng_state(), before)
    errors = [float((d - exact).norm() / exact.norm()) for d in (drawn[0], torch.stack(drawn).mean(0))]
    assert errors[0] < 1.5 * float((gradient(layer) - exact).norm() / exact.norm())
    assert errors[1] < 0.8 * errors[0]  # what is left is the weight's rounding, which is to nearest


class Products(TorchDispatchMode):
    """Notes the dtypes in which matrices are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
def test_without_bf16_units_bf16_is_float32_arithmetic_on_bf16_values(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LayerPlan.uniform(BUILTIN_RECIPES["bf16"])
    found = []
    for emulated in (False, True):
        monkeypatch.setattr("autoprec.numerics.linear.fast_bf16_gemm", lambda device: False)
        x, weight, bias, grad = tensors(32, 64, 48)
        layer = LinearExecution(plan, emulates_casts=emulated)
        with Products() as products:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = layer(x, weight, bias)
            out.backward(grad.to(out.dtype))
        assert products.dtypes == {torch.float32 if emulated else torch.bfloat16}
        assert layer.executed == dict.fromkeys(("fprop", "dgrad", "wgrad"), "bf16")
        found.append((out.detach(), x.grad, weight.grad, bias.grad))
    for real, ours in zip(*found, strict=True):
        assert (real.dtype, real.shape) == (ours.dtype, ours.shape)
        rounded = ours.to(torch.bfloat16).to(ours.dtype)
        assert torch.equal(ours, rounded)  # every result is a bfloat16 value
        assert (real - ours).float().norm() <= 2e-3 * real.float().norm()  # half a unit here and there


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("name", [n for n, recipe in BUILTIN_RECIPES.items() if recipe.scaled])
def test_values_and_codes_train_alike_bit_by_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.numerics.gemm.fast_bf16_gemm", lambda device: False)
    found = []
    for values in (True, False):
        monkeypatch.setattr(GemmStep, "values", property(lambda step, on=values: on))
        x, weight, bias, grad = tensors(40, 72, 56)
        layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES[name]))
        for _ in range(3):
            out = layer(x, weight, bias)
            out.backward(grad)
        found.append((out.detach(), x.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp32_output_is_the_sum_of_16_bit_products_unrounded(dtype: torch.dtype) -> None:
    """Values and gradients are those of autocast's bf16 product, but for the rounding of the result."""
    x, weight, bias, grad = (t.detach().to(dtype).requires_grad_() for t in tensors(24, 64, 40))
    layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["bf16_fp32_output"]))
    out = layer(x, weight, bias)
    assert out.dtype is torch.float32
    exact = F.linear(x.detach().bfloat16().double(), weight.detach().bfloat16().double(), bias.detach().double())
    assert (out - exact).abs().max() < 1e-5 * exact.abs().max()
    assert (out.bfloat16() - exact).abs().max() > 1e-3 * exact.abs().max()  # what is spared
    found = torch.autograd.grad(out, (x, weight, bias), grad.float())
    with torch.autocast("cpu", torch.bfloat16):
        wanted = torch.autograd.grad(F.linear(x, weight, bias).float(), (x, weight, bias), grad.float())
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype is theirs.dtype
        assert (ours.float() - theirs.float()).norm() < 1e-2 * theirs.float().norm()
    assert layer.executed == {"fprop": "bf16 -> fp32", "dgrad": "bf16", "wgrad": "bf16"}


def test_a_weight_gradient_that_is_asked_for_in_fp32_is_not_rounded() -> None:
    """A rule that named it was ignored without a word; with none, wgrad of a layer with an FP32 output is rounded."""
    from autoprec.policy import policy_from_dict
    from autoprec.policy.space import Choice

    x, weight, _, grad = (t.detach().requires_grad_() for t in tensors(24, 64, 40))
    exact = grad.detach().bfloat16().double().t() @ x.detach().bfloat16().double()
    recipes = {name: BUILTIN_RECIPES[name] for name in ("bf16", "bf16_fp32_output")}
    for recipe in recipes:
        rule = {"match": "*", "recipe": recipe, "gemms": {"wgrad": "bf16_fp32_output"}}
        document = {
            "schema": "autoprec.policy/1",
            "recipes": {n: r.to_dict() for n, r in recipes.items()},
            "layers": [rule],
        }
        plan = policy_from_dict(document).plan_of_rule(policy_from_dict(document).layers[0])
        assert plan == Choice.parse(f"{recipe}/wgrad=bf16_fp32_output").plan(recipes)
        layer = LinearExecution(plan)
        (found,) = torch.autograd.grad(layer(x, weight, None), weight, grad.to(layer(x, weight, None).dtype))
        assert layer.executed["wgrad"] == "bf16 -> fp32"
        assert (found - exact).abs().max() < 1e-5 * exact.abs().max()
        usual = LinearExecution(LayerPlan.uniform(recipes[recipe]))
        (rounded,) = torch.autograd.grad(usual(x, weight, None), weight, grad.to(usual(x, weight, None).dtype))
        assert torch.equal(rounded, rounded.bfloat16().float())


def test_an_fp32_output_of_fp16_products_does_not_overflow() -> None:
    x, weight = torch.full((16, 128), 64.0), torch.full((8, 128), 64.0)
    wide = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["fp16_fp32_output"]))(x, weight, None)
    assert torch.equal(wide, torch.full((16, 8), 128 * 64.0 * 64.0))
    assert LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["fp16"]))(x, weight, None).isinf().all()


@pytest.mark.parametrize("shape", [(4, 32), (2, 3, 32), (32,)])
def test_an_output_may_be_changed_in_place(shape: tuple[int, ...]) -> None:
    """Residuals (``x += ...``) and ``nn.ReLU(inplace=True)`` do so."""
    for recipe in BUILTIN_RECIPES.values():
        layer, weight = LinearExecution(LayerPlan.uniform(recipe)), torch.randn(16, 32, requires_grad=True)
        x = torch.randn(shape, requires_grad=True)
        F.relu_(layer(x, weight, None).mul_(2)).sum().backward()
        changed, x.grad = x.grad, None
        F.relu(layer(x, weight, None) * 2).sum().backward()
        assert (changed - x.grad).norm() <= 0.1 * x.grad.norm()


@pytest.mark.parametrize("layout", ["sparse_coo", "jagged"])
def test_an_input_without_rows_is_refused_by_the_layers_name(layout: str) -> None:
    x, weight, _, _ = tensors(8, 16, 16)
    x = x.detach()
    parts = [x[:3], x[3:]]
    given = torch.nested.nested_tensor(parts, layout=torch.jagged) if layout == "jagged" else x.to_sparse()
    layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["int8"]), name="encoder.fc")
    with pytest.raises(UnsupportedError, match=rf"encoder\.fc.*{layout} input"):
        layer(given, weight, None)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own decompositions of it
def test_forward_mode_differentiation_is_refused_by_the_layers_name() -> None:
    x, weight, _, _ = tensors(8, 16, 16)
    layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["int8"]), name="encoder.fc")
    with forward_ad.dual_level():
        layer(x.detach(), weight, None)  # which nothing is differentiated by
        with pytest.raises(UnsupportedError, match=r"encoder\.fc.*transforms"):
            layer(forward_ad.make_dual(x.detach(), x.detach()), weight, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4", "int8"])
def test_the_scripts_default_dtype_changes_nothing(name: str, dtype: torch.dtype) -> None:
    """Reference code of language models sets bfloat16, physics-informed networks float64."""
    recipe = BUILTIN_RECIPES[name].model_copy(update={"stochastic_rounding": True} if name == "int8" else {})
    x, weight, _, grad = tensors(24, 32, 16)
    found = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            layer = LinearExecution(LayerPlan.uniform(recipe))
            layer.quantizers.prepare(layer.delayed_operands().values(), torch.device("cpu"))
            for step in range(3):
                x.grad = weight.grad = None
                out = layer(x * (1.1 + step), weight, None)
                out.backward(grad)
                for history in layer.quantizers.delayed.values():
                    history.roll()
            state = layer.state(torch.device("cpu")).values()
            found.append([out.detach(), x.grad, weight.grad, *(v for v in state if v.is_floating_point())])
        finally:
            torch.set_default_dtype(torch.float32)
    assert [v.dtype for v in found[0]] == [v.dtype for v in found[1]]
    assert all(map(torch.equal, *found))
