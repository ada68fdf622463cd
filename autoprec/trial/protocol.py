"""What the driver asks of a trial and what it gets back: plain frozen data, no torch, JSON in and out.

There is one spec for each kind of trial, with what that kind needs and nothing else; :meth:`TrialSpec.from_json` reads
which one it is. A :class:`TrialResult` says how a trial ended and, where it trained, what was measured of its steps;
what it was asked beside that is its ``answer``, of a type of its own for each kind.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import ClassVar, get_args

from autoprec.errors import UnknownNameError
from autoprec.graph.report import GraphReport, OperatorTime, OperatorTimes
from autoprec.support.plain import Document, or_null, rebuild, shallow
from autoprec.trial.lifted import LiftedLines
from autoprec.trial.losses import LOWER, Series

#: Every way a trial can end other than ``ok`` and ``pruned``.
FAILURES = (
    "diverged",  # non-finite loss or gradient
    "oom",  # out of memory, by torch, the allocator or the kernel
    "crashed",  # a signal, os._exit, or an exception in the script
    "hung",  # no progress before the deadline
    "too_short",  # the script ended before the asked number of steps
    "mismatch",  # the policy does not fit the model, or was not executed
    "unsupported",  # a backend refused
    "unreported",  # the metric that was asked for was not reported
)

#: How a trial ends that would not be done, or was not, within the seconds it was given; says nothing of its policy.
OUT_OF_TIME = "out_of_time"
#: A perturbation of the reference: it does not train.
STILL = "still"
#: The reference among the contenders of a duel.
REFERENCE = ""
#: Seconds until the first training forward, and without a step in a trial, where the caller names no number.
PATIENCE_S = 600.0
#: Measured steps of a trial where the caller names no number.
STEPS = 20
#: Mini-batches whose gradients a scan compares for the gradient noise.
NOISE_BATCHES = 4
#: Up to this many parameters a model may be a throw-away (a warm-up fit, a probe), and its steps cost next to nothing.
SMALL_MODEL = 100_000


@dataclass(frozen=True, slots=True)
class Probe:
    """One question of a sensitivity scan, or one contender of a duel: a policy document, and the name it answers to."""

    id: str
    policy: Document


# --------------------------------------------------------------------------------------------------- what is asked
@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """What every kind of trial is told.

    Attributes:
        kind: the name of the kind in JSON.
        policy: a policy document, or None for the script as written.
        backend: which backend runs the GEMMs: ``auto`` or a name of :mod:`autoprec.backends`.
        seed: reseed at the first training forward by ``seed + rank``; None leaves the random state as the script
            left it (forked trials share it by construction).
        timeout_s: seconds of the trial's own time without a step after which it is ``hung``; time that the machine gave
            to others is not counted (:mod:`autoprec.trial.progress`).
        variant: name of the variant (other arguments of the script) that it runs under; empty for the reference's
            arguments. It chooses the host; the host itself does not read it.
        alone: nothing else of the search computes beside it, so that it has the threads that the script has.
    """

    kind: ClassVar[str] = ""
    policy: Document | None = None
    backend: str = "auto"
    seed: int | None = None
    timeout_s: float = PATIENCE_S
    variant: str = ""
    alone: bool = False

    @property
    def total(self) -> int:
        """Optimizer steps until the trial ends, or until the step that answers its question begins."""
        return 0

    def to_json(self) -> Document:
        """Return the JSON form."""
        return {"kind": self.kind} | asdict(self)

    @staticmethod
    def from_json(document: Document) -> TrialSpec:
        """Rebuild from :meth:`to_json`; unknown keys are ignored.

        Raises:
            UnknownNameError: there is no such kind of trial.
        """
        kind = str(document.get("kind", TrainSpec.kind))
        if kind not in _SPECS:
            raise UnknownNameError("kind of trial", kind, _SPECS)
        probes = {"probes": tuple(Probe(**probe) for probe in document["probes"])} if "probes" in document else {}
        return rebuild(_SPECS[kind], document | probes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec(TrialSpec):
    """Measure ``steps`` training steps after ``warmup`` others.

    Attributes:
        perturb: ``bf16`` rounds every weight once to bfloat16 before the first step (the benign perturbation of the
            noise floor); ``bf16:1``, ``bf16:2``, ... up or down at random, by that seed. ``still``: every learning rate
            is 0 in each step, which shows the loss of a script that does not train.
        anneal: multiply the learning rate by a cosine to 10 % over the trial (chaos shrinks).
        reference_losses, stop_gap: end early as ``pruned`` once the mean absolute relative gap to these losses over
            the last quarter of the steps seen exceeds ``stop_gap``. For one rank: others see other data.
        within_s: seconds after which no step is begun; two steps may show that it takes longer. None: no limit.
        by_block: where the policy or the script compiles the model as a whole, ``execution: compile`` takes its place:
            repeated blocks are compiled, N times cheaper for N blocks, and what lies around them runs as eager code.
        record_graph: also record the graph of the last step (``check``: audit by recording).
        metric, better: what it is compared by where not by its losses, and which values of that are better; it goes on
            until that was reported after its steps (:mod:`.inside.reporting.reports`).
        turns: other trials compile beside it, and its timed steps wait until none does (:mod:`.inside.observe.turns`).
    """

    kind: ClassVar[str] = "train"
    steps: int = STEPS
    warmup: int = 3
    perturb: str = ""
    anneal: bool = False
    reference_losses: tuple[float, ...] = ()
    stop_gap: float | None = None
    within_s: float | None = None
    by_block: bool = False
    record_graph: bool = False
    metric: str = ""
    better: str = LOWER
    turns: bool = False

    @property
    def total(self) -> int:
        """Optimizer steps of the trial."""
        return self.warmup + self.steps


#: Seconds in which a script's first steps are tried, besides the first one.
TRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrySpec(TrialSpec):
    """Up to ``steps`` steps or :data:`TRY_S`: does the script train, and does it go on with this model?"""

    kind: ClassVar[str] = "try"
    steps: int = 30

    @property
    def total(self) -> int:
        """Optimizer steps of the trial at most."""
        return self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSpec(TrialSpec):
    """Record the operator graph of the first step, then end; the answer is a :class:`GraphReport`."""

    kind: ClassVar[str] = "record"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSpec(TrialSpec):
    """Answer ``probes`` after ``warmup`` steps: the gradient error of each policy on the same weights and batch.

    Attributes:
        within_s: seconds after which no further probe is begun; the first one is always answered. None: no limit.
        noise_batches: mini-batches whose gradients are compared for the gradient noise; 1 where that is known.
        side_by_side: probes that may be at work at once where each is a fork of its own (CPU).
        stays: the process stays at its step where it may be forked, and later scans of that step are forks of it.
        log: file in the runner's folder to which each answer is added as soon as it is known
            (:mod:`autoprec.trial.probe_log`); empty for none.
    """

    kind: ClassVar[str] = "sensitivity"
    probes: tuple[Probe, ...] = ()
    warmup: int = 3
    within_s: float | None = None
    noise_batches: int = NOISE_BATCHES
    side_by_side: int = 1
    stays: bool = False
    log: str = ""

    @property
    def total(self) -> int:
        """Optimizer steps before the probes."""
        return self.warmup


@dataclass(frozen=True, slots=True, kw_only=True)
class DuelSpec(TrialSpec):
    """Time ``probes`` against ``policy`` in blocks of steps that take turns, to a ``precision``.

    Attributes:
        within_s: seconds after which no further round is begun. None: no limit.
        on_the_clock: they are those on the clock, not the process's own.
        precision: half the width of a speed-up's 95 % interval, relative to it, at which a duel is content.
        side_by_side: processes at once. Contenders are forks of the first where there may be more than one, and two of
            them compile at once where there may be three.
        ends_after: steps after which the script ends, where one process times all: blocks are then so short that half
            as many rounds as an interval takes are done by then. None: not known.
        by_block: as :attr:`TrainSpec.by_block`, in one process.
        by_backend: a contender is refused where none of the backends that its evidence names runs a layer.
        log: as :attr:`ScanSpec.log`, of each round.
    """

    kind: ClassVar[str] = "duel"
    probes: tuple[Probe, ...] = ()
    within_s: float | None = None
    on_the_clock: bool = False
    precision: float = 0.01
    side_by_side: int = 1
    ends_after: int | None = None
    by_block: bool = False
    by_backend: bool = False
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsSpec(TrialSpec):
    """Hold every GEMM of the steps against its exact product (:mod:`autoprec.trial.inside.checking.gemm_check`)."""

    kind: ClassVar[str] = "numerics"
    steps: int = STEPS

    @property
    def total(self) -> int:
        """Optimizer steps of the trial."""
        return self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LiftSpec(TrialSpec):
    """Play the first step again with lines of the script lifted to more bits, one at a time and all at once.

    Attributes:
        lines: at most so many, those with the largest errors.
        within_s: seconds after which no further line is lifted; the first one always is. None: no limit.
    """

    kind: ClassVar[str] = "lift"
    lines: int = 12
    within_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesSpec(TrialSpec):
    """Time ``steps`` steps after ``warmup`` others, and the operators of as many more by torch's profiler."""

    kind: ClassVar[str] = "times"
    steps: int = 5
    warmup: int = 3

    @property
    def total(self) -> int:
        """Optimizer steps of the trial."""
        return self.warmup + 2 * self.steps


