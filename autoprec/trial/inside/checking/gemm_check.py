"""Is it precision, or a kernel? Every GEMM of a training step, native beside emulated, on the same operands.

Each layer of a policy is given a second, emulated execution of its plan. While the script trains, both run: the
emulated one in the script's own graph, so that what reaches the next layer is right whatever a kernel did before, and
the native one beside it, on the layer's input and on the gradient that arrives at its output. Its output and gradients
are held against the exact product of the emulated one's codes (:mod:`.bounds`); the first that is beyond its bound is
where a fault is, as no later layer has seen its values. Not compared: layers that run as the script wrote them,
convolutions, recurrent layers, and libraries with casts of their own (torchao, Transformer Engine).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.applying.raw_weights import unit_execution
from autoprec.applying.swap import root_of
from autoprec.applying.units import tunable_units
from autoprec.numerics.grouped import decode_e8m0
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.operand import QuantizedOperand, QuantizerState
from autoprec.numerics.plan import GemmStep, Multiply, multiply_emulated
from autoprec.numerics.sharded import is_dtensor
from autoprec.precision.recipes import GEMM_OPERANDS, GEMMS, Gemm
from autoprec.support.plain import Document
from autoprec.trial.inside.checking.bounds import Compared, compare, errors, shares
from autoprec.trial.protocol import GemmFindings

#: Relative difference of delayed scales and histories that rounding explains.
_SAME = 1e-6


@dataclass(slots=True, eq=False)
class _Beside:
    """One layer's emulated execution, and what is known of the GEMMs that it is running.

    ``codes``: GEMM -> operands and step, as it multiplied them; ``results``: what the native execution gave for dgrad
    and wgrad, until the emulated one comes to them; ``raw``: operand -> the values that were quantised, 2-D.
    """

    execution: LinearExecution
    codes: dict[Gemm, tuple[QuantizedOperand, QuantizedOperand, GemmStep]] = field(default_factory=dict)
    results: dict[Gemm, Tensor] = field(default_factory=dict)
    raw: dict[str, Tensor] = field(default_factory=dict)


class GemmCheck:
    """Compares the GEMMs of a model under a policy until :meth:`end`, which returns what it saw.

    Args:
        root: the innermost model, with the policy applied, before its first forward.
    """

    def __init__(self, root: nn.Module) -> None:
        made = {name: unit_execution(unit) for name, unit in tunable_units(root).items()}
        self._found = {name: one for name, one in made.items() if isinstance(one, LinearExecution)}
        self._beside = {id(one): self._emulated(name, one) for name, one in self._found.items()}
        self.not_compared = sorted(name for name, one in made.items() if one is not None and name not in self._found)
        self._rows: dict[tuple[str, str], Document] = {}
        self._findings: list[Document] = []
        self._busy = False
        self._original = LinearExecution.__call__
        self._learn_alike(root)
        self._start()

    def _emulated(self, name: str, native: LinearExecution) -> _Beside:
        multiply: dict[Gemm, Multiply] = {gemm: partial(self._multiply, name, gemm) for gemm in GEMMS}
        state = QuantizerState(native.quantizers.seed)
        made = LinearExecution(native.plan, multiply=multiply, quantizers=state, name=name)
        made.native = dict.fromkeys(made.native)  # plain casts as well: their operands are to be seen
        return _Beside(made)

    def _learn_alike(self, root: nn.Module) -> None:
        """Let emulated delayed scales learn where and when native ones do, over all ranks."""
        before: Any = getattr(root_of(root), "before", None)
        for native in self._found.values() if before is not None else ():
            mine = self._beside[id(native)].execution
            for operand, spec in mine.delayed_operands().values():
                if native.quantizers.prepared is not None:
                    mine.quantizers.prepare([(operand, spec)], native.quantizers.prepared)
                before.slots.append((mine.quantizers, operand, spec))
                before.scales.append(mine.quantizers.history(operand, spec))

    # ---------------------------------------------------------------- while the script trains
    def _start(self) -> None:
        """Run both executions of every layer from now on."""
        original, check = self._original, self

        def __call__(  # noqa: N807
            native: LinearExecution, input: Tensor, weight: Tensor, bias: Tensor | None, *, training: bool = True
        ) -> Tensor:
            beside = None if check._busy else check._beside.get(id(native))
            empty = input.numel() == 0 or input.device.type == "meta" or is_dtensor(weight)
            if beside is None or empty or not training:
                return original(native, input, weight, bias, training=training)
            return check._both(native, beside, input, weight, bias)

        LinearExecution.__call__ = __call__  # type: ignore[method-assign, assignment]

    def _stop(self) -> None:
        """Let layers run as they did; delayed scales are compared a last time."""
        LinearExecution.__call__ = self._original  # type: ignore[method-assign]
        for name, native in self._found.items():
            device = next((row.device for row in self._beside[id(native)].raw.values()), None)
            if device is not None:
                self._compare_states(name, native, self._beside[id(native)].execution, device)

    def _both(
        self, native: LinearExecution, beside: _Beside, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        own = input.detach().requires_grad_(input.requires_grad)
        beside.execution.quantizers.groups = native.quantizers.groups
        beside.codes.clear()
        self._busy = True
        try:
            # what it saves is its own: checkpointing would compute it anew, and is in the script's graph already
            with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value):
                given = self._original(native, own, weight, bias)
            out = self._original(beside.execution, input, weight, bias)
        finally:
            self._busy = False
        beside.raw = {"input": own.detach().reshape(-1, own.shape[-1]), "weight": weight.detach()}
        if "fprop" in beside.codes:
            self._compare(beside, "fprop", given.detach(), bias)
            if out.requires_grad:
                then = partial(self._backward, beside, dict(beside.raw), given, own, weight, bias)
                out.register_hook(then)  # type: ignore[no-untyped-call]
        return out.to(given.dtype)

    def _backward(
        self,
        beside: _Beside,
        raw: dict[str, Tensor],
        given: Tensor,
        own: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        grad_output: Tensor,
    ) -> None:
        """Let the native execution compute its gradients; the emulated one's follow at once, and are compared."""
        wanted = {"dgrad": own, "wgrad": weight, "bias": bias}
        needed = {name: one for name, one in wanted.items() if one is not None and one.requires_grad}
        self._busy = True
        try:
            grads = torch.autograd.grad(given, list(needed.values()), grad_output.to(given.dtype), retain_graph=True)
        finally:
            self._busy = False
        results = dict(zip(needed, grads, strict=True))
        gradient = results.pop("bias", None)
        grad = grad_output.detach().reshape(-1, grad_output.shape[-1])
        beside.raw, beside.results = raw | {"grad_output": grad}, results  # type: ignore[assignment]
        if gradient is not None:
            self._compare_bias(beside, gradient, grad)

    def _multiply(
        self, name: str, gemm: Gemm, a: QuantizedOperand, b: QuantizedOperand, step: GemmStep, out_dtype: torch.dtype
    ) -> Tensor:
        beside = self._beside[id(self._found[name])]
        beside.codes[gemm] = a, b, step
        found = beside.results.pop(gemm, None)
        if found is not None:
            self._compare(beside, gemm, found.detach())
        return multiply_emulated(a, b, step, out_dtype)

    # ---------------------------------------------------------------- comparing
    def _compare(self, beside: _Beside, gemm: Gemm, found: Tensor, bias: Tensor | None = None) -> None:
        with torch.no_grad(), torch.autocast(found.device.type, enabled=False), torch._C.DisableTorchFunction():
            self._note(beside, gemm, found.reshape(-1, found.shape[-1]), bias)

    def _note(self, beside: _Beside, gemm: Gemm, found: Tensor, bias: Tensor | None) -> None:
        seen = compare(found, *beside.codes[gemm], bias)
        row = self._rows.setdefault((beside.execution.name, gemm), {"calls": 0, "worst": -1.0})
        row["calls"] += 1
        if seen.worst > row["worst"] or (seen.wrong and not row["wrong"]):
            row |= self._described(beside, gemm, found, bias) | asdict(seen)
        if seen.wrong and all(one["layer"] != row["layer"] or one["gemm"] != gemm for one in self._findings):
            code = "not_finite" if seen.nonfinite == seen.wrong else "beyond_bound"
            self._findings.append({"code": code, **row})

    def _described(self, beside: _Beside, gemm: Gemm, found: Tensor, bias: Tensor | None) -> Document:
        a, b, step = beside.codes[gemm]
        operands = dict(zip(GEMM_OPERANDS[gemm], (a, b), strict=True))
        raw = tuple(beside.raw[operand] for operand in operands)
        product = found if bias is None else found - bias.detach()
        native, emulated, bf16 = errors(product, (raw[0], raw[1]), (a, b), step)
        lost = {operand: shares(beside.raw[operand], codes) for operand, codes in operands.items()}
        return {
            "layer": beside.execution.name,
            "gemm": gemm,
            "recipe": step.label,
            "m": found.shape[0],
            "n": found.shape[1],
            "k": raw[0].shape[step.axes[0]],
            "error": {"native": native, "emulated": emulated, "bf16": bf16},
            "scales": {operand: _scales(codes) for operand, codes in operands.items()},
            "saturated": {operand: share[0] for operand, share in lost.items()},
            "flushed": {operand: share[1] for operand, share in lost.items()},
        }

    def _compare_bias(self, beside: _Beside, found: Tensor, grad: Tensor) -> None:
        """The gradient of a bias is a sum over rows, in no GEMM: it belongs to wgrad."""
        narrow = max((found.dtype, grad.dtype, torch.bfloat16), key=lambda dtype: torch.finfo(dtype).eps)
        wide = grad.double()
        allowed = 2 * torch.finfo(narrow).eps * wide.abs().sum(0) + torch.finfo(torch.float32).tiny
        wrong = wide.sum(0).isfinite() & ~((found.double() - wide.sum(0)).abs() <= allowed)
        name = beside.execution.name
        if wrong.any() and all(one["layer"] != name or one["code"] != "bias_gradient" for one in self._findings):
            at = (0, int(wrong.nonzero()[0, 0]))
            seen = asdict(Compared(wrong=int(wrong.sum()), at=at, nonfinite=int((~found.isfinite()).sum())))
            size = {"m": 1, "n": grad.shape[1], "k": grad.shape[0]}
            self._findings.append({"code": "bias_gradient", "layer": name, "gemm": "wgrad", **size, **seen})

    def _compare_states(self, name: str, native: LinearExecution, mine: LinearExecution, device: torch.device) -> None:
        """Delayed scales that did not learn what they were shown are wrong before a result is."""
        wanted = mine.state(device)
        for key, value in native.state(device).items():
            gemm, _, rest = key.partition(".")
            if value.is_floating_point() and not torch.allclose(value, wanted[key], rtol=_SAME, atol=0.0):
                held = {"found": value.flatten()[:4].tolist(), "wanted": wanted[key].flatten()[:4].tolist()}
                self._findings.append({"code": "stale_scale", "layer": name, "gemm": gemm, "state": rest, **held})
                return

    def end(self) -> GemmFindings:
        """Stop, and return what was found."""
        self._stop()
        silent = [name for name in self._found if (name, "fprop") not in self._rows]
        return GemmFindings(
            ok=not self._findings,
            findings=tuple(self._findings),
            gemms=tuple(self._rows.values()),
            not_compared=(*self.not_compared, *silent),
        )


def _scales(operand: QuantizedOperand) -> list[float]:
    """Return the smallest and the largest number that an operand's codes are multiplied by; [1, 1] where none is."""
    scale, groups = operand.scale, operand.groups
    if groups is not None:
        wide = decode_e8m0(groups) if groups.dtype is torch.uint8 else groups.float()
        scale = wide if scale is None else wide * scale.reshape(())
    return [1.0, 1.0] if scale is None else [float(scale.amin()), float(scale.amax())]
