"""The cost model: time and memory of one training step under a plan, on a target that need not be here."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from autoprec.cost.device.cpu import cpu_rates, on_this_cpu
from autoprec.cost.device.measured import measured_on
from autoprec.cost.estimate import StepEstimate
from autoprec.cost.kernels import LayerCost, gemm_seconds, kept_family, layer_cost
from autoprec.cost.memory import MemoryEstimate, StepMemory, step_memory
from autoprec.cost.peak import Lifetimes
from autoprec.cost.rates import Rates, default_rates
from autoprec.cost.rest import (
    RestCost,
    category,
    optimizer_bytes,
    rest_cost,
    rest_operators,
    scaled_newton_schulz,
    scaled_products,
    second_moments,
)
from autoprec.cost.saved import KEPT, NOT_LISTED, Setting, Walk, walked
from autoprec.cost.scale import CostScale, GemmWork, layer_works, scaled_parameters, short_dtype
from autoprec.graph.report import GraphReport, Layer
from autoprec.graph.summary import is_large_log_softmax
from autoprec.policy.schema import LayerPlan, Policy
from autoprec.policy.sections import ImplementationPolicy, OptimizerPolicy
from autoprec.policy.space import WIDE_OPERATORS
from autoprec.precision.hardware import Target, alignment, grouped_refusal, recipe_family
from autoprec.precision.recipes import Recipe

#: Bytes that a cast between 16 and 32 bits moves of each value.
_CAST_BYTES = 6.0
#: How often an update reads and writes its bytes that is not fused: on a GPU, one operation for all parameters; on a
#: CPU, parameter by parameter (2.8 to 4.8 times a fused update on four scripts of benchmarks/search/by_hand.py).
_UNFUSED, _UNFUSED_CPU = 1.6, 3.2
#: What convolutions take whose channels lie last, and what log-probabilities save of their time in slices.
_TURNED, _IN_SLICES = 0.8, 0.5
#: What GELU by hand saves of its time in one kernel.
_IN_ONE_KERNEL = 0.8
#: What attention in 16 bits takes on a CPU, and elsewhere, where it is two products and a softmax (a quarter to one).
_UNFUSED_ATTENTION = {True: 0.5, False: 2.0}
#: What the cost of a rank that shares layers with others leaves out.
EXCHANGES = (
    "; of what ranks exchange only the least is charged (two ranks at a link's full speed, no amaxes): gains are upper "
    "bounds"
)
_NO_CONV = ("fp8_tensor", "fp8_delayed", "fp8_row", "fp8_block", "mxfp8", "nvfp4", "int8")


def _readers_of_one_input(layers: Sequence[Layer]) -> dict[str, float]:
    """Return how many layers share each layer's input: q, k and v of a block, gate and up.

    Layers of one group (which get one recipe) under one parent, with inputs of one shape; a group may also hold the
    same projection of several experts, whose inputs differ.
    """
    keys = {
        layer.name: (layer.group, layer.name.rpartition(".")[0], layer.gemms[0].m, layer.gemms[0].k)
        for layer in layers
        if layer.gemms and layer.group
    }
    counts = Counter(keys.values())
    return {name: float(counts[key]) for name, key in keys.items()}


def _dtype_as_written(layer: Layer, target: Target) -> str:
    """Return the family a layer runs in untouched: on NVIDIA GPUs cuDNN convolves fp32 in TF32 by default."""
    dtype = short_dtype(layer.dtype)
    tf32 = layer.kind == "conv" and dtype == "fp32" and target.vendor == "nvidia" and target.peak("tf32")
    return "tf32" if tf32 else dtype


def _unknown(known: Mapping[str, float], family: str) -> float:
    """Return the factor of a family whose linears were not timed: bf16's for another scaled one, else none."""
    return 1.0 if family in ("fp32", "tf32", "fp64") else known.get("bf16", 1.0)