_SPECS: dict[str, type[TrialSpec]] = {
    spec.kind: spec for spec in (TrainSpec, TrySpec, RecordSpec, ScanSpec, DuelSpec, NumericsSpec, LiftSpec, TimesSpec)
}


# --------------------------------------------------------------------------------------------------- what is answered
@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe of a scan found.

    Attributes:
        gradient_error: ``||g - g_ref|| / ||g_ref||`` over all trained parameters; None where it is not finite.
        loss: loss of its forward pass; None where it is not finite.
        nonfinite: its gradients or its loss are not finite.
        failed: why it has no gradients; empty where it has.
    """

    id: str
    gradient_error: float | None = None
    loss: float | None = None
    nonfinite: bool = False
    failed: str = ""

    @property
    def error(self) -> float:
        """Its gradient error; infinity where it failed or is not finite."""
        return math.inf if self.nonfinite or self.gradient_error is None else self.gradient_error


@dataclass(frozen=True, slots=True)
class GradientErrors:
    """The answer to a :class:`ScanSpec`.

    Attributes:
        probes: those that there was time for, in the order in which they were asked.
        gradient_noise: relative standard deviation of the gradient between mini-batches; None where only one was seen.
        noise_batches: how many were seen for that.
        hardly_moved: layers whose weights have hardly any gradient yet.
        reference_loss: loss of the script's own step; None where it is not finite.
    """

    kind: ClassVar[str] = "gradient_errors"
    probes: tuple[ProbeResult, ...] = ()
    gradient_noise: float | None = None
    noise_batches: int = 1
    hardly_moved: tuple[str, ...] = ()
    reference_loss: float | None = None


@dataclass(frozen=True, slots=True)
class DuelRounds:
    """The answer to a :class:`DuelSpec`.

    Attributes:
        rounds: milliseconds per step by contender, :data:`REFERENCE` among them, of each round.
        steps: optimizer steps that were taken in all.
        block: steps of a block where one process times all contenders; 0 where each block has a process.
        refused: why a contender was not timed, by its name.
        settled_s: seconds in which contenders compiled, and in one process settled as well.
    """

    kind: ClassVar[str] = "duel"
    rounds: tuple[dict[str, float], ...] = ()
    steps: int = 0
    block: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    settled_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GemmFindings:
    """The answer to a :class:`NumericsSpec`: rows of ``autoprec check --numerics``, as its JSON has them.

    Attributes:
        ok: nothing was found.
        findings: GEMMs beyond their bound, in the order in which they ran.
        gemms: a row for each layer and GEMM.
        not_compared: names of layers that were not.
    """

    kind: ClassVar[str] = "numerics"
    ok: bool
    findings: tuple[Document, ...] = ()
    gemms: tuple[Document, ...] = ()
    not_compared: tuple[str, ...] = ()


_Own = GradientErrors | DuelRounds | GemmFindings | LiftedLines | OperatorTimes
Answer = GraphReport | _Own
_OWN: dict[str, type[_Own]] = {one.kind: one for one in get_args(_Own)}
_ROWS: dict[str, type[ProbeResult | OperatorTime]] = {"probes": ProbeResult, "operators": OperatorTime}
_GRAPH = "graph"


def _answer_to_json(answer: Answer | None) -> Document | None:
    if answer is None:
        return None
    if isinstance(answer, GraphReport):
        return {"kind": _GRAPH} | answer.to_json()
    return {"kind": answer.kind} | asdict(answer)


def _answer_from_json(document: Document | None) -> Answer | None:
    if document is None:
        return None
    if document["kind"] == _GRAPH:
        return GraphReport.from_json(document)
    rows = {name: tuple(rebuild(one, row) for row in document[name]) for name, one in _ROWS.items() if name in document}
    return rebuild(_OWN[document["kind"]], document | rows)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How a trial ended and what was measured.

    Attributes:
        status: ``ok``, ``pruned``, :data:`OUT_OF_TIME`, or one of :data:`FAILURES`.
        reason: one sentence for a person; empty when ok.
        tail: the last lines of the trial's own output (failures only).
        losses: objective of every step seen, warm-up included; of a trial with several ranks their mean.
        step_ms: duration of every step; ``clock`` says of what: ``cuda_events``, or on the CPU ``cpu_time`` of the
            process, ``thread_time`` (:class:`autoprec.trial.inside.observe.measure.CpuClock`).
        memory_bytes: peak of a step by torch's allocator, of the rank that holds most; 0 where it was not measured.
        samples: per step, as seen in the batch; 0 when they could not be seen.
        skipped_steps: optimizer steps a GradScaler (the script's or ours) skipped.
        start_s: seconds from the request to the first training step.
        unreliable: why the times are not to be trusted (a throttled or shared GPU, compilation); empty where they are.
        audit: what ran of each layer beside what was asked, a document of ``autoprec check``; None without a policy.
        blocks: repeated blocks that share what was compiled for one; 0 where the model was not compiled by block.
        needed_s: seconds that a trial which ended as :data:`OUT_OF_TIME` would take; 0 for others.
        passed_over: why this is not the model that the script goes on training; empty where it is.
        penalty: what weights or optimizer state that lose updates add to the divergence; ``problems`` says which.
        metric: what was reported of the metric that was asked for; None where none was.
        answer: to what was asked beside measuring; None where nothing was, or it failed.
    """

    status: str
    reason: str = ""
    tail: str = ""
    losses: tuple[float, ...] = ()
    step_ms: tuple[float, ...] = ()
    warmup: int = 0
    clock: str = "cpu_time"
    memory_bytes: int = 0
    samples: int = 0
    skipped_steps: int = 0
    start_s: float = 0.0
    wall_s: float = 0.0
    training_s: float = 0.0
    unreliable: str = ""
    audit: Document | None = None
    blocks: int = 0
    needed_s: float = 0.0
    passed_over: str = ""
    penalty: float = 0.0
    problems: tuple[str, ...] = ()
    metric: Series | None = None
    answer: Answer | None = None

    @property
    def curve(self) -> tuple[float, ...]:
        """What it is compared by, lower being better: its losses, or the metric that was asked for."""
        return self.losses if self.metric is None else self.metric.curve

    @property
    def ok(self) -> bool:
        """True when the trial was measured to its end."""
        return self.status == "ok"

    def to_json(self) -> Document:
        """Return the JSON form; non-finite losses are written as null."""
        lists = {"losses": or_null(self.losses), "step_ms": or_null(self.step_ms)}
        parts = {"metric": self.metric and self.metric.to_json(), "answer": _answer_to_json(self.answer)}
        return shallow(self) | lists | parts

    @classmethod
    def from_json(cls, document: Document) -> TrialResult:
        """Rebuild from :meth:`to_json`; unknown keys are ignored."""
        metric, answer = Series.from_json(document.get("metric")), _answer_from_json(document.get("answer"))
        return rebuild(cls, document | {"metric": metric, "answer": answer})


@dataclass(frozen=True, slots=True)
class HostInfo:
    """What was found out about the script when it reached its first training forward.

    ``launch`` is the launch mode in use: fork, zygote or process. ``device`` is cpu, or a CUDA device name;
    ``compiled``: the script compiles its model, or a part of it, itself; ``gpus``: how many its first process uses;
    ``passed_over``: models that are trained for a few steps before this one; ``device_bytes``: of its GPU in all;
    ``scripted``: the model, or a part of it, is TorchScript; ``blocks``: how many of its repeated blocks can share what
    is compiled for one.
    """

    launch: str
    model: Document
    layers: tuple[str, ...]
    optimizers: tuple[str, ...]
    device: str
    world_size: int = 1
    setup_s: float = 0.0
    notes: tuple[str, ...] = ()
    compiled: bool = False
    gpus: int = 0
    passed_over: int = 0
    device_bytes: int = 0
    scripted: bool = False
    blocks: int = 1

    def to_json(self) -> Document:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Document) -> HostInfo:
        """Rebuild from :meth:`to_json`; unknown keys are ignored."""
        return rebuild(cls, document)
