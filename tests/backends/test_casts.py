"""Casts compiled by themselves equal torch's operators bit by bit; what cannot be compiled is left to those. No GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.applying.compiling import run_eagerly
from autoprec.backends import casts
from autoprec.backends.casts import CompiledCasts
from autoprec.backends.scaled_mm import scaled_multiply
from autoprec.errors import AutoPrecWarning
from autoprec.numerics import quantize as quantizing
from autoprec.numerics import rounding
from autoprec.numerics.operand import QuantizedOperand, QuantizerState, Spec
from autoprec.numerics.plan import compile_plan
from autoprec.numerics.quantize import quantize, spec_of
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo's own


def specs(name: str) -> tuple[Spec, Spec]:
    """Return how an input is quantised for fprop and for wgrad."""
    return spec_of(BUILTIN_RECIPES[name], "fprop", "input"), spec_of(BUILTIN_RECIPES[name], "wgrad", "input")


@pytest.fixture(autouse=True)
def _codes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let what is compiled for this CPU hold codes, as it does on a GPU; each test compiles anew."""
    for module in (rounding, quantizing):
        if hasattr(module, "stores_values"):
            monkeypatch.setattr(module, "stores_values", lambda _device: False)
    monkeypatch.setattr(casts, "_left", False)  # a test of a scan before these leaves casts to torch for good
    casts._compiled.cache_clear()
    yield
    casts._compiled.cache_clear()


def here() -> CompiledCasts:
    return CompiledCasts(QuantizerState(), device="cpu")


def values(rows: int = 96, columns: int = 160) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 3
    x[3], x[5, 7] = 0.0, torch.inf
    return x


def same(one: QuantizedOperand, other: QuantizedOperand) -> bool:
    codes = one.codes, other.codes
    if one.codes.dtype is torch.int8 and other.scale is not None:  # NaN has no integer code: its scale is NaN instead
        codes = codes[0] * other.scale.isfinite(), codes[1] * other.scale.isfinite()
    parts = [codes, (one.scale, other.scale), (one.groups, other.groups)]
    return casts._equal([tuple(a for a, _ in parts)], [tuple(b for _, b in parts)])  # type: ignore[list-item]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is compiled run as it was traced: seconds of code generation would show the same."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


# Each takes seconds to compile, blocks for each way to pad them. The dtype is one cast before what the recipe does.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8_tensorwise", torch.float32),
        ("fp8_rowwise", torch.bfloat16),
        ("fp8_block", torch.bfloat16),
        ("mxfp8", torch.bfloat16),
        ("int8", torch.float32),
    ],
)
def test_both_uses_of_an_operand_equal_what_torchs_operators_give(name: str, dtype: torch.dtype) -> None:
    for x in (values(),) if name == "fp8_block" else (values(), values(64, 64)):
        for made, spec in zip(here().pair(x.to(dtype), *specs(name), "input"), specs(name), strict=True):
            assert made is not None
            assert same(made, quantize(x.to(dtype), spec))


@pytest.mark.usefixtures("traced")
def test_what_needs_more_than_its_operand_or_lies_elsewhere_is_left_to_torch() -> None:
    assert here().pair(values(), *specs("fp8_delayed"), "input") == (None, None)
    assert here().pair(values(), *specs("bf16"), "input") == (None, None)
    assert CompiledCasts(QuantizerState()).pair(values(), *specs("fp8_rowwise"), "input") == (None, None)
    first, second = here().pair(values(), specs("fp8_rowwise")[0], None, "input")
    assert first is not None
    assert second is None


@pytest.mark.usefixtures("traced")
def test_a_cast_that_gives_other_codes_is_told_once_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **how: real(lambda x: run(x * 2), **how))
    with pytest.warns(AutoPrecWarning, match="other codes"):
        assert here().pair(values(), *specs("fp8_rowwise"), "input") == (None, None)
    assert here().pair(values(), *specs("fp8_rowwise"), "input") == (None, None)


def test_a_compiler_that_fails_is_told_once_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_x: Tensor) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda *_args, **_how: broken)
    with pytest.warns(AutoPrecWarning, match="no compiler here"):
        assert here().pair(values(), *specs("fp8_tensorwise"), "input") == (None, None)


class Copies(TorchDispatchMode):
    """Counts copies of whole matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("clone", "copy_", "_to_copy", "contiguous")
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise"])
def test_no_product_copies_codes_into_the_layout_that_it_reads(name: str) -> None:
    """torch's scaled product reads both operands along the sum: for dgrad and wgrad that is across the rows."""
    plan = LayerPlan.uniform(BUILTIN_RECIPES[name])
    steps = compile_plan(plan, torch.float32, "cpu", dict.fromkeys(GEMMS, scaled_multiply))
    x, w, g = torch.randn(32, 64), torch.randn(48, 64), torch.randn(32, 48)
    a, x_again = here().pair(x, steps.fprop.first, steps.wgrad.second, "input")
    b, w_again = here().pair(w, steps.fprop.second, steps.dgrad.second, "weight")
    d, e = here().pair(g, steps.dgrad.first, steps.wgrad.first, "grad_output")
    exact = {"fprop": x @ w.t(), "dgrad": g @ w, "wgrad": g.t() @ x}
    for gemm, first, second in (("fprop", a, b), ("dgrad", d, w_again), ("wgrad", e, x_again)):
        assert first is not None
        assert second is not None
        with Copies() as copies:
            out = scaled_multiply(first, second, getattr(steps, gemm), torch.float32)
        assert copies.count == 0, gemm
        assert (out - exact[gemm]).norm() < 0.1 * exact[gemm].norm(), gemm


def compiles_a_cast() -> bool:
    torch._dynamo.reset()
    casts._compiled.cache_clear()
    counters.clear()
    assert here().pair(values(), *specs("fp8_rowwise"), "input")[0] is not None
    return bool(counters["stats"]["unique_graphs"])


@pytest.mark.usefixtures("traced")
def test_casts_are_compiled_where_a_policy_lets_the_script_run_eagerly() -> None:
    with torch.compiler.set_stance("force_eager"):
        assert compiles_a_cast()
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"  # for everything else
    assert compiles_a_cast()


@pytest.mark.usefixtures("traced")
def test_a_scan_of_hundreds_of_policies_compiles_no_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "_left", False)
    with torch.compiler.set_stance("default"):
        run_eagerly()
        assert here().pair(values(), *specs("fp8_rowwise"), "input") == (None, None)


@pytest.mark.usefixtures("traced")
def test_many_kinds_of_casts_are_each_compiled() -> None:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=1):
        for name in ("fp8_tensorwise", "fp8_rowwise"):
            assert here().pair(values(), *specs(name), "input")[0] is not None
    assert counters["stats"]["unique_graphs"] >= 2
    torch._dynamo.reset()
