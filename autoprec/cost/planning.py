"""Questions around a verdict: from which size on does it pay, when is the search paid back, what at 1024 GPUs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoprec.cost.model import CostModel
from autoprec.cost.scale import GemmWork
from autoprec.cost.verdict import judge
from autoprec.errors import UsageError
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import Target
from autoprec.precision.recipes import GEMMS
from autoprec.support.units import memory_text

Choices = Mapping[str, Mapping[str, LayerPlan]]
#: Share of the backward pass behind which gradient communication hides (buckets are sent while later ones compute).
_OVERLAP = 0.8
_KEEP = LayerPlan()
_NODE = 8
#: Share of the time that waiting for gradients may take where they are accumulated.
_LITTLE = 0.05
_GRADIENT_BYTES = 4.0
#: Training steps of a search as it is by default, at most: 30 trials of 23 steps, two policies and the reference under
#: three further paired seeds, 60 probes.
_SEARCH_STEPS = 30 * 23 + 3 * 3 * 23 + 60


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """What a step of ``tokens`` tokens (or of a sequence ``seq`` times as long) could gain.

    ``memory_bytes`` is the modelled peak of the baseline's step, 0 where the report counted none; ``fits`` compares it
    with the memory of one device.
    """

    factor: float
    tokens: int
    step_ms: float
    bound_speedup: float
    best_uniform: str
    best_uniform_speedup: float
    kind: str
    memory_bytes: int = 0
    fits: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def sweep(
    model: CostModel,
    choices: Choices,
    factors: Iterable[float] = (0.25, 0.5, 1, 2, 4, 8, 16, 32),
    *,
    sequence: bool = False,
    threshold: float = 0.03,
) -> list[SweepPoint]:
    """Return the verdict at several batch sizes (or sequence lengths).

    Args:
        factors: tokens per step relative to the model's.
        sequence: the tokens come from longer sequences, so that attention grows with them.
    """
    largest = max((layer.gemms[0].m for layer in model.report.tunable if layer.gemms), default=0)
    tokens = model.report.batch.get("tokens", 0) or largest
    out = []
    for factor in factors:
        scale = replace(
            model.scale, tokens=model.scale.tokens * factor, seq=model.scale.seq * (factor if sequence else 1.0)
        )
        scaled = model.at(scale)
        found = judge(scaled, choices, threshold=threshold)
        held = scaled.estimate(choices.get(found.baseline, {}), activations=found.activations).memory_bytes
        out.append(
            SweepPoint(
                factor=factor,
                tokens=round(tokens * scale.tokens),
                step_ms=found.step_ms,
                bound_speedup=found.bound_speedup,
                best_uniform=found.best_uniform[0],
                best_uniform_speedup=found.best_uniform[1],
                kind=found.kind,
                memory_bytes=held,
                fits=held <= model.target.memory_bytes,
            )
        )
    return out


def break_even_tokens(points: Sequence[SweepPoint], threshold: float = 0.03) -> int | None:
    """Return the smallest tokens per step from which on every larger point gains more than ``threshold``."""
    found: int | None = None
    for point in sorted(points, key=lambda p: p.tokens, reverse=True):
        if point.bound_speedup < 1.0 + threshold:
            break
        found = point.tokens
    return found


@dataclass(frozen=True, slots=True)
class Payback:
    """After how many training steps a search has paid for itself; infinite when nothing is gained."""

    search_s: float
    saved_ms_per_step: float
    steps: float
    hours: float

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; never is written as null."""
        out = asdict(self)
        return {key: None if value == float("inf") else value for key, value in out.items()}


