"""What every phase of one search shares: the script, the problem, the references, the limits, the clock."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoprec.cost import CostModel, StepEstimate
from autoprec.graph.report import GraphReport
from autoprec.policy import LayerPlan, Policy, save_policy
from autoprec.policy.space import SearchSpace
from autoprec.precision.hardware import Target
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.files import canonical_json
from autoprec.trial.protocol import HostInfo, TrialResult, TrialSpec
from autoprec.tuning.decide.metrics import Reference
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.events import Listener
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.study.records import TrialRecord
from autoprec.tuning.study.study import StudyStore
from autoprec.tuning.workers.local import HostPool

__all__ = ["Context", "Limits"]

#: Trials that are repeated because a GPU was throttled or shared; more would only double the search.
MOST_REPEATED = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """What an acceptable policy may cost.

    ``gradient_error`` is in units of the mini-batch gradient noise; ``memory`` in bytes, None for no limit.
    """

    divergence: float
    gradient_error: float
    memory: int | None


@dataclass(slots=True)
class Context:
    """The state of one search, handed from phase to phase."""

    options: SearchOptions
    listener: Listener
    pool: HostPool
    store: StudyStore
    host: HostInfo
    graph: GraphReport
    target: Target
    measured: bool
    space: SearchSpace
    problem: Problem
    cost: CostModel
    limits: Limits
    study_dir: Path
    started: float
    references: dict[int, Reference] = field(default_factory=dict)
    table: SensitivityTable | None = None
    timings: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    repeated: int = 0
    _estimates: dict[str, StepEstimate] = field(default_factory=dict)

    # --- what things are called -------------------------------------------------------------------------------------
    @property
    def source(self) -> str:
        """``measured`` when this machine is the target and is timed, ``modelled`` in a rehearsal."""
        return "measured" if self.measured else "modelled"

    @property
    def workers(self) -> int:
        """Trials that may run at once: one per device when they are timed, every core in a rehearsal."""
        slots = self.pool.slots()
        if slots > 1:
            return min(slots, self.options.workers or slots)
        if self.options.workers:
            return self.options.workers
        return 1 if self.measured else max(1, min(8, len(os.sched_getaffinity(0))))

    def elapsed(self) -> float:
        """Return seconds since the search began."""
        return time.monotonic() - self.started

    def note(self, text: str) -> None:
        """Tell the listener, and keep the note for the report."""
        self.notes.append(text)
        self.listener.note(text)

    # --- running and modelling --------------------------------------------------------------------------------------
    def spec(self, policy: dict[str, Any] | None, **changes: Any) -> TrialSpec:
        """Return the spec of a measured trial.

        A forked trial shares the random state of its host by construction; elsewhere pairing needs a reseed at the
        first training forward.
        """
        options = self.options
        values: dict[str, Any] = {
            "policy": policy,
            "steps": options.steps,
            "warmup": options.warmup,
            "seed": None if self.host.launch == "fork" else options.seed,
            "backend": options.backend if self.measured else "emulated",
            "timeout_s": self.trial_timeout(),
            "memory_limit": self.limits.memory if self.measured and policy is not None else None,
        }
        return TrialSpec(**(values | changes))

    def trial_timeout(self) -> float:
        """Return the deadline of one trial: generous against slow policies, short against hangs."""
        reference = self.references.get(0)
        if reference is None:
            return 900.0
        return max(60.0, 20.0 * self.timings.get("reference_run_s", 30.0))

    def run(self, spec: TrialSpec, seed: int = 0) -> TrialResult:
        """Run one trial; once more where its times are not to be trusted, which the record says if it stays so."""
        result = self._run(spec, seed)
        if not (self.measured and result.ok and result.unreliable) or self.repeated >= MOST_REPEATED:
            return result
        self.repeated += 1
        self.note(f"a trial is repeated: {result.unreliable}")
        if self.repeated == MOST_REPEATED:
            self.note("this keeps happening: no further trial is repeated, and the times of this search are uncertain")
        again = self._run(spec, seed)
        return again if again.ok else result

    def _run(self, spec: TrialSpec, seed: int) -> TrialResult:
        """Run one trial, and book where its time went."""
        began = time.monotonic()
        result = self.pool.run(spec, seed)
        self.timings["training_s"] = self.timings.get("training_s", 0.0) + result.training_s
        self.timings["trial_wall_s"] = self.timings.get("trial_wall_s", 0.0) + time.monotonic() - began
        starts = self.timings.get("starts", 0.0)
        self.timings["start_s_sum"] = self.timings.get("start_s_sum", 0.0) + result.start_s
        self.timings["starts"] = starts + 1
        return result

    def estimate(self, params: Mapping[str, Any] | None) -> StepEstimate:
        """Return the modelled step on the target; ``None`` is the script as written."""
        key = canonical_json(dict(params)) if params is not None else ""
        if key not in self._estimates:
            if params is None:
                self._estimates[key] = self.cost.estimate({}, activations="keep")
            else:
                policy = self.problem.policy(params)
                self._estimates[key] = self.cost.executed(policy.execution).estimate(
                    self.problem.plans(params),
                    activations=policy.activations,
                    attention=policy.operators.attention,
                    optimizer=policy.optimizer,
                )
        return self._estimates[key]

    def reference_policy(self) -> dict[str, Any] | None:
        """Return the reference's policy document; None when it is the script as written."""
        name = self.options.reference
        if name == "script":
            return None
        activations = "bf16" if name == "bf16" else "keep"
        return Policy(recipes={name: BUILTIN_RECIPES[name]}, default=name, activations=activations).to_dict()

    def reference_estimate(self) -> StepEstimate:
        """Return the modelled step of the reference on the target."""
        name = self.options.reference
        if name == "script":
            return self.estimate(None)
        plan = LayerPlan.uniform(BUILTIN_RECIPES[name])
        plans = {layer.name: plan for layer in self.graph.tunable}
        return self.cost.estimate(plans, activations="bf16" if name == "bf16" else "keep")

    def gradient_error(self, params: Mapping[str, Any]) -> float:
        """Return the relative gradient error the sensitivity table predicts."""
        return self.table.predict(self.problem, params) if self.table is not None else 0.0

    def gradient_limit(self) -> float:
        """Return the largest acceptable relative gradient error; infinity when the noise is unknown."""
        if self.table is None or not self.table.noise:
            return math.inf
        return self.limits.gradient_error * self.table.noise

    # --- best so far ------------------------------------------------------------------------------------------------
    def acceptable(self, record: TrialRecord) -> bool:
        """Say whether a measured trial is within every limit."""
        m = record.metrics
        if not record.ok or not m:
            return False
        within_memory = self.limits.memory is None or m["memory_bytes"] <= self.limits.memory
        within_loss = m["divergence"] <= max(self.limits.divergence, m["noise_floor"])
        return within_memory and within_loss and m["gradient_error"] <= self.gradient_limit()

    def rank(self, record: TrialRecord) -> float:
        """Return what the objective minimises."""
        m = record.metrics
        if self.options.objective == "memory":
            return m["memory_bytes"]
        if self.options.objective == "balanced":
            return m["step_time_ms"] * m["memory_bytes"]
        return m["step_time_ms"]

    def best(self) -> TrialRecord | None:
        """Return the best acceptable trial so far, or None."""
        fit = [record for record in self.store.learned() if self.acceptable(record)]
        return min(fit, key=self.rank, default=None)

    def keep_best(self, best: TrialRecord | None) -> None:
        """Write the best policy so far into the study's folder, so that not even kill -9 loses it."""
        if best is not None:
            save_policy(Policy.model_validate(best.policy), self.study_dir / "best.yaml")
