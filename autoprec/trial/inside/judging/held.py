"""What outlives a step: weights and whether their updates arrive, optimizer state, buffers, and a census of it all."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoprec.applying.units import clean_name
from autoprec.graph.analysis.modules import ModelNames
from autoprec.graph.census import Held
from autoprec.graph.trace import dtype_name
from autoprec.numerics.rounding import SIXTEEN_BIT
from autoprec.optim.optimizer import runtime_of
from autoprec.trial.inside.judging.by_hand import HOLDS, LEAST_DECAY, UpdateRecorder
from autoprec.trial.inside.judging.samples import SAMPLE, half_ulp, sampled
from autoprec.trial.inside.judging.stepping import is_elementwise, next_step

#: State of torch's optimizers that has the shape of a weight; what else has it may be a compensation, or a master copy.
_KNOWN_STATE = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "grad_avg"),
        *("exp_inf", "mu_product", "sum", "ax", "prev", "step_size"),
    )
)
#: In place of an optimizer's number: the script updates its weights itself.
BY_HAND = -1
_SAFETENSORS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F64": "fp64"}


def in_fp32(dtype: torch.dtype) -> str:
    """Return what a dtype would be in a run that is FP32 throughout; empty where that is the same."""
    return "fp32" if dtype.is_floating_point and dtype.itemsize < 4 else ""


@dataclass(slots=True)
class _Weight:
    """One weight before an update: a sample of it, and where its gradient is not zero.

    ``stored``: a policy keeps its exact value beside it, of which the sample then is.
    """

    parameter: Tensor
    before: Tensor
    moves: Tensor
    group: int
    optimizer: int
    stored: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class Update:
    """What became of the update of the weights of one dtype in one parameter group.

    Attributes:
        optimizer: its number; -1 where the script updates its weights itself.
        unchanged: share of the elements with a gradient that are bit for bit what they were.
        arrives: how much of the update that was computed the weights have taken, projected on it; None where what was
            computed could not be seen.
        at_peak: ``unchanged`` as it would be at the schedule's largest learning rate, where this step's is smaller.
        decay, kept: the factor of a decay that the optimizer multiplies 16-bit weights with, and the share of them
            that it leaves as they are; 1 where it has none.
        half_ulp, update: medians of half a unit in the last place of the weights, and of the size of the update.
    """

    dtype: str
    optimizer: int
    group: int
    elements: int
    tensors: tuple[str, ...]
    unchanged: float
    arrives: float | None
    at_peak: float
    half_ulp: float
    update: float
    rate: float
    peak: float
    compensated: str = ""
    decay: float = 1.0
    kept: float = 0.0


@dataclass(slots=True)
class Weights:
    """The trained weights just before an update; :meth:`updates` compares them with what came of it."""

    optimizers: list[Optimizer]
    names: ModelNames
    _held: list[_Weight] = field(default_factory=list)
    _rates: dict[tuple[int, int], float] = field(default_factory=dict)
    _meant: dict[int, Tensor] = field(default_factory=dict)

    def hold(self, loose: Iterable[Tensor] = ()) -> None:
        """Sample every weight that has a gradient.

        Args:
            loose: weights of any shapes that no optimizer has: the script updates them itself.
        """
        self._held.clear()
        self._rates.clear()
        self._meant.clear()
        for at, optimizer in enumerate(self.optimizers):
            runtime = runtime_of(optimizer)
            if runtime is not None:
                runtime.observer = self._observe
            for index, group in enumerate(optimizer.param_groups):
                self._rates[at, index] = float(group.get("lr", 1.0))
                for p in group["params"]:
                    grad = p.grad if p.grad is not None and p.grad.layout is torch.strided else None
                    if grad is not None and _is_plain(p):
                        before, stored = self._exact(at, p)
                        moves = sampled(grad, SAMPLE) != 0
                        self._held.append(_Weight(p, before, moves, index, at, stored, self._name(p)))
        for p in filter(_is_plain, loose):
            before = sampled(p, SAMPLE).clone()
            moves = torch.zeros_like(before, dtype=torch.bool)
            self._held.append(_Weight(p, before, moves, 0, BY_HAND, name=self._name(p)))
            self._rates[BY_HAND, 0] = 0.0

    def follow(self, now: Mapping[int, Tensor]) -> None:
        """Take other tensors, of the same shapes, for what weights have become, by the ``id`` of each weight."""
        for one in self._held:
            one.parameter = now.get(id(one.parameter), one.parameter)

    def foresee(self, optimizer: Optimizer) -> bool:
        """Note what an optimizer's step would make of 16-bit weights in FP32; say whether that is known.

        Its gradients are there, and its step is next. What a step hook of the script changes is not foreseen.
        """
        if not is_elementwise(optimizer) or optimizer._optimizer_step_pre_hooks or runtime_of(optimizer) is not None:
            return False
        meant = next_step(optimizer, lambda p: p.grad if p.dtype in SIXTEEN_BIT else None, SAMPLE, wide=torch.float32)
        self._meant |= meant or {}
        return meant is not None

    def _observe(self, parameter: Tensor, weight: Tensor, _second: Tensor | None) -> None:
        """Keep what a policy's own update makes of a weight, before it is stored."""
        self._meant[id(parameter)] = sampled(weight, SAMPLE).clone()

    def _exact(self, optimizer: int, parameter: Tensor) -> tuple[Tensor, bool]:
        """Return a sample of a weight's exact value, and whether that is kept beside the parameter."""
        runtime = runtime_of(self.optimizers[optimizer]) if optimizer != BY_HAND else None
        beside = runtime is not None and runtime.weights.beside_of(parameter) is not None
        value = runtime.weights.read(parameter) if runtime is not None and beside else parameter
        return sampled(value, SAMPLE).clone(), beside

    @property
    def rate(self) -> float:
        """The largest learning rate when the weights were held; the script's schedule may have changed it since."""
        return max(self._rates.values(), default=0.0)

    def updates(self, recorder: UpdateRecorder) -> list[Update]:
        """Return what became of the updates, by optimizer, parameter group and dtype."""
        found: dict[tuple[int, int, torch.dtype, bool], list[_Weight]] = {}
        for one in self._held:
            found.setdefault((one.optimizer, one.group, one.parameter.dtype, one.stored), []).append(one)
        for runtime in filter(None, map(runtime_of, self.optimizers)):
            runtime.observer = None
        made = (self._update(key, several, recorder) for key, several in found.items())
        return [one for one in made if one.elements]

    def _update(self, key: tuple[int, int, torch.dtype, bool], held: list[_Weight], recorder: UpdateRecorder) -> Update:
        at, index, dtype, _ = key
        group = self.optimizers[at].param_groups[index] if at != BY_HAND else {}
        rate = self._rates[at, index]
        peak = max(rate, float(group.get("initial_lr", rate)))
        scale = peak / rate if rate else 1.0
        if at == BY_HAND:
            held = [one for one in held if recorder.twin_of(one.parameter) is not None]
        moved = stayed = lost = 0
        inner = size = 0.0
        ulps, steps, seen, kept = [], [], False, ""
        for one in held:
            after, _ = self._exact(at, one.parameter)
            meant, twin = self._meant.get(id(one.parameter)), recorder.twin_of(one.parameter)
            if meant is None and twin is not None:
                meant = sampled(twin, SAMPLE)
            before = one.before.double()
            half = half_ulp(one.before)
            step = after.double() - before
            if meant is not None:
                seen = True
                step = meant.double() - before
                kept = kept or ("a tensor of its own" if recorder.is_compensated(one.parameter) else "")
                if at != BY_HAND:
                    kept = kept or compensation(self.optimizers[at], one.parameter, after, meant)
                inner += float(((after.double() - before) * step).sum())
                size += float(step.square().sum())
            moves = (step != 0) if meant is not None else one.moves
            moved += int(moves.sum())
            same = moves & (after == one.before)
            stayed += int(same.sum())
            lost += int((same & (step.abs() * scale < half)).sum())
            ulps.append(half[moves].flatten())
            steps.append(step[moves].abs().flatten())
        return Update(
            dtype_name(dtype),
            at,
            index,
            sum(one.parameter.numel() for one in held),
            tuple(one.name for one in held),
            stayed / moved if moved else 0.0,
            inner / size if seen and size else None,
            lost / moved if moved else 0.0,
            _median(ulps),
            _median(steps),
            rate,
            peak,
            kept,
            *(self._decay(at, index, peak, held) if at != BY_HAND else ()),
        )

    def _decay(self, at: int, index: int, rate: float, held: list[_Weight]) -> tuple[float, float]:
        """Return factor and share kept of a weight decay that is a product of its own with 16-bit weights."""
        optimizer, group = self.optimizers[at], self.optimizers[at].param_groups[index]
        own = is_elementwise(optimizer) and runtime_of(optimizer) is None and not group.get("fused")
        factor = 1.0 - rate * float(group.get("weight_decay", 0.0)) if group.get("decoupled_weight_decay") else 1.0
        low = [one.before for one in held if one.before.dtype in SIXTEEN_BIT]
        if not own or not low or not LEAST_DECAY <= 1.0 - factor < 1.0:
            return 1.0, 0.0
        flat = torch.cat(low)
        flat = flat[flat != 0]
        same = (flat.float() * factor).to(flat.dtype) == flat
        return factor, float(same.float().mean()) if flat.numel() else 0.0

    def _name(self, parameter: Tensor) -> str:
        return self.names.name_of_parameter(parameter)