class CostModel:
    """Time and memory of one recorded step on a target, under any plan.

    Args:
        scale: shapes of a larger model, see :class:`CostScale`.
        compiled: whether the script's pointwise work is fused by a compiler.
        backend: who runs the GEMMs: layers are charged as it ran whole linears, where that was measured on the target
            (:mod:`autoprec.cost.device.measured`).
        weight_reuse: calls that share one cast of a weight (gradient accumulation with cached casts).
        rates: replaces the default rates of the target's architecture. Of a library's casts (``rates.library``:
            Transformer Engine's kernels) norms and activations write the quantised input of the layer behind them (its
            fused modules). Of casts compiled by torch a compiled step fuses their first read of the input.
        shards: devices that share the optimizer step and its state (ZeRO, FSDP).
        cpu: FLOP/s by format (fp32, bf16, int8) in place of this machine's (target ``cpu`` only).

    ``estimate`` looks up what it has computed before, so that a search may ask thousands of times.
    """

    def __init__(
        self,
        report: GraphReport,
        target: Target,
        *,
        scale: CostScale | None = None,
        compiled: bool = True,
        weight_reuse: float = 1.0,
        rates: Rates | None = None,
        shards: int = 1,
        cpu: Mapping[str, float] | None = None,
        backend: str = "auto",
    ) -> None:
        known = None if rates else measured_on(target)
        self.rates: Rates = rates or default_rates(target)
        self._factors: dict[str, dict[str, float]] = {}
        if known is not None:
            self.rates = known.over(self.rates)
            self._factors = {how: known.factors(target, self.rates, how, backend) for how in ("eager", "compiled")}
        if target.is_cpu:
            measured, label = (cpu, "modelled, rates as given") if cpu else cpu_rates()
            target, self.rates = on_this_cpu(target, measured), replace(self.rates, label=label)
        self.report, self.target, self.scale = report, target, scale or CostScale()
        self.compiled, self.weight_reuse, self.shards = compiled, weight_reuse, shards
        self._layers: dict[str, Layer] = {layer.name: layer for layer in report.layers}
        self._works: dict[str, tuple[GemmWork, ...]] = {
            layer.name: layer_works(layer, self.scale) for layer in report.layers
        }
        self._input_reuse = _readers_of_one_input(report.layers)
        self._script = {layer.name: _dtype_as_written(layer, target) for layer in report.layers}
        self._rest_operators = rest_operators(report)
        self._divided = report.divided and not target.is_cpu
        self.parameters = scaled_parameters(report, self.scale)
        self._muon, self._multiplied = scaled_newton_schulz(report, self.scale), scaled_products(report, self.scale)
        self._costs: dict[tuple[str, LayerPlan, str], LayerCost] = {}
        self._memory: dict[tuple[Any, ...], int] = {}
        self._rests: dict[tuple[str, str], RestCost] = {}
        self._other: CostModel | None = None

    @cached_property
    def _lifetimes(self) -> Lifetimes:
        return Lifetimes.of(self.report)

    @cached_property
    def _as_written(self) -> Walk:
        return walked(self.report, Setting(gpu=not self.target.is_cpu))

    @property
    def label(self) -> str:
        """What times are called: modelled, how calibrated, compiled or not, and at which scale."""
        scaled, compiled = self.scale.describe(), "compiled" if self.compiled else "not compiled"
        how = "" if self.target.is_cpu else f", {compiled}"
        return (
            self.rates.label + how + (f", at scale {scaled}" if scaled else "") + (EXCHANGES if self._divided else "")
        )

    def at(self, scale: CostScale) -> CostModel:
        """Return the same model of another size."""
        out = copy.copy(self)
        out.scale, out.parameters, out._other = scale, scaled_parameters(self.report, scale), None
        out._works = {name: layer_works(layer, scale) for name, layer in self._layers.items()}
        out._muon, out._multiplied = scaled_newton_schulz(self.report, scale), scaled_products(self.report, scale)
        out._costs, out._memory, out._rests = {}, {}, {}
        return out

    def executed(self, execution: str) -> CostModel:
        """Return the same model under a policy's ``execution``; ``keep`` is this very model."""
        compiled = self.compiled if execution == "keep" else execution != "eager"
        if compiled == self.compiled:
            return self
        if self._other is None:
            self._other = copy.copy(self)
            self._other.compiled = compiled
            self._other._rests, self._other._costs, self._other._memory = {}, {}, {}
        return self._other

    def layer(self, name: str) -> Layer:
        """Return a layer of the step by name; KeyError if there is none."""
        return self._layers[name]

    def works(self, name: str) -> tuple[GemmWork, ...]:
        """Return the products of a layer's step at the scaled shapes.

        Raises:
            KeyError: the report has no such layer.
        """
        return self._works[name]

    def layer_cost(self, name: str, plan: LayerPlan, activations: str = "keep") -> LayerCost:
        """Return seconds of one layer's GEMMs and casts in one step (all calls, all repeats of scaled depth).

        Args:
            name: of the layer.
            plan: a recipe per GEMM.
            activations: dtype of autocast around the model; ``keep`` is the script's.

        Raises:
            KeyError: the report has no such layer.
        """
        found = self._costs.get((name, plan, activations))
        if found is None:
            found = self._costs[name, plan, activations] = self._layer_cost(name, plan, activations)
        return found

    def _layer_cost(self, name: str, plan: LayerPlan, activations: str) -> LayerCost:
        script, cpu = self._script[name], self.target.is_cpu
        works, fused = self._works_under(name, plan), self.rates.library or self.compiled
        shared = self._input_reuse.get(name, 1.0) if self.compiled else 1.0
        # on a CPU a call casts each operand by itself, in kernels of this package
        run = partial(layer_cost, self.target, self.rates, fused=fused and not cpu, eager=not (fused or cpu))
        run = partial(run, input_reuse=shared, weight_reuse=self.weight_reuse)
        parts = [run(work=work, plan=plan, activations=activations, script=script) for work in works]
        gemm = sum(part.gemm for part in parts)
        weighted = sum(part.gemm * part.error for part in parts)
        linear = self._layers[name].kind not in ("conv", "rnn") and "grouped" not in self._layers[name].flags
        measured = self._measured_over_modelled(plan, kept_family(activations, script)) if linear else 1.0
        return LayerCost(
            gemm=gemm * measured,
            cast=sum(part.cast for part in parts) * measured,
            kernels=sum(part.kernels for part in parts),
            error=weighted / gemm if gemm else 0.2,
        )

    def _measured_over_modelled(self, plan: LayerPlan, kept: str) -> float:
        """Return what timed linears took over what the model says: the mean of the three GEMMs' recipes."""
        known = self._factors.get("compiled" if self.compiled else "eager", {})
        families = [kept if recipe is None else recipe_family(recipe) for recipe in plan.recipes]
        return sum(known.get(family, _unknown(known, family)) for family in families) / len(families)

    def _works_under(self, name: str, plan: LayerPlan) -> tuple[GemmWork, ...]:
        """Return the GEMMs of a layer under a plan.

        Selective checkpointing keeps the results of some layers, in 16 and 8 bits only: in another format such a layer
        multiplies once more in the backward pass.
        """
        works = self._works[name]
        if "kept" not in self._layers[name].flags or plan.fprop is None or plan.fprop.format not in NOT_LISTED:
            return works
        return tuple(replace(work, roles=("fprop", "recompute", *work.roles[1:])) for work in works)

    def layer_time_ms(self, name: str, plan: LayerPlan, activations: str = "keep") -> float:
        """Return milliseconds of one layer's GEMMs and casts: the additive part of a step's time.

        Args:
            name: of the layer.
            plan: a recipe per GEMM.
            activations: dtype of autocast around the model; ``keep`` is the script's.
        """
        return self.layer_cost(name, plan, activations).seconds * 1e3

    def rest(self, activations: str = "keep", attention: str = "keep") -> RestCost:
        """Return the time of what is not a layer's GEMM."""
        key = (activations, attention)
        found = self._rests.get(key)
        if found is None:
            found = self._rests[key] = rest_cost(
                self.target,
                self.rates,
                self._rest_operators.values(),
                self.scale,
                activations=activations,
                attention=attention,
                compiled=self.compiled,
            )
        return found

    def under(self, policy: Policy, plans: Mapping[str, LayerPlan]) -> StepEstimate:
        """Return time and memory of one step under a policy whose layers run ``plans``."""
        return self.executed(policy.execution).estimate(
            plans,
            activations=policy.activations,
            attention=policy.operators.attention,
            norm=policy.operators.norm,
            softmax=policy.operators.softmax,
            optimizer=policy.optimizer,
            implementation=policy.implementation,
        )

    def estimate(
        self,
        plans: Mapping[str, LayerPlan],
        *,
        activations: str = "keep",
        attention: str = "keep",
        norm: str = "fp32",
        softmax: str = "fp32",
        optimizer: OptimizerPolicy | None = None,
        implementation: ImplementationPolicy | None = None,
    ) -> StepEstimate:
        """Return time and memory of one step; layers that ``plans`` does not name keep the script's dtype.

        Args:
            plans: layer -> a recipe per GEMM.
            activations: dtype of autocast around the model; ``keep`` is the script's.
            attention, norm, softmax: dtype that a policy gives these operators: ``keep``, ``bf16`` or ``fp32``.
            optimizer: how its state is stored; None keeps the script's.
            implementation: which of several ways of torch's is taken; None keeps the script's.
        """
        gemm = cast = kernels = error = 0.0
        kept = {"attention": attention, "norm": norm, "softmax": softmax}
        fp32_operators = tuple(name for name, dtype in kept.items() if dtype == "fp32")
        ways = implementation or ImplementationPolicy()
        turned = ways.layout == "channels_last"
        for name, layer in self._layers.items():
            cost = self.layer_cost(name, plans.get(name, KEPT), activations)
            gemm += cost.gemm * (_TURNED if turned and layer.kind == "conv" else 1.0)
            cast += cost.cast
            kernels += cost.kernels
            error += cost.error * cost.seconds
        rest = self.rest(activations, attention)
        state = optimizer or OptimizerPolicy()
        update = self._update_seconds(state)
        gaps = rest.kernels * self.rates.launch_us * 1e-6
        beside = self._less(rest.seconds, ways)
        if ways.attention == "unfused" and attention != "fp32" and (attention, activations) != ("keep", "keep"):
            beside["attention"] *= _UNFUSED_ATTENTION[self.target.is_cpu]
        others = sum(beside.values()) + gaps + update
        device = gemm + cast + others
        launch = max(0.0, self._host_seconds(kernels, rest) - device)
        total = device + launch
        width = (error + self.rates.error.get("rest", 0.35) * (others + launch)) / total if total else 0.0
        breakdown = {"gemm": gemm, "quantise": cast, **beside, "optimizer": update}
        breakdown["launch"] = launch + gaps
        return StepEstimate(
            time_ms=total * 1e3,
            low_ms=total * (1.0 - min(0.9, width)) * 1e3,
            high_ms=total * (1.0 + width) * 1e3,
            memory_bytes=self._memory_bytes(plans, activations, state, fp32_operators),
            breakdown={key: value * 1e3 for key, value in breakdown.items()},
            label=self.label,
        )

    def memory(
        self,
        plans: Mapping[str, LayerPlan],
        *,
        activations: str = "keep",
        optimizer: OptimizerPolicy | None = None,
        fp32_operators: Collection[str] = WIDE_OPERATORS,
    ) -> MemoryEstimate | None:
        """Return the modelled bytes of one step by purpose; None when the report counted no memory.

        Args:
            plans: layer -> a recipe per GEMM.
            activations: dtype of autocast around the model; ``keep`` is the script's.
            optimizer: how its state is stored; None keeps the script's.
            fp32_operators: what stays in float32 under autocast; see :class:`autoprec.cost.saved.Setting`.
        """
        found = self._step_memory(plans, activations, optimizer, fp32_operators)
        return found.at_peak() if found else None

    def most_samples(
        self,
        plans: Mapping[str, LayerPlan],
        limit: float,
        *,
        activations: str = "keep",
        fp32_operators: Collection[str] = WIDE_OPERATORS,
    ) -> int | None:
        """Return how many samples a step may have within a limit of bytes; None where batch or memory are unknown.

        Args:
            plans: layer -> a recipe per GEMM.
            limit: bytes.
            activations: dtype of autocast around the model; ``keep`` is the script's.
            fp32_operators: what stays in float32 under autocast.
        """
        samples = self.report.batch.get("samples", 0)
        found = self._step_memory(plans, activations, fp32_operators=fp32_operators)
        return int(samples * self.scale.tokens / self.scale.seq * found.most(limit)) if found and samples else None

    def _step_memory(
        self,
        plans: Mapping[str, LayerPlan],
        activations: str,
        optimizer: OptimizerPolicy | None = None,
        fp32_operators: Collection[str] = WIDE_OPERATORS,
    ) -> StepMemory | None:
        gpu, written = not self.target.is_cpu, self.report.source == "analytic"
        activations = "keep" if written else activations  # in 16 bits as it is: autocast changes no dtype there
        return step_memory(
            self.report,
            Setting(plans, activations, gpu, fp32_operators, shared=gpu and self.compiled),
            optimizer or OptimizerPolicy(),
            self.scale,
            self.parameters,
            shards=self.shards,
            script=self._as_written if written else None,
            lifetimes=None if written else self._lifetimes,
        )

    def _memory_bytes(
        self, plans: Mapping[str, LayerPlan], activations: str, state: OptimizerPolicy, fp32_operators: tuple[str, ...]
    ) -> int:
        key = (*(plans.get(name, KEPT) for name in self._layers), activations, state, fp32_operators)
        found = self._memory.get(key)
        if found is None:
            modelled = self.memory(plans, activations=activations, optimizer=state, fp32_operators=fp32_operators)
            found = self._memory[key] = modelled.total if modelled else 0
        return found

    def _update_seconds(self, state: OptimizerPolicy) -> float:
        second = second_moments(self._muon, self.parameters)
        fused = self.compiled or self.report.fused_update or state.update == "fused"
        passes = 1.0 if fused else _UNFUSED_CPU if self.target.is_cpu else _UNFUSED
        moved = self.parameters / self.shards * optimizer_bytes(state, second)[1] * passes
        return moved / (self.target.bandwidth * self.rates.bandwidth) + self._products_seconds(state.products)

    def _products_seconds(self, dtype: str) -> float:
        """Return the time of what optimizers' steps multiply, as written or in another dtype, on one of the shards."""
        total, speed = 0.0, self.target.bandwidth * self.rates.bandwidth
        for one in self._multiplied:
            moves = one.moves_to(dtype)
            written = one.dtype if self.target.peak(one.dtype) else "fp32"
            family = dtype if moves else written
            each = gemm_seconds(self.target, self.rates, family, one.m, one.k, one.n, one.batch)
            values = one.batch * (one.m * one.k + one.k * one.n + one.m * one.n)
            total += one.calls * (each + (_CAST_BYTES * values / speed if moves else 0.0))
        return total / self.shards

    def _less(self, seconds: Mapping[str, float], implementation: ImplementationPolicy) -> dict[str, float]:
        """Return the time of what is no layer's GEMM by category, less what other ways to compute it save."""
        out, speed = dict(seconds), self.target.bandwidth * self.rates.bandwidth / self.scale.tokens
        shares = {"gelu": _IN_ONE_KERNEL * (implementation.gelu == "fused")}
        shares["loss"] = _IN_SLICES * (implementation.loss == "chunked")
        for (way, kind), moved in self._other_ways.items() if any(shares.values()) else ():
            out[kind] = max(0.0, out[kind] - moved / speed * shares[way])
        return out

    @cached_property
    def _other_ways(self) -> Counter[tuple[str, str]]:
        """Bytes that operators move which may be computed in another way: (way, category of the breakdown)."""
        found: Counter[tuple[str, str]] = Counter()
        for row in self.report.operators:
            if row.module in self.report.gelus_by_hand:
                found["gelu", category(row.cls)] += row.bytes
            if is_large_log_softmax(row):
                found["loss", category(row.cls)] += row.bytes
        return found

    def _host_seconds(self, kernels: float, rest: RestCost) -> float:
        """Return the CPU time that launching a step takes: what small models are bound by."""
        launched = (kernels + rest.kernels) * 0.5 if self.compiled else kernels + rest.operators
        return launched * self.rates.host_us * 1e-6

    def can_run(self, layer: Layer | str, recipe: Recipe | None) -> tuple[bool, str]:
        """Say whether the target runs a layer under a recipe at the scaled shapes, and why (not)."""
        if isinstance(layer, str):
            layer = self._layers[layer]
        if recipe is None:
            return True, ""
        device = self.target.can_run(recipe)
        if not device.ok:
            return False, device.reason
        family = recipe_family(recipe)
        if "double_backward" in layer.flags and (recipe.format not in ("bf16", "fp32") or recipe.output == "fp32"):
            return (
                False,
                "its gradients are differentiated (create_graph=True), which only plain bf16 and fp32 GEMMs support",
            )
        alone = layer.kind in ("conv", "rnn")
        if layer.kind == "conv" and family in _NO_CONV:
            return False, f"no {family} convolution kernel exists in the backends: convolutions run in 16 bits"
        if layer.kind == "rnn" and family in _NO_CONV:
            return False, "recurrent layers run in the library's own kernels: 16 bits at least"
        if alone and (family == "tf32" or recipe.output == "fp32"):
            return False, f"its library's kernels run in fp32, bf16 or fp16 and return that: not {recipe.describe()}"
        if self.target.is_cpu:
            return True, device.reason
        if "grouped" in layer.flags:
            why = grouped_refusal(recipe, self.target.compute_capability)
            if why:
                return False, f"its weights are multiplied by a grouped GEMM: {why}"
        multiple = alignment(family)
        for work in self._works.get(layer.name, ()):
            # tokens are padded with zeros inside the GEMMs (numerics unchanged), features would change the layer
            for what, size in (("in_features", work.inp), ("out_features", work.out)):
                if size % multiple:
                    return False, f"{what} {size} is not a multiple of {multiple}, which {family} needs"
        return True, device.reason
