"""Questions around a verdict: from which size on does it pay, and when is the search paid back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoprec.cost.model import CostModel
from autoprec.cost.verdict import judge
from autoprec.policy.schema import LayerPlan

Choices = Mapping[str, Mapping[str, LayerPlan]]
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


#: What a step may fill of a device: torch's allocator reserves more than it hands out.
USABLE_MEMORY = 0.9


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest micro-batch of one choice that a device holds, and what a step of it does.

    ``samples`` is 0 where not even one fits; ``tokens_per_s`` and ``memory_bytes`` are of one device.
    """

    choice: str
    samples: int
    tokens_per_s: float
    memory_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def at_the_limit(model: CostModel, choices: Choices, activations: str = "keep") -> list[Limit]:
    """Return the largest micro-batch of every choice and its tokens per second there, the fastest first.

    Empty for a step whose number of samples or whose memory is not known.
    """
    recorded, tokens = model.report.batch.get("samples", 0), model.report.batch.get("tokens", 0)
    out = []
    for name, plans in choices.items():
        held = model.memory(plans, activations=activations)
        if not (recorded and tokens and held):
            return []
        growing = held.saved + held.backward
        room = USABLE_MEMORY * model.target.memory_bytes - (held.total - growing)
        samples = max(0, math.floor(room / growing * recorded + 1e-9))
        limit = model.at(replace(model.scale, tokens=model.scale.tokens * max(1, samples) / recorded))
        step = limit.estimate(plans, activations=activations)
        rate = max(1, samples) * tokens * model.scale.tokens / recorded / step.time_ms * 1e3
        out.append(Limit(name, samples, rate if samples else 0.0, step.memory_bytes))
    return sorted(out, key=lambda limit: -limit.tokens_per_s)


#: Hardly a run is longer: what is paid back later never is.
HORIZON_STEPS = 10_000_000


@dataclass(frozen=True, slots=True)
class Payback:
    """After how many training steps a search has paid for itself; infinite beyond :data:`HORIZON_STEPS`."""

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
    steps = steps if steps <= HORIZON_STEPS else float("inf")
    return Payback(cost, max(0.0, saved), steps, steps * faster / 3.6e6)
