"""The conformance suite of backends: run it on your own to know what it does and what it lacks.

::

    from autoprec.testing.backends import check_backend

    for check in check_backend(MyBackend(), device="cuda"):
        print(check.status, check.name, check.detail)

Every check ends as ``pass``, ``fail``, or ``lacks``: the backend said no, and why. A backend that says no to
everything passes nothing, but lies about nothing either; a backend that says yes must be right. A check that a backend
is known not to pass it may own up to: ``backend.gap(plan, title)`` returns the reason, or an empty string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.backends import Backend, Execution
from autoprec.errors import UnsupportedError
from autoprec.numerics.gemm import contract
from autoprec.numerics.operand import CONTRACTION, QuantizerState
from autoprec.numerics.quantize import dequantize, quantize, spec_of
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS, Gemm, Recipe

__all__ = ["Check", "check_backend", "reference_gemms"]

#: Relative error of a product in bfloat16 output: one rounding, plus the order of accumulation.
_TOLERANCE = 4e-3
#: Tokens, and in and out features: multiples of what kernels need, and small: the CPU kernel of ``torch._scaled_mm``
#: with tensor scales is a reference loop, 20 ns per product.
_TOKENS, _SIZES, _BLOCK_SIZES = 32, (64, 96), (128, 256)


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, how it ended (pass, fail, lacks), and the figure or the reason."""

    name: str
    status: str
    detail: str = ""


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


def _relative(found: Tensor, wanted: Tensor) -> float:
    norm = wanted.double().norm().item()
    return float((found.double() - wanted.double()).norm().item() / (norm or 1.0))


def _recipes(plan: LayerPlan) -> list[Recipe]:
    return [recipe for gemm in GEMMS if (recipe := plan.recipe(gemm)) is not None]


def _sizes(plan: LayerPlan) -> tuple[int, int]:
    blocks = any(r.scaling is not None and r.scaling.granularity == "block" for r in _recipes(plan))
    return _BLOCK_SIZES if blocks else _SIZES


class _Bench:
    """One layer of one backend under one recipe."""

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


def _numbers(bench: _Bench) -> str:
    out, grad_input = bench.run(bench.x, bench.grad)
    compute = bench.execution.compute or torch.float32
    weight: Any = bench.module.weight
    stored = compute if bench.execution.casts_weight else weight.dtype
    wanted = reference_gemms(bench.x.to(compute), weight.detach().to(stored), bench.grad.to(compute), bench.plan)
    found = {"fprop": out - bench.module.bias.detach(), "dgrad": grad_input, "wgrad": weight.grad}
    for gemm in GEMMS:
        value = found[gemm]
        if value is None:
            return f"no {gemm}"
        error = _relative(value, wanted[gemm])
        if not error <= _TOLERANCE:
            return f"{gemm} is {error:.1e} away from the same arithmetic in float64"
    bias_grad: Any = bench.module.bias.grad
    if _relative(bias_grad, bench.grad.sum(0)) > _TOLERANCE:
        return "the bias gradient is wrong"
    return ""


def _labels(bench: _Bench) -> str:
    bench.run(bench.x, bench.grad)
    asked = {gemm: r.describe() for gemm in GEMMS if (r := bench.plan.recipe(gemm)) is not None}
    ran = bench.execution.executed
    return "" if ran == asked else f"asked for {asked}, says it ran {ran}"


def _ragged(bench: _Bench) -> str:
    full, _ = bench.run(bench.x, bench.grad)
    rows = 21
    out, grad_input = bench.run(bench.x[:rows], bench.grad[:rows])
    if out.shape != (rows, bench.outer) or grad_input is None or grad_input.shape != (rows, bench.inner):
        return "wrong shape"
    # tensor scales see fewer rows, so results agree within quantisation error only
    return "" if _relative(out, full[:rows]) < 0.2 else "a ragged batch gives other results"


def _empty(bench: _Bench) -> str:
    out, grad_input = bench.run(bench.x[:0], bench.grad[:0])
    return "" if out.shape == (0, bench.outer) and grad_input is not None else "an empty batch fails"


