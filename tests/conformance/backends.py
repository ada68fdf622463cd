"""The conformance suite of backends: a pytest class to subclass, run on your own backend and on ours alike.

::

    from tests.conformance.backends import BackendSuite

    class TestMyBackend(BackendSuite):
        backend = MyBackend()
        device = "cuda"

Every built-in recipe, and one plan that mixes two, goes through every check. A backend that cannot run a plan says so
in ``available``, ``capability`` or ``bind``, and the checks of that plan are skipped with its reason: a backend that
says no to everything passes nothing, but lies about nothing either. A backend that says yes must be right, and right
means: the same arithmetic as the quantised operands multiplied in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.backends import Backend, Execution
from autoprec.errors import UnsupportedError
from autoprec.numerics.gemm import contract
from autoprec.numerics.operand import CONTRACTION, QuantizerState
from autoprec.numerics.quantize import dequantize, quantize, spec_of
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS, Gemm, Recipe

#: Relative error of a product in bfloat16 output: one rounding, plus the order of accumulation.
_TOLERANCE = 4e-3
#: Tokens, and in and out features: multiples of what kernels need, and small: the CPU kernel of ``torch._scaled_mm``
#: with tensor scales is a reference loop, 20 ns per product.
_TOKENS, _SIZES, _BLOCK_SIZES = 32, (64, 96), (128, 256)

#: The plans a backend is asked to run: each built-in recipe in all three GEMMs, and one with wgrad in 16 bits.
PLANS: dict[str, LayerPlan] = {name: LayerPlan.uniform(recipe) for name, recipe in BUILTIN_RECIPES.items()} | {
    "fp8_rowwise with wgrad in bf16": LayerPlan(
        fprop=BUILTIN_RECIPES["fp8_rowwise"], dgrad=BUILTIN_RECIPES["fp8_rowwise"], wgrad=BUILTIN_RECIPES["bf16"]
    )
}


def _reference(a: Tensor, b: Tensor, recipe: Recipe | None, gemm: Gemm) -> Tensor:
    axes = CONTRACTION[gemm]
    if recipe is None:
        left, right = a.double(), b.double()
    else:
        state = QuantizerState()
        left, right = (
            dequantize(quantize(x, spec_of(recipe, gemm, operand), operand=operand, state=state)).double()
            for x, operand in zip((a, b), GEMM_OPERANDS[gemm], strict=True)
        )
    return contract(left, axes[0], right, axes[1])


def reference_gemms(x: Tensor, weight: Tensor, grad_output: Tensor, plan: LayerPlan) -> dict[str, Tensor]:
    """Return fprop, dgrad and wgrad of a plan in float64: quantised operands, exact sums.

    Args:
        x: ``[M, K]``; weight: ``[N, K]``; grad_output: ``[M, N]``; in the dtypes in which they reach the quantiser.
        plan: deterministic recipes (stochastic rounding has no single reference).
    """
    operands = {"fprop": (x, weight), "dgrad": (grad_output, weight), "wgrad": (grad_output, x)}
    return {gemm: _reference(*operands[gemm], plan.recipe(gemm), gemm) for gemm in GEMMS}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the distance of two tensors relative to the norm of the second, in float64."""
    norm = wanted.double().norm().item()
    return float((found.double() - wanted.double()).norm().item() / (norm or 1.0))


def _recipes(plan: LayerPlan) -> list[Recipe]:
    return [recipe for gemm in GEMMS if (recipe := plan.recipe(gemm)) is not None]


def _sizes(plan: LayerPlan) -> tuple[int, int]:
    blocks = any(r.scaling is not None and r.scaling.granularity == "block" for r in _recipes(plan))
    return _BLOCK_SIZES if blocks else _SIZES