def payback(step_ms: float, speedup: float, over_script: float = math.inf) -> Payback:
    """Return when a search on the target is paid back by steps that are ``speedup`` times faster.

    Args:
        step_ms, speedup: of the baseline, and how many times faster the policy is.
        over_script: the same over the script as written: who does not search runs the faster of the two.
    """
    if over_script < speedup:
        step_ms, speedup = step_ms * over_script / speedup, over_script
    cost = _SEARCH_STEPS * step_ms / 1e3
    faster = step_ms / max(speedup, 1e-9)
    saved = step_ms - faster
    steps = cost * 1e3 / saved if saved > 1e-9 else float("inf")
    return Payback(cost, max(0.0, saved), steps, steps * faster / 3.6e6)


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """One step on many GPUs, extrapolated.

    Attributes:
        speedup: of the policy over the baseline, every rank casting the whole of what a tensor-parallel layer gathers.
        early_casts_speedup: the same where each rank casts its share before it is gathered.
        exposed: share of the policy's step spent waiting for communication.
        accumulation: steps of this size between two reductions of gradients from which on waiting for those takes less
            than 5 % of the time; 1 where they hide.
        accumulated_speedup: ``early_casts_speedup`` with so many.
        state_bytes: parameters, gradients and optimizer state of one GPU's share (optimizer state sharded over
            replicas).
        saved_bytes: what it saves for backward, as the baseline or the policy does, whichever is more; None where the
            recorded step counted none.
        fits: whether both together fit into its memory.
    """

    gpus: int
    tensor_parallel: int
    data_parallel: int
    baseline_ms: float
    policy_ms: float
    speedup: float
    early_casts_speedup: float
    exposed: float
    accumulation: int
    accumulated_speedup: float
    state_bytes: int
    saved_bytes: int | None
    fits: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _reduce_seconds(size: float, replicas: int, ways: int, links: Mapping[str, float]) -> float:
    """Return the time of a hierarchical all-reduce of ``size`` bytes: inside the node, then every GPU its share."""
    inside = min(replicas, max(1, _NODE // ways))
    across = replicas / inside
    near = 2.0 * (inside - 1) / inside * size / links["scale_up"]
    far = 2.0 * (across - 1) / across * size / inside / links["scale_out"] if across > 1 else 0.0
    return near + far


def tensor_parallel_share(model: CostModel, ways: int, *, early_casts: bool = False) -> CostModel:
    """Return the model of one of ``ways`` GPUs that share every layer, without what they exchange.

    The wider side of a layer is cut. The other side stays whole: the input of a layer whose outputs are divided, the
    output gradient of one whose inputs are. Whether every rank quantises that whole (torch's DTensor with row-wise or
    block scaling), or its share of the tokens before they are gathered (``early_casts``; Transformer Engine under
    sequence parallelism), decides how much of a recipe's gain is left.
    """

    def share(work: GemmWork) -> GemmWork:
        casters = ways if early_casts else 1
        if work.inp > work.out:
            return replace(work, inp=max(1, work.inp // ways), gathered="grad_output", casters=casters)
        return replace(work, out=max(1, work.out // ways), gathered="input", casters=casters)

    return model.split(share) if ways > 1 else model


def check_layout(target: Target, gpus: Sequence[int], tensor_parallel: int) -> None:
    """Refuse what :func:`scale_out` cannot extrapolate to.

    Raises:
        UsageError: a count that the replica size does not divide, or a device without links in the table.
    """
    if not target.links:
        raise UsageError(f"{target.title} has no links in the table", fix="choose a GPU target, or give yours `links`")
    if not 1 <= tensor_parallel <= _NODE:
        raise UsageError(f"tensor parallel over {tensor_parallel} GPUs leaves the node", fix=f"use 1 to {_NODE}")
    for count in gpus:
        if count < tensor_parallel or count % tensor_parallel:
            raise UsageError(
                f"{count} GPUs are not a whole number of replicas of {tensor_parallel}",
                fix=f"use multiples of {tensor_parallel}, the tensor-parallel size",
            )


def _runs(model: CostModel, name: str, plan: LayerPlan) -> bool:
    return all(model.can_run(name, plan.recipe(gemm))[0] for gemm in GEMMS)


def scale_out(
    model: CostModel,
    plans: Mapping[str, LayerPlan],
    baseline: Mapping[str, LayerPlan],
    gpus: Sequence[int],
    *,
    activations: str = "keep",
    tensor_parallel: int = 1,
) -> list[ScalePoint]:
    """Extrapolate a step to many GPUs: tensor parallelism inside a node, data parallelism across.

    Args:
        model: cost model of one replica's step, not split.
        plans, baseline: the policy, and what it is compared with.
        gpus: total counts; each is divided into replicas of ``tensor_parallel``.
        tensor_parallel: GPUs that share one replica; at most 8, at least 1.

    Gradients travel as float32, reduced inside the node and then across nodes, one link per GPU; they hide behind 80 %
    of the backward pass, tensor-parallel activations (16 bits) do not hide. A layer whose share no longer fits its
    recipe's multiples runs the baseline. Nothing here was measured: it is an extrapolation.

    Raises:
        UsageError: a count that the replica size does not divide, or a device without links in the table.
    """
    check_layout(model.target, gpus, tensor_parallel)
    links, ways, model = model.target.links, tensor_parallel, _whole(model)
    shards = [tensor_parallel_share(model, ways, early_casts=early) for early in (False, True)]
    plans = {name: plan if _runs(shards[0], name, plan) else baseline.get(name, _KEEP) for name, plan in plans.items()}
    exchanged = _exchanged_bytes(model, ways) / links["scale_up"]
    saved = _saved_bytes(model, plans, baseline, activations, ways)
    out = []
    for count in gpus:
        replicas = count // ways
        traffic = _reduce_seconds(model.parameters / ways * _GRADIENT_BYTES, replicas, ways, links)
        whole, early = (shard.with_shards(replicas) for shard in shards)
        slow = _Step.of(whole, baseline, activations, exchanged, traffic)
        fast = _Step.of(whole, plans, activations, exchanged, traffic)
        faster = _Step.of(early, plans, activations, exchanged, traffic)
        again = faster.accumulation
        state = int(model.parameters / ways * (4 + 4 + 8 / replicas))
        point = ScalePoint(
            gpus=count,
            tensor_parallel=ways,
            data_parallel=replicas,
            baseline_ms=slow.seconds() * 1e3,
            policy_ms=fast.seconds() * 1e3,
            speedup=slow.seconds() / fast.seconds(),
            early_casts_speedup=slow.seconds() / faster.seconds(),
            exposed=(exchanged + fast.waiting) / fast.seconds(),
            accumulation=again,
            accumulated_speedup=slow.seconds(again) / faster.seconds(again),
            state_bytes=state,
            saved_bytes=saved,
            fits=state + (saved or 0) <= model.target.memory_bytes,
        )
        out.append(point)
    return out


def _saved_bytes(
    model: CostModel,
    plans: Mapping[str, LayerPlan],
    baseline: Mapping[str, LayerPlan],
    activations: str,
    ways: int,
) -> int | None:
    """Return the bytes that one of ``ways`` GPUs saves for backward; None where the report counted none.

    Without sequence parallelism 10 of the 34 bytes that a block saves per element of its input are whole on every GPU
    (Korthikanti et al., arXiv:2205.05198). A configuration does not say what a policy changes there.
    """
    asked = (baseline,) if model.report.source == "analytic" else (baseline, plans)
    held = [found for one in asked if (found := model.memory(one, activations=activations)) is not None]
    return max((int(one.saved * (10 + 24 / ways) / 34 + one.weight_casts / ways) for one in held), default=None)


def scale_notes(
    model: CostModel,
    points: Sequence[ScalePoint],
    plans: Mapping[str, LayerPlan],
    baseline: Mapping[str, LayerPlan],
    *,
    activations: str = "keep",
) -> list[str]:
    """Say why many GPUs gain other than one: what tensor parallelism leaves of the gain, and what waiting covers.

    Args:
        model: cost model of one replica's step, not split.
    """
    first, last, notes, model = points[0], points[-1], [], _whole(model)
    ways = first.tensor_parallel
    shard = tensor_parallel_share(model, ways)
    alone, shared = (_taken_back(m, plans, baseline, activations) for m in (model, shard))
    if ways > 1 and alone == alone and shared == shared:  # its GEMMs save something
        small = sum(not _runs(shard, name, plan) for name, plan in plans.items())
        more = model.at(replace(model.scale, tokens=4 * model.scale.tokens))
        (larger,) = scale_out(more, plans, baseline, [first.gpus], activations=activations, tensor_parallel=ways)
        notes.append(
            f"tensor parallel: of the time that the policy's GEMMs save, casts take back {alone:.0%} on one GPU and "
            f"{shared:.0%} on one of {ways}: a rank casts all of what its layers gather, and every cast costs at least "
            "its kernels. 'cast early': each rank casts its share before that is gathered (Transformer Engine under "
            f"sequence parallelism). {4 * _tokens(model):,} tokens in a pass instead of {_tokens(model):,}: "
            f"{larger.speedup:.2f}x, cast early {larger.early_casts_speedup:.2f}x at {first.gpus:,} GPUs"
        )
        if small:
            notes.append(f"{small} of {len(plans)} layers run 16 bits: their share has not the multiples they need")
    if last.accumulation > 1:
        notes.append(
            f"waiting: {memory_text(int(model.parameters / ways * _GRADIENT_BYTES))} of gradients per GPU (float32) do "
            f"not hide behind one backward pass of {_tokens(model):,} tokens. At {last.gpus:,} GPUs it is under 5 % "
            f"from {last.accumulation:,} passes per optimizer step on (gradient accumulation), where the policy gains "
            f"{last.accumulated_speedup:.2f}x" + (", cast early" if ways > 1 else "")
        )
    return notes


def _taken_back(
    model: CostModel, plans: Mapping[str, LayerPlan], baseline: Mapping[str, LayerPlan], activations: str
) -> float:
    """Return what the casts of a policy take longer, as a share of what its GEMMs take less."""
    slow, fast = (model.estimate(chosen, activations=activations).breakdown for chosen in (baseline, plans))
    saved = slow["gemm"] - fast["gemm"]
    return max(0.0, fast["quantise"] - slow["quantise"]) / saved if saved > 0 else math.nan


@dataclass(frozen=True, slots=True)
class _Step:
    """Seconds of one GPU: forward and backward with exchanged activations, the update, waiting for gradients."""

    passes: float
    update: float
    waiting: float

    @classmethod
    def of(
        cls, model: CostModel, plans: Mapping[str, LayerPlan], activations: str, exchanged: float, traffic: float
    ) -> _Step:
        found = model.estimate(plans, activations=activations)
        update, whole = found.breakdown["optimizer"] / 1e3, found.time_ms / 1e3
        return cls(whole - update + exchanged, update, max(0.0, traffic - _OVERLAP * whole * 2 / 3))

    def seconds(self, accumulated: int = 1) -> float:
        return accumulated * self.passes + self.update + self.waiting

    @property
    def accumulation(self) -> int:
        """Passes per reduction from which on waiting for gradients takes less than 5 % of the time."""
        return max(1, math.ceil((self.waiting * (1 / _LITTLE - 1) - self.update) / max(self.passes, 1e-12)))


def _exchanged_bytes(model: CostModel, ways: int) -> float:
    """Return what tensor parallelism moves in one step: four all-reduces of 16-bit activations per block."""
    return 4.0 * _blocks(model) * _tokens(model) * _hidden(model) * 2.0 * 2.0 * (ways - 1) / ways


def _whole(model: CostModel) -> CostModel:
    """Return the model of a rank that holds all parameters, also where the recorded one held a part of them (FSDP2).

    Raises:
        UsageError: the recorded rank computed a part of the layers as well.
    """
    if model.report.divided:
        raise UsageError(
            "the script divides its layers among ranks itself (tensor parallelism), and one rank was recorded",
            fix="plan from the script without parallelize_module, with --tensor-parallel",
        )
    out = copy.copy(model)
    out.report = replace(model.report, held=1.0)
    out.parameters = model.parameters / model.report.held
    return out


def _tokens(model: CostModel) -> int:
    return max((work.tokens for layer in model.report.tunable for work in model.works(layer.name)), default=0)


def _hidden(model: CostModel) -> int:
    """Return the width of the residual stream: the most frequent input size of the layers."""
    sizes: dict[int, int] = {}
    for layer in model.report.tunable:
        for work in model.works(layer.name):
            sizes[work.inp] = sizes.get(work.inp, 0) + 1
    return max(sizes, key=lambda size: (sizes[size], -size), default=0)


def _blocks(model: CostModel) -> float:
    """Return how many blocks the (scaled) model has: distinct numbered prefixes, times the depth factor."""
    prefixes = set()
    for layer in model.report.tunable:
        parts = layer.name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            prefixes.add(tuple(parts[: number + 1]))
    return len(prefixes) * model.scale.depth
