"""What the driver asks of a trial and what it gets back: plain frozen data, no torch, JSON in and out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from autoprec.support.plain import or_null, rebuild, shallow

#: Every way a trial can end other than ``ok`` and ``pruned``.
FAILURES = (
    "diverged",  # non-finite loss or gradient
    "oom",  # out of memory, by torch, the allocator or the kernel
    "crashed",  # a signal, os._exit, or an exception in the script
    "hung",  # no progress before the deadline
    "too_short",  # the script ended before the asked number of steps
    "mismatch",  # the policy does not fit the model, or was not executed
    "unsupported",  # a backend refused
)


#: How a trial ends that would not be done, or was not, within the seconds it was given; says nothing of its policy.
OUT_OF_TIME = "out_of_time"
#: The reference among the contenders of a duel.
REFERENCE = ""
#: Seconds until the first training forward, and without a step in a trial, where the caller names no number.
PATIENCE_S = 600.0
#: Measured steps of a trial where the caller names no number.
STEPS = 20
#: Up to this many parameters a model may be a throw-away (a warm-up fit, a probe), and its steps cost next to nothing.
SMALL_MODEL = 100_000


@dataclass(frozen=True, slots=True)
class Probe:
    """One question of a sensitivity scan: the gradient error of a policy on the same weights and batch."""

    id: str
    policy: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """One trial: what to run, for how long.

    Attributes:
        kind: ``train`` (measure ``steps`` after ``warmup``), ``record`` (operator graph of one step, then end),
            ``try`` (up to ``steps`` steps or a second: does it train, and does it go on with this model?),
            ``sensitivity`` (``warmup`` steps, then answer ``probes``), ``duel`` (time ``probes`` against ``policy`` in
            blocks of steps, to a ``precision``), ``numerics`` (hold every GEMM of the steps against its exact product:
            :mod:`autoprec.trial.inside.checking.gemm_check`), ``run`` (to the script's own end).
        policy: a policy document, or None for the script as written.
        perturb: ``bf16`` rounds every weight once to bfloat16 before the first step (the benign perturbation of the
            noise floor); ``bf16:1``, ``bf16:2``, ... up or down at random, by that seed.
        seed: reseed at the first training forward by ``seed + rank``; None leaves the random state as the script
            left it (forked trials share it by construction).
        anneal: multiply the learning rate by a cosine to 10 % over the trial (chaos shrinks).
        reference_losses, stop_gap: end early as ``pruned`` once the mean absolute relative gap to these losses over
            the last quarter of the steps seen exceeds ``stop_gap``. For one rank: others see other data.
        backend: which backend runs the GEMMs: ``auto`` or a name of :mod:`autoprec.backends`.
        timeout_s: seconds of the trial's own time without a step after which it is ``hung``; time that the machine gave
            to others is not counted (:mod:`autoprec.trial.progress`).
        within_s: seconds after which a scan begins no further probe (the first one is always answered), a duel no
            further round, and a trial no further step: it ends after two where they show that it will take longer;
            None: no limit.
        on_the_clock: a duel's seconds are those on the clock, not its process's own.
        precision: half the width of a speed-up's 95 % interval, relative to it, at which a duel is content.
        side_by_side: processes that may be at work at once where each probe is a fork of its own (CPU); a duel's
            contenders are forks where there may be more than one.
        by_block: where the policy or the script compiles the model as a whole, ``execution: compile`` takes its place:
            repeated blocks are compiled, N times cheaper for N blocks, and what lies around them runs as eager code.
        record_graph: also record the graph in the last step (``check``: audit by recording).
        variant: under which other arguments of the script it runs; empty for those of the reference. It says which host
            is asked, and nothing to that.
    """

    kind: str = "train"
    policy: dict[str, Any] | None = None
    steps: int = STEPS
    warmup: int = 3
    perturb: str = ""
    seed: int | None = None
    anneal: bool = False
    reference_losses: tuple[float, ...] = ()
    stop_gap: float | None = None
    backend: str = "auto"
    probes: tuple[Probe, ...] = ()
    within_s: float | None = None
    on_the_clock: bool = False
    precision: float = 0.01
    side_by_side: int = 1
    timeout_s: float = PATIENCE_S
    by_block: bool = False
    record_graph: bool = False
    variant: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> TrialSpec:
        """Rebuild from :meth:`to_json`; unknown keys are ignored."""
        return rebuild(cls, document | {"probes": [Probe(**probe) for probe in document.get("probes", ())]})


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How a trial ended and what was measured.

    Attributes:
        status: ``ok``, ``pruned``, :data:`OUT_OF_TIME`, or one of :data:`FAILURES`.
        reason: one sentence for a person; empty when ok.
        tail: the last lines of the trial's own output (failures only).
        losses: objective of every step seen, warm-up included; of a trial with several ranks their mean.
        step_ms: duration of every step; ``clock`` says of what: ``cpu_time`` (process CPU time on the CPU) or
            ``cuda_events``, or ``wall``.
        memory_bytes: peak of a step by torch's allocator, of the rank that holds most; 0 where it was not measured.
        samples: per step, as seen in the batch; 0 when they could not be seen.
        skipped_steps: optimizer steps a GradScaler (the script's or ours) skipped.
        start_s: from the request to the first training step.
        unreliable: why the times are not to be trusted (a throttled or shared GPU, compilation in timed steps); empty
            when nothing speaks against them.
        payload: what ``record`` (a graph report), ``sensitivity`` and audits return.
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
    audit: dict[str, Any] | None = None
    payload: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True when the trial was measured to its end."""
        return self.status == "ok"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; non-finite losses are written as null."""
        return shallow(self) | {"losses": or_null(self.losses), "step_ms": or_null(self.step_ms)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> TrialResult:
        """Rebuild from :meth:`to_json`; unknown keys are ignored."""
        return rebuild(cls, document)


@dataclass(frozen=True, slots=True)
class HostInfo:
    """What was found out about the script when it reached its first training forward.

    ``launch`` is the launch mode in use: fork, zygote or process. ``device`` is cpu, or a CUDA device name;
    ``compiled``: the script compiles its model, or a part of it, itself; ``gpus``: how many its first process uses;
    ``passed_over``: models that are trained for a few steps before this one; ``device_bytes``: of its GPU in all.
    """

    launch: str
    model: dict[str, Any]
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

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> HostInfo:
        """Rebuild from :meth:`to_json`; unknown keys are ignored."""
        return rebuild(cls, document)