def _layouts(bench: _Bench) -> str:
    flat, _ = bench.run(bench.x, bench.grad)
    strided = torch.stack([bench.x, bench.x], -1)[..., 0]
    out, _ = bench.run(strided, bench.grad)
    if not torch.equal(out, flat):
        return "a non-contiguous input gives another result"
    batched, _ = bench.run(bench.x.reshape(4, -1, bench.inner), bench.grad.reshape(4, -1, bench.outer))
    return "" if torch.equal(batched.reshape(-1, bench.outer), flat) else "a batched input gives another result"


def _zeros(bench: _Bench) -> str:
    out, grad_input = bench.run(torch.zeros_like(bench.x), torch.zeros_like(bench.grad))
    weight: Any = bench.module.weight
    if grad_input is None or not (
        out.isfinite().all() and grad_input.isfinite().all() and weight.grad.isfinite().all()
    ):
        return "zeros become non-finite"
    return "" if not grad_input.any() else "zero gradients become non-zero"


def _non_finite(bench: _Bench) -> str:
    for value in (float("nan"), float("inf")):
        x = bench.x.clone()
        x[3, 5] = value
        out, _ = bench.run(x, bench.grad)
        if out[3].isfinite().all():
            return f"{value} in the input vanishes"
    return ""


def _random_stream(bench: _Bench) -> str:
    before = torch.get_rng_state()
    bench.run(bench.x, bench.grad)
    return "" if torch.equal(before, torch.get_rng_state()) else "the global random stream was used"


def _no_grad(bench: _Bench) -> str:
    with torch.no_grad():
        out = bench.execution(bench.x, bench.module.weight, bench.module.bias, training=False)
    return "" if out.shape == (_TOKENS, bench.outer) and not out.requires_grad else "no_grad is not respected"


_CHECKS: dict[str, Callable[[_Bench], str]] = {
    "same arithmetic in float64": _numbers,
    "says what ran": _labels,
    "ragged batch": _ragged,
    "empty batch": _empty,
    "layouts": _layouts,
    "all-zero tensors": _zeros,
    "non-finite values show": _non_finite,
    "private random streams": _random_stream,
    "evaluation": _no_grad,
}


def _plans() -> dict[str, LayerPlan]:
    plans = {name: LayerPlan.uniform(recipe) for name, recipe in BUILTIN_RECIPES.items()}
    eight, high = BUILTIN_RECIPES["fp8_rowwise"], BUILTIN_RECIPES["bf16"]
    plans["fp8_rowwise with wgrad in bf16"] = LayerPlan(fprop=eight, dgrad=eight, wgrad=high)
    return plans


def _refusal(backend: Backend, plan: LayerPlan, device: str) -> str:
    inner, outer = _sizes(plan)
    sizes = {"fprop": (_TOKENS, inner, outer), "dgrad": (_TOKENS, outer, inner), "wgrad": (outer, _TOKENS, inner)}
    for gemm in GEMMS:
        recipe = plan.recipe(gemm)
        if recipe is not None:
            m, k, n = sizes[gemm]
            found = backend.capability(recipe, gemm=gemm, m=m, k=k, n=n, device=device)
            if not found.ok:
                return found.reason or "no reason given"
    return ""


def check_backend(backend: Backend, device: str = "cpu") -> Iterator[Check]:
    """Run the suite on one device: every built-in recipe and one mixed plan, each through every check."""
    available = backend.available(device)
    if not available.ok:
        yield Check("available", "lacks" if available.reason else "fail", available.reason)
        return
    yield Check("available", "pass", available.reason)
    for name, plan in _plans().items():
        reason = _refusal(backend, plan, device)
        if reason:
            yield Check(name, "fail" if reason == "no reason given" else "lacks", reason)
            continue
        for title, check in _CHECKS.items():
            if title == "same arithmetic in float64" and any(r.stochastic_rounding for r in _recipes(plan)):
                continue
            try:
                problem = check(_Bench(backend, plan, device))
            except UnsupportedError as error:
                yield Check(name, "lacks", error.what)
                break
            owned = backend.gap(plan, title) if problem else ""
            yield Check(f"{name}: {title}", "lacks" if owned else "fail" if problem else "pass", owned or problem)