def _is_plain(parameter: Tensor) -> bool:
    plain = type(parameter.data) is Tensor and parameter.layout is torch.strided
    return plain and parameter.is_floating_point() and not parameter.is_meta


def _median(parts: list[Tensor]) -> float:
    whole = torch.cat(parts) if parts else torch.zeros(0)
    return float(whole.median()) if whole.numel() else 0.0


def compensation(optimizer: Optimizer, parameter: Tensor, after: Tensor, meant: Tensor) -> str:
    """Return the name of a state that holds what a 16-bit weight has lost of its update; empty for none.

    That is a master copy, or the part that was rounded away, of either sign. A momentum of the same shape is neither.

    Args:
        optimizer: whose state it is.
        parameter: the weight.
        after, meant: samples of it after the update, and of what the update computed, of shape ``[count]``.
    """
    lost = meant.double() - after.double()
    size = float(lost.norm())
    for name, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor) or value.shape != parameter.shape or name in _KNOWN_STATE:
            continue
        if not value.is_floating_point():
            return str(name)  # the bits that the weight has no room for
        held = sampled(value, SAMPLE).double()
        for rest in (lost - held, lost + held, held - meant.double()):
            if size and float(rest.norm()) <= HOLDS * size:
                return str(name)
    return ""


def moments(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Yield, of each state in 16 bits, the share of its elements that its decay leaves as they are.

    A running mean ``beta * v + (1 - beta) * x`` forgets by its factor alone: where ``beta * v`` rounds to ``v``, it
    never does. In bfloat16 that is so for every number where ``1 - beta`` is below 2**-9, as Adam's 0.001 is.
    """
    found: dict[tuple[str, torch.dtype, float], list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dtype in SIXTEEN_BIT and value.numel() > 1:
                    found.setdefault((str(name), value.dtype, _decay(group, str(name))), []).append(value)
    for (name, dtype, beta), values in found.items():
        if not 0.0 < beta < 1.0:
            continue
        flat = torch.cat([sampled(value, SAMPLE) for value in values])
        flat = flat[(flat != 0) & flat.isfinite()]
        kept = float(((flat.float() * beta).to(dtype) == flat).float().mean()) if flat.numel() else 0.0
        yield {"name": name, "dtype": dtype_name(dtype), "beta": beta, "kept": kept, "tensors": len(values)}


def _decay(group: Mapping[str, Any], name: str) -> float:
    betas = group.get("betas")
    if betas:
        return float(betas[1] if "sq" in name or "inf" in name else betas[0])
    return float(group.get("alpha" if "square" in name else "momentum", 0.0) or 0.0)


def lost_epsilon(optimizer: Optimizer) -> tuple[float, str]:
    """Return an optimizer's epsilon and the dtype of the state in which it is zero; (0, "") where it is not."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if not isinstance(eps, float) or not eps:
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for value in (parameter, *(one for one in state.values() if isinstance(one, Tensor) and one.numel() > 1)):
                if value.dtype in SIXTEEN_BIT and float(torch.tensor(eps, dtype=value.dtype)) == 0.0:
                    return eps, dtype_name(value.dtype)
    return 0.0, ""


# --- the census ------------------------------------------------------------------------------------------------------
def kept_in_fp32(model: nn.Module) -> dict[str, str]:
    """Return what says so of each parameter that a transformers model says to keep in FP32."""
    out: dict[str, str] = {}
    for prefix, module in model.named_modules():
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            words = getattr(type(module), attribute, None) or getattr(module, attribute, None)
            for word in words if isinstance(words, (list, tuple, set)) else ():
                for name, _ in module.named_parameters(prefix=prefix):
                    if f".{word}." in f".{name}.":
                        out[clean_name(name)] = attribute
    return out


def saved_dtypes(model: nn.Module) -> dict[str, str]:
    """Return the dtype of each tensor in the safetensors files of the folder that a model was loaded from."""
    folder = Path(str(getattr(getattr(model, "config", None), "_name_or_path", "") or "."))
    out: dict[str, str] = {}
    if str(folder) == "." or not folder.is_dir():
        return out
    for path in sorted(folder.glob("*.safetensors"))[:64]:
        try:
            with path.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(size, 1 << 26)))
        except (OSError, ValueError):
            continue
        out |= {
            name: _SAFETENSORS.get(row["dtype"], row["dtype"].lower())
            for name, row in header.items()
            if isinstance(row, dict) and "dtype" in row
        }
    return out


