"""The fixed side of a search: what is tuned, for which device, within which limits.

Everything here is known once one training step was recorded, and nothing of it changes afterwards. What a search
learns goes into the :mod:`~autoprec.tuning.state`; what it runs goes through :mod:`~autoprec.tuning.paired`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from autoprec.cost import CostModel, CostScale, StepEstimate, Verdict, judge
from autoprec.cost.estimate import ratio_bounds
from autoprec.graph.report import GraphReport
from autoprec.policy import LayerPlan, Policy
from autoprec.policy.space import SearchSpace, default_space, load_space, space_names
from autoprec.precision.hardware import Target, limit_bytes
from autoprec.precision.recipes import AS_WRITTEN, BUILTIN_RECIPES, KEEP
from autoprec.support.files import canonical_json
from autoprec.support.plain import Document
from autoprec.support.redact import redact_arguments
from autoprec.trial.environment import thread_count
from autoprec.trial.losses import MISMATCH
from autoprec.trial.protocol import HostInfo
from autoprec.tuning.decide.problem import VARIANT, Params, Problem
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.schedule import FEWEST_BLOCKS
from autoprec.tuning.target import resolve_target

#: Name of a variant -> (step time, memory) of the script under it, over those under the first.
Shapes = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class ModelledSteps:
    """The cost model's step time and memory of whole policies, each computed once.

    Args:
        reference: ``script``, ``fp32`` or ``bf16``: what divergence is measured against.
        shapes: step time and memory of the script under each variant, over those of the reference's.
    """

    cost: CostModel
    problem: Problem
    reference: str = "script"
    shapes: Shapes = field(default_factory=dict)
    _known: dict[str, StepEstimate] = field(default_factory=dict, repr=False)

    def script(self) -> StepEstimate:
        """Return the step of the script as written."""
        if "" not in self._known:
            self._known[""] = self.cost.estimate({}, activations="keep")
        return self._known[""]

    def of(self, params: Params) -> StepEstimate:
        """Return the step under a point of the search space."""
        key = canonical_json(dict(params))
        if key not in self._known:
            found = self.cost.under(self.problem.policy(params), self.problem.plans(params))
            self._known[key] = found.times(*self.shapes.get(str(params.get(VARIANT)), (1.0, 1.0)))
        return self._known[key]

    def of_reference(self) -> StepEstimate:
        """Return the step of the reference: the script as written, or all of it in float32 or bfloat16."""
        if self.reference == "script":
            return self.script()
        plan = LayerPlan.uniform(BUILTIN_RECIPES[self.reference])
        plans = {layer.name: plan for layer in self.cost.report.tunable}
        return self.cost.estimate(plans, activations="bf16" if self.reference == "bf16" else "keep")


@dataclass(frozen=True, slots=True)
class Setup:
    """What one search is about: the model, the device, the choices and the limits.

    Attributes:
        host: what the running script looks like from the inside.
        target: the device the policy is for; ``measured`` when that is this machine and steps are timed.
        space, problem: what may be decided, as a file says it and as a table of groups and choices.
        steps: modelled step times.
    """

    options: SearchOptions
    host: HostInfo
    graph: GraphReport
    target: Target
    measured: bool
    space: SearchSpace
    problem: Problem
    steps: ModelledSteps

    @classmethod
    def of(
        cls,
        options: SearchOptions,
        host: HostInfo,
        graph: GraphReport,
        shapes: Shapes = MappingProxyType({}),
        *,
        shards: int = 1,
    ) -> Setup:
        """Find out what is searched, for which device, and under which variants of the script's arguments.

        Args:
            options: the search's options.
            host: what the script was found to be.
            graph: the recorded step.
            shapes: the variants; empty for the script as given.
            shards: GPUs that share the state of a described model.

        Raises:
            UsageError: the target does not fit the device the script trains on, or a bad cost scale.
            SpaceError: the search space is not valid.
        """
        target, here = resolve_target(options.target, host.device)
        if options.max_memory == "auto":
            options = replace(options, max_memory=limit_bytes(target, host.device_bytes if here else 0))
        space = load_space(options.space) if options.space else default_space(target)
        scale = CostScale.parse(options.cost_scale) if options.cost_scale else None
        measured = here and scale is None
        space = space.executed(compiled=host.compiled, measured=measured, ranks=host.world_size)
        if target.is_cpu and space.name in space_names() and host.blocks < FEWEST_BLOCKS:
            space = space.model_copy(update={"execution": (KEEP,)})  # compiling all of a model takes too long to try
        if not options.space:
            space = space.with_bf16(multiplied=target.can_run(BUILTIN_RECIPES["bf16"]).ok)
        if options.metric in MISMATCH:
            space = space.with_rollout()
        if not graph.root_called:
            space = space.without_surroundings()
        compiled = host.compiled or not measured
        cost = CostModel(graph, target, scale=scale, compiled=compiled, backend=options.backend, shards=shards)
        problem = Problem.build(
            graph,
            space,
            cost.can_run,
            steps=_forwards(options, graph),
            variants=tuple(shapes),
        )
        return cls(
            options=options,
            host=host,
            graph=graph,
            target=target,
            measured=measured,
            space=space,
            problem=problem,
            steps=ModelledSteps(cost, problem, options.reference, shapes),
        )

    def restricted(self, space: SearchSpace) -> Setup:
        """Return the same search in another space."""
        before, can_run, variants = self.problem, self.cost.can_run, tuple(self.steps.shapes)
        problem = Problem.build(self.graph, space, can_run, steps=before.steps, variants=variants)
        return replace(self, space=space, problem=problem, steps=replace(self.steps, problem=problem, _known={}))

    @property
    def plans(self) -> dict[str, Mapping[str, LayerPlan]]:
        """What every layer runs where all take one choice, by the choice's name."""
        problem = self.problem
        return {name: problem.plans(problem.params_of(name)) for name in problem.choice_names}

    def verdict(self, *, written: str = AS_WRITTEN) -> Verdict:
        """Return what the cost model says can be gained, before anything is measured."""
        return judge(
            self.cost,
            self.plans,
            script=shlex.join(redact_arguments(self.options.command)),
            written=written,
            executions=self.problem.parameters.get("execution", ()),
        )

    @property
    def cost(self) -> CostModel:
        """The cost model of the step on the target."""
        return self.steps.cost

    @property
    def source(self) -> str:
        """``measured`` when this machine is the target and is timed, ``modelled`` in a rehearsal."""
        return "measured" if self.measured else "modelled"

    @property
    def is_timed_alone(self) -> bool:
        """Whether no trial computes beside another on one machine, so that each has the threads of the script."""
        return self.measured and self.options.workers < 2

    @property
    def threads(self) -> int:
        """Threads of a run that is timed on a CPU, where the script does not ask for a number itself; else 1."""
        return thread_count() if self.is_timed_alone and self.target.is_cpu else 1

    @property
    def takes_turns(self) -> bool:
        """Whether trials compile beside each other and are timed one at a time: a compiled script's, on a CPU."""
        one_script = self.host.world_size == 1 and not self.steps.shapes
        return self.measured and not self.options.workers and self.target.is_cpu and self.host.compiled and one_script

    def bounds(self, params: Params, ratio: float) -> tuple[float, float] | tuple[()]:
        """Return the model's bounds of a speed-up; empty where it is measured, for the script, and over itself."""
        if self.measured or ratio == 1.0 or not params or self.problem.is_script(params):
            return ()
        return ratio_bounds(ratio, self.steps.of(params).spread)

    @property
    def study_dir(self) -> Path:
        """The folder of the study's files."""
        return self.options.study_dir()

    def reference_policy(self) -> Document | None:
        """Return the reference's policy document; None when it is the script as written."""
        return reference_policy(self.options.reference)


def reference_policy(name: str) -> Document | None:
    """Return the policy document of a reference: ``fp32`` or ``bf16``; None for ``script``, as it is written."""
    if name == "script":
        return None
    activations = "bf16" if name == "bf16" else "keep"
    return Policy(recipes={name: BUILTIN_RECIPES[name]}, default=name, activations=activations).to_dict()


def _forwards(options: SearchOptions, graph: GraphReport) -> int:
    """Return how many training forwards a layer sees in a trial: what an amax history can hold of it."""
    calls = max((sum(g.calls for g in layer.gemms if g.role == "fprop") for layer in graph.layers), default=1)
    return (options.steps + options.warmup) * max(1, calls)
