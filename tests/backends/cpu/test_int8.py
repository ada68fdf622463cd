"""INT8 on CPUs: the library's casts and products are torch's, bit for bit, and both are what integers give."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autoprec.applying.policy import apply_policy
from autoprec.backends import choose
from autoprec.backends.cpu import int8
from autoprec.backends.cpu.int8 import Int8Casts, int8_multiply, int8_parts, int8_sums
from autoprec.backends.cpu.library import library
from autoprec.graph.recorder import record_step
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.operand import QuantizerState
from autoprec.numerics.plan import compile_plan, multiply_emulated
from autoprec.numerics.quantize import dequantize, quantize, spec_of
from autoprec.policy import LayerPlan, Policy
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, Recipe
from autoprec.trial.inside.forking import holds_in_fork

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler here")

RECIPES = ("int8", "int8_tensor")


def recipe(granularity: str, **scaling: object) -> Recipe:
    return Recipe.model_validate({"format": "int8", "scaling": {"granularity": granularity, **scaling}})


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    x[::5] = 0.0
    x = x.to(dtype)
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "strided":
        return torch.stack([x, -x], -1)[..., 0]
    if layout == "padded":
        return torch.cat([x, x], 1)[:, :columns]
    return x[:1].expand(rows, columns) if layout == "expanded" else x


SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 70))
LAYOUTS = st.sampled_from(["plain", "transposed", "strided", "padded", "expanded"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SCALINGS = st.fixed_dictionaries(
    {
        "power_of_2": st.booleans(),
        "amax_epsilon": st.sampled_from([0.0, 1e-3]),
        "granularity": st.sampled_from(["row", "tensor"]),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    SHAPES,
    DTYPES,
    LAYOUTS,
    SCALINGS,
    st.sampled_from(["input", "weight", "grad_output"]),
    st.sampled_from([0, 1e-42, 1e30, float("inf"), float("nan")]),
)
def test_casts_are_those_of_torchs_operators(shape, dtype, layout, scaling, operand, odd) -> None:
    x = matrix(*shape, dtype, layout, seed=shape[0])
    if odd and layout != "expanded":
        x[-1, -1] = odd
    gemms = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}[operand]
    specs = [spec_of(recipe(**scaling), gemm, operand) for gemm in gemms]
    for asked in (specs, [specs[0], None], [None, specs[1]]):
        made = Int8Casts(QuantizerState()).pair(x, *asked, operand)
        for spec, ours in zip(asked, made, strict=True):
            assert (ours is None) == (spec is None)
            if ours is None:
                continue
            theirs = quantize(x, spec, operand=operand)
            assert torch.equal(ours.scale.nan_to_num(-1.0), theirs.scale.nan_to_num(-1.0))
            known = theirs.scale.isfinite().expand(shape)
            assert torch.equal(ours.codes[known], theirs.codes[known])
            assert (ours.spec, ours.rows, ours.columns) == (spec, *shape)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(1, 40),
    st.integers(1, 40),
    DTYPES,
    st.sampled_from(RECIPES),
    LAYOUTS,
    LAYOUTS,
    st.booleans(),
)
def test_a_layers_three_products_are_the_emulated_ones(m, k, n, dtype, name, x_layout, grad_layout, units) -> None:
    """Empty batches, single rows and columns, rows of zeros and every layout, with and without integer units."""
    found = []
    plan = LayerPlan.uniform(BUILTIN_RECIPES[name])
    for parts in (int8_parts(plan, nn.Linear(1, 1), QuantizerState()), {}):
        assert bool(parts) or len(found) == 1
        x, w = matrix(m, k, dtype, x_layout, m).requires_grad_(), matrix(n, k, dtype, "plain", n).requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            if parts and not units:
                patch.setattr(int8, "exact_sums", lambda *_: False)
            out = LinearExecution(plan, **parts)(x, w, None)
            out.backward(matrix(m, n, dtype, grad_layout, m + 1))
        found.append((out, x.grad, w.grad))
    assert all(a.dtype is dtype and torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore")  # Dynamo's own deprecations
# Each takes seconds to compile: every recipe, and everything that a weight's gradient may run in, once.
@pytest.mark.parametrize(("name", "wgrad"), [("int8", "same"), ("int8", "bf16"), ("int8_tensor", None)])
def test_what_compiles_is_what_runs_uncompiled_in_one_graph(name: str, wgrad: str | None) -> None:
    last = BUILTIN_RECIPES[name] if wgrad == "same" else BUILTIN_RECIPES.get(wgrad or "")
    plan = LayerPlan(fprop=BUILTIN_RECIPES[name], dgrad=BUILTIN_RECIPES[name], wgrad=last)
    layer = nn.Linear(48, 32)
    run = choose("auto", "cpu").bind(plan, layer, name="x", seed=0)
    found = []
    for call in (run, torch.compile(lambda *given: run(*given), fullgraph=True)):
        x = matrix(24, 48, torch.float32, "plain", 1).requires_grad_()
        layer.zero_grad()
        out = call(x, layer.weight, layer.bias)
        out.square().sum().backward()
        found.append((out, x.grad, layer.weight.grad, layer.bias.grad))
    for which, (a, b) in enumerate(zip(*found, strict=True)):
        # without bf16 units the compiler keeps the float32 sums of wgrad, which eager mode rounds
        close = 2**-7 if wgrad == "bf16" and which == 2 else 1e-5
        torch.testing.assert_close(a, b, rtol=close, atol=close * float(b.abs().max()))
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("name", RECIPES)
def test_codes_are_what_is_saved_for_backward(name: str) -> None:
    layer = nn.Linear(64, 32, bias=False)
    run = choose("auto", "cpu").bind(LayerPlan.uniform(BUILTIN_RECIPES[name]), layer, name="x", seed=0)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        run(torch.randn(128, 64), layer.weight, None)
    assert max(x.numel() * x.itemsize for x in saved) <= 128 * 64


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
def test_what_is_not_finite_shows_where_it_does_in_float32(
    operand: str, bad: float, name: str, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not units:
        monkeypatch.setattr(int8, "exact_sums", lambda *_: False)
    layer = nn.Linear(16, 8, bias=False)
    x, grad = torch.randn(4, 16), torch.randn(4, 8)
    with torch.no_grad():
        {"input": x, "weight": layer.weight, "grad_output": grad}[operand][2, 3] = bad
    run = choose("native", "cpu").bind(LayerPlan.uniform(BUILTIN_RECIPES[name]), layer, name="x", seed=0)
    x.requires_grad_()
    found = []
    for call in (lambda: layer(x), lambda: run(x, layer.weight, None)):
        x.grad = layer.weight.grad = None
        out = call()
        out.backward(grad)
        found.append([~made.isfinite() for made in (out, x.grad, layer.weight.grad)])
    for exact, ours in zip(*found, strict=True):
        # one scale for the whole operand: the whole product, where a scale a row spoils what float32 spoils
        assert torch.equal(ours, exact if name == "int8" else exact.any().expand(ours.shape))


@pytest.mark.parametrize("name", RECIPES)
def test_batches_without_a_token_give_no_output_and_zero_gradients(name: str) -> None:
    layer = nn.Linear(16, 8)
    run = choose("native", "cpu").bind(LayerPlan.uniform(BUILTIN_RECIPES[name]), layer, name="x", seed=0)
    for shape in ((0, 16), (3, 0, 16)):
        x = torch.zeros(shape, requires_grad=True)
        layer.zero_grad()
        out = run(x, layer.weight, layer.bias)
        out.sum().backward()
        assert (out.shape, x.grad.shape) == ((*shape[:-1], 8), shape)
        assert not layer.weight.grad.any()
        assert not layer.bias.grad.any()


@pytest.mark.parametrize("shared", [("first",), ("second",), ("first", "second")])
def test_scales_without_a_dimension_are_one_for_the_whole(shared: tuple[str, ...]) -> None:
    steps = compile_plan(LayerPlan.uniform(BUILTIN_RECIPES["int8"]), torch.float32, "cpu", {})
    operands = {}
    for which, rows, spec in (("first", 5, steps.fprop.first), ("second", 7, steps.fprop.second)):
        made = quantize(torch.randn(rows, 9), spec, operand="input")
        operands[which] = replace(made, scale=torch.tensor(0.25)) if which in shared else made
    a, b = operands["first"], operands["second"]
    scales = [one.scale.reshape(-1, 1) for one in (a, b)]
    exact = (a.codes.double() * scales[0]) @ (b.codes.double() * scales[1]).t()
    out = int8_multiply(a, b, steps.fprop, torch.float32)
    torch.testing.assert_close(out.double(), exact, rtol=3e-7, atol=0)
    assert torch.equal(out, multiply_emulated(a, b, steps.fprop, torch.float32))


def test_threads_change_nothing() -> None:
    specs = [spec_of(BUILTIN_RECIPES["int8"], gemm, "input") for gemm in ("fprop", "wgrad")]
    x = torch.randn(1001, 333)

    def equal() -> bool:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(Int8Casts(QuantizerState()).pair(x, *specs, "input"))
        return all(torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale) for a, b in zip(*found, strict=True))

    assert holds_in_fork(equal)  # or forks of this process, which are other tests' trials, would wait for its threads


def test_other_dtypes_devices_and_kinds_of_tensors_are_left_to_torch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    plan = LayerPlan.uniform(BUILTIN_RECIPES["int8"])
    spec = spec_of(BUILTIN_RECIPES["int8"], "fprop", "input")
    casts = Int8Casts(QuantizerState())
    for x in (torch.ones(4, 4, dtype=torch.float16), torch.ones(4, 4, device="meta"), torch.ones(0, 4)):
        assert casts.pair(x, spec, spec, "input") == (None, None)
    assert casts.pair(torch.ones(4, 4), spec_of(BUILTIN_RECIPES["fp8_rowwise"], "fprop", "input"), None, "input") == (
        None,
        None,
    )
    assert int8_parts(plan, nn.Linear(2, 2, device="meta"), QuantizerState()) == {}
    assert int8_parts(LayerPlan.uniform(BUILTIN_RECIPES["bf16"]), nn.Linear(2, 2), QuantizerState()) == {}
    with FakeTensorMode():
        layer = nn.Linear(32, 16)
        run = choose("auto", "cpu").bind(plan, layer, name="x", seed=0)
        run(torch.randn(8, 32), layer.weight, layer.bias).sum().backward()
        assert layer.weight.grad.shape == (16, 32)


def test_without_a_library_torch_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "library", lambda: None)
    assert int8_parts(LayerPlan.uniform(BUILTIN_RECIPES["int8"]), nn.Linear(2, 2), QuantizerState()) == {}


def test_a_copied_layer_has_a_state_of_its_own() -> None:
    layer = nn.Linear(8, 8)
    run = choose("auto", "cpu").bind(LayerPlan.uniform(BUILTIN_RECIPES["int8"]), layer, name="x", seed=0)
    twin = copy.deepcopy(run)
    assert isinstance(twin.casts, Int8Casts)
    assert twin.casts.state is twin.quantizers is not run.quantizers


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(3, 1, 4), (3, 5, 1), (1, 5, 3), (2, (1 << 17) + 3, 2), (64, 64, 64)]
)
def test_products_are_exact_at_the_largest_codes(rows: int, inner: int, columns: int) -> None:
    steps = compile_plan(
        LayerPlan.uniform(BUILTIN_RECIPES["int8"]), torch.float32, "cpu", dict.fromkeys(GEMMS, int8_multiply)
    )
    a = quantize(torch.full((rows, inner), 3.0), steps.fprop.first, operand="input")
    b = quantize(torch.full((columns, inner), -2.0), steps.fprop.second, operand="weight")
    for multiply in (int8_multiply, multiply_emulated):
        out = multiply(a, b, steps.fprop, torch.float32)
        exact = dequantize(a).double() @ dequantize(b).double().t()
        torch.testing.assert_close(out.double(), exact, rtol=3e-7, atol=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 120), st.integers(1, 1100), st.integers(1, 70), st.booleans(), st.booleans())
def test_the_products_of_a_cpu_without_units_are_exact(m: int, k: int, n: int, a_turned: bool, b_turned: bool) -> None:
    if not hasattr(library(), "product"):
        pytest.skip("this CPU has no AVX2")
    generator = torch.Generator().manual_seed(k)
    a, b = (
        torch.randint(-128, 128, shape[::-1] if turned else shape, dtype=torch.int8, generator=generator)
        for shape, turned in (((m, k), a_turned), ((k, n), b_turned))
    )
    a, b = a.t() if a_turned else a, b.t() if b_turned else b
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8, "exact_sums", lambda *_: False)
        assert torch.equal(int8_sums(a, b).double(), a.double() @ b.double())


def test_a_recorded_step_shows_the_products_and_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(library(), "product"):
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setattr(int8, "exact_sums", lambda *_: False)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    apply_policy(Policy.model_validate({"recipes": {"i": {"format": "int8"}}, "default": "i"}), model)
    graph = record_step(model, lambda: model(torch.randn(16, 16)).square().mean().backward())
    assert [(layer.flags, layer.roles()) for layer in graph.layers] == [
        (("first",), ("fprop", "wgrad")),
        (("head",), ("fprop", "dgrad", "wgrad")),
    ]


def test_sums_are_exact_on_older_instructions() -> None:
    """oneDNN asks once which instructions it may use: each set has a fork of a process that has not asked yet."""
    code = """