def tensors_of(model: nn.Module, names: ModelNames, loaded: Mapping[str, str]) -> Iterator[Held]:
    """Yield parameters, their gradients, and buffers.

    Args:
        model: as the script made it, with its configuration.
        names: of its tensors.
        loaded: the dtype in which each was saved, as far as that was seen.
    """
    keeps, saved = kept_in_fp32(names.root), dict(loaded) | saved_dtypes(model)

    def asked(name: str, dtype: str) -> str:
        if name in keeps:
            return f"fp32 by {keeps[name]}"
        return f"{saved[name]} in the checkpoint" if saved.get(name, dtype) != dtype else ""

    for name, parameter in names.parameters.items():
        if names.aliases[name] != name:
            continue
        dtype = dtype_name(parameter.dtype)
        shape = tuple(parameter.shape)
        yield Held("parameter", name, dtype, shape, in_fp32(parameter.dtype), asked(name, dtype))
        if parameter.grad is not None:
            grad = parameter.grad
            yield Held("gradient", name, dtype_name(grad.dtype), shape, in_fp32(grad.dtype))
    for name, buffer in names.root.named_buffers():
        dtype = dtype_name(buffer.dtype)
        yield Held("buffer", clean_name(name), dtype, tuple(buffer.shape), in_fp32(buffer.dtype), asked(name, dtype))