class BoundLayer:
    """One ``nn.Linear`` that a backend runs under a plan, with a batch and a gradient to run it on.

    Args:
        backend: who runs it.
        plan: the recipes of its three GEMMs.
        device: where its weight (``[N, K]``), input (``[M, K]``) and output gradient (``[M, N]``) lie.
    """

    def __init__(self, backend: Backend, plan: LayerPlan, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inner, self.outer = _sizes(plan)
        self.module = nn.Linear(self.inner, self.outer, device=device)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        self.x = torch.randn(_TOKENS, self.inner, generator=generator).to(device)
        self.grad = (torch.randn(_TOKENS, self.outer, generator=generator) * 1e-3).to(device)
        self.plan = plan
        self.execution: Execution = backend.bind(plan, self.module, name="layer", seed=1)
        if any(r.scaling is not None and r.scaling.scale == "delayed" for r in _recipes(plan)):
            for _ in range(2):  # a backend may start delayed scaling with a scale of 1
                self.run(self.x, self.grad)

    def run(self, x: Tensor, grad: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Forward, and backward where a gradient is given."""
        self.module.zero_grad()
        x = x.detach().requires_grad_()
        out = self.execution(x, self.module.weight, self.module.bias)
        if grad is not None:
            torch.autograd.backward(out, grad)
        return out.detach(), x.grad


class BackendSuite:
    """Subclass it in a test file as ``Test...`` and set ``backend``; pytest runs its checks.

    Attributes:
        backend: the backend under test.
        device: the device it is asked about and run on (``cpu``, ``cuda``).
    """

    backend: Backend
    device: str = "cpu"

    def layer(self, plan: LayerPlan) -> BoundLayer:
        """Return a layer bound to the backend; override it to place the tensors elsewhere than ``device`` says."""
        return BoundLayer(self.backend, plan, self.device)

    def known_gap(self, plan: LayerPlan, check: str) -> str:
        """Return why the backend is known not to pass a check (its method's name) under a plan; empty: it must pass."""
        return ""

    @pytest.fixture(params=list(PLANS))
    def plan(self, request: pytest.FixtureRequest) -> LayerPlan:
        """Each plan of :data:`PLANS`; skipped with the backend's own reason where it says no."""
        plan = PLANS[request.param]
        refused = self.refusal(plan)
        if refused is not None:
            assert refused, "the backend says no and gives no reason"
            pytest.skip(refused)
        gap = self.known_gap(plan, request.function.__name__)
        if gap:
            request.applymarker(pytest.mark.xfail(reason=gap, strict=True))
        return plan

    def refusal(self, plan: LayerPlan) -> str | None:
        """Return the backend's reason for not running a plan on its device; None when it runs it."""
        available = self.backend.available(self.device)
        if not available.ok:
            return available.reason
        inner, outer = _sizes(plan)
        sizes = {"fprop": (_TOKENS, inner, outer), "dgrad": (_TOKENS, outer, inner), "wgrad": (outer, _TOKENS, inner)}
        for gemm in GEMMS:
            recipe = plan.recipe(gemm)
            if recipe is not None:
                m, k, n = sizes[gemm]
                found = self.backend.capability(recipe, gemm=gemm, m=m, k=k, n=n, device=self.device)
                if not found.ok:
                    return found.reason
        try:
            self.layer(plan)
        except UnsupportedError as error:
            return error.what
        return None

    def test_same_arithmetic_as_in_float64(self, plan: LayerPlan) -> None:
        """All three GEMMs agree with the quantised operands multiplied in float64, within one rounding to bf16."""
        if any(recipe.stochastic_rounding for recipe in _recipes(plan)):
            pytest.skip("stochastic rounding has no single right answer")
        bench = self.layer(plan)
        out, grad_input = bench.run(bench.x, bench.grad)
        compute = bench.execution.compute or torch.float32
        weight: Any = bench.module.weight
        # Transformer Engine quantises a weight as it is stored; the others cast it to the dtype of the GEMM
        stored = weight.dtype if self.backend.name == "transformer_engine" else compute
        wanted = reference_gemms(bench.x.to(compute), weight.detach().to(stored), bench.grad.to(compute), plan)
        found = {"fprop": out - bench.module.bias.detach(), "dgrad": grad_input, "wgrad": weight.grad}
        for gemm in GEMMS:
            value = found[gemm]
            assert value is not None, f"no {gemm}"
            assert relative_error(value, wanted[gemm]) <= _TOLERANCE, gemm
        bias_grad: Any = bench.module.bias.grad
        assert relative_error(bias_grad, bench.grad.sum(0)) <= _TOLERANCE, "the bias gradient is wrong"

    def test_says_what_ran(self, plan: LayerPlan) -> None:
        """``executed`` names the recipe of each GEMM that ran: what an audit compares with the policy."""
        bench = self.layer(plan)
        bench.run(bench.x, bench.grad)
        assert bench.execution.executed == {g: r.describe() for g in GEMMS if (r := plan.recipe(g)) is not None}

    def test_a_ragged_batch(self, plan: LayerPlan) -> None:
        """The last batch of an epoch has any number of rows, and no kernel's multiple."""
        bench, rows = self.layer(plan), 21
        full, _ = bench.run(bench.x, bench.grad)
        out, grad_input = bench.run(bench.x[:rows], bench.grad[:rows])
        assert out.shape == (rows, bench.outer)
        assert grad_input is not None
        assert grad_input.shape == (rows, bench.inner)
        # tensor scales see fewer rows, so results agree within quantisation error only
        assert relative_error(out, full[:rows]) < 0.2

    def test_an_empty_batch(self, plan: LayerPlan) -> None:
        """An expert that no token was routed to."""
        bench = self.layer(plan)
        out, grad_input = bench.run(bench.x[:0], bench.grad[:0])
        assert out.shape == (0, bench.outer)
        assert grad_input is not None

    def test_layouts_give_the_same_result(self, plan: LayerPlan) -> None:
        """Non-contiguous and batched inputs are the same numbers, so the same result, bit for bit."""
        bench = self.layer(plan)
        flat, _ = bench.run(bench.x, bench.grad)
        strided, _ = bench.run(torch.stack([bench.x, bench.x], -1)[..., 0], bench.grad)
        assert torch.equal(strided, flat), "a non-contiguous input gives another result"
        batched, _ = bench.run(bench.x.reshape(4, -1, bench.inner), bench.grad.reshape(4, -1, bench.outer))
        assert torch.equal(batched.reshape(-1, bench.outer), flat), "a batched input gives another result"

    def test_zeros_stay_zeros(self, plan: LayerPlan) -> None:
        """An amax of zero has no scale; nothing may become NaN for it."""
        bench = self.layer(plan)
        out, grad_input = bench.run(torch.zeros_like(bench.x), torch.zeros_like(bench.grad))
        weight: Any = bench.module.weight
        assert grad_input is not None
        assert out.isfinite().all()
        assert weight.grad.isfinite().all()
        assert not grad_input.any(), "zero gradients become non-zero"

    def test_non_finite_values_show(self, plan: LayerPlan) -> None:
        """A NaN or an infinity must reach the loss, where dynamic loss scaling and people look for it."""
        bench = self.layer(plan)
        for value in (float("nan"), float("inf")):
            x = bench.x.clone()
            x[3, 5] = value
            out, _ = bench.run(x, bench.grad)
            assert not out[3].isfinite().all(), f"{value} in the input vanishes"

    def test_the_global_random_stream_is_left_alone(self, plan: LayerPlan) -> None:
        """Else dropout, and so the paired comparison of two policies, would change with the policy."""
        bench = self.layer(plan)
        before = torch.get_rng_state()
        bench.run(bench.x, bench.grad)
        assert torch.equal(before, torch.get_rng_state())

    def test_evaluation(self, plan: LayerPlan) -> None:
        """Under ``no_grad`` nothing is recorded for a backward."""
        bench = self.layer(plan)
        with torch.no_grad():
            out = bench.execution(bench.x, bench.module.weight, bench.module.bias, training=False)
        assert out.shape == (_TOKENS, bench.outer)
        assert not out.requires_grad