import os, sys, torch
for isa in ("AVX2", "AVX512_CORE", "AVX512_CORE_VNNI"):
    pid = os.fork()
    if pid == 0:
        os.environ["ONEDNN_MAX_CPU_ISA"] = isa
        break
    if os.waitpid(pid, 0)[1]:
        sys.exit(isa)
else:
    sys.exit()
from torch import nn
from autoprec.backends import choose
from autoprec.policy import LayerPlan, Policy
from autoprec.precision.recipes import BUILTIN_RECIPES
for shape in ((64, 64, 64), (33, 130, 1), (1, 64, 7), (100, 3, 50)):
    m, k, n = shape
    for name in ("int8", "int8_tensor"):
        layer = nn.Linear(k, n, bias=False)
        nn.init.constant_(layer.weight, 0.5)
        run = choose("auto", "cpu").bind(LayerPlan.uniform(BUILTIN_RECIPES[name]), layer, name="x", seed=0)
        x = torch.full((m, k), -1.0, requires_grad=True)
        out = run(x, layer.weight, None)
        out.backward(torch.full((m, n), 2.0))
        for made, wanted in ((out, -0.5 * k), (x.grad, 1.0 * n), (layer.weight.grad, -2.0 * m)):
            assert ((made - wanted).abs() <= 1e-6 * abs(wanted)).all(), (shape, name, made, wanted)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