def states_of(optimizers: Iterable[Optimizer], names: ModelNames) -> Iterator[Held]:
    """Yield the state of optimizers, tensor by tensor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        name = f"{key} of {names.name_of_parameter(parameter) or 'a tensor of no module'}"
                        twin = in_fp32(value.dtype)
                        yield Held("optimizer state", name, dtype_name(value.dtype), tuple(value.shape), twin)


def _tables(names: ModelNames) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers, and tensors that a module has as plain attributes."""
    yield from names.root.named_buffers()
    for prefix, module in names.root.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not value.requires_grad and value.layout is torch.strided:
                yield f"{prefix}.{name}".lstrip("."), value


def collapsed_tables(names: ModelNames) -> Iterator[tuple[str, Tensor, int, int]]:
    """Yield positional tables of shape ``[..., rows, width]`` whose neighbouring rows are the same: too few bits.

    Of each: its name, the table, distinct neighbours and rows.
    """
    for name, table in _tables(names):
        words = ("sin", "cos", "pos", "pe", "rope", "rotary", "freq", "emb")
        known = any(word in name.rpartition(".")[2].lower() for word in words)
        if table.is_complex() and not table.is_meta:  # rotations, whatever they are called
            known, table = True, torch.view_as_real(table.detach()).flatten(-2)
        if not known or not table.is_floating_point() or table.is_meta or not 2 <= table.dim() <= 4:
            continue
        rows = table.detach().reshape(-1, table.shape[-1])
        if not 256 < rows.shape[0] <= 1 << 20 or rows.shape[-1] < 4 or not bool(rows.isfinite().all()):
            continue
        distinct = 1 + int((rows[1:] != rows[:-1]).any(-1).sum())
        if 16 < distinct < rows.shape[0] and math.isclose(float(rows.abs().max()), 1.0, rel_tol=0.02):
            yield clean_name(name), table, distinct, rows.shape[0]
