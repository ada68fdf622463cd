"""Times the operators of a script's own steps: some steps as they are, then as many under torch's profiler.

On a CPU a step is timed as in a trial: what other processes take is not counted. The profiler knows the time on the
wall alone, so what it says of operators is scaled by what of it this process had.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from autoprec.graph.report import DATA, OPTIMIZER, OperatorTime, OperatorTimes
from autoprec.trial.inside.observe.measure import own_seconds

if TYPE_CHECKING:
    from autoprec.trial.inside.observe.loop import Loop

#: Ranges that torch's own optimizers and loaders mark, by the beginnings of their names.
_PARTS = {"Optimizer.step#": OPTIMIZER, "enumerate(DataLoader)#": DATA}
#: Seconds for all steps after the first: a script with slow steps is timed over fewer.
_WITHIN_S = 30.0


class OperatorTimer:
    """Called by a loop after each step (:meth:`check`); :meth:`end` answers once the loop has taken all.

    Args:
        device: where the model trains.
        warmup: steps before those that are timed.
        steps: steps that are timed, and profiled after that.
    """

    def __init__(self, device: torch.device, warmup: int, steps: int) -> None:
        self._device, self._warmup, self._steps = device, warmup, steps
        self._ends: list[float] = []
        self._now = time.perf_counter if device.type == "cuda" else partial(own_seconds, device)
        self._profiler: Any = None

    def check(self, loop: Loop) -> None:
        """Note when a step ended, and begin to profile after those that are timed without."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ends.append(self._now())
        if loop.steps == 2:
            each_s = self._ends[1] - self._ends[0]
            if each_s * (loop.total - 2) > _WITHIN_S:
                self._steps = max(1, min(self._steps, int(_WITHIN_S / each_s / 2)))
                self._warmup = 2
                loop.total = self._warmup + 2 * self._steps
        if loop.steps == self._warmup + self._steps:
            self._profiler = torch.profiler.profile(activities=self._activities())
            self._profiler.__enter__()
            self._began = time.perf_counter(), self._now()

    def _activities(self) -> list[Any]:
        kinds = torch.profiler.ProfilerActivity
        return [kinds.CPU, kinds.CUDA] if self._device.type == "cuda" else [kinds.CPU]

    def end(self) -> OperatorTimes:
        """Return what was seen."""
        wall_s, own_s = time.perf_counter() - self._began[0], self._ends[-1] - self._began[1]
        self._profiler.__exit__(None, None, None)
        plain = self._ends[self._warmup - 1 : self._warmup + self._steps]
        spans = [after - before for before, after in itertools.pairwise(plain)]
        return OperatorTimes(
            step_ms=statistics.median(spans) * 1e3,
            profiled_ms=own_s * 1e3 / self._steps,
            steps=self._steps,
            operators=operator_rows(
                self._profiler.events(), self._steps, had=own_s / wall_s, on_gpu=self._device.type == "cuda"
            ),
        )


def operator_rows(events: list[Any], steps: int, *, had: float = 1.0, on_gpu: bool = False) -> tuple[OperatorTime, ...]:
    """Return a row for each operator and part of a step, the longest first.

    Args:
        events: of torch's profiler (``FunctionEvent``), each with its own time, without that of what it calls.
        steps: how many they are of.
        had: share of the time on the wall that this process had.
        on_gpu: take the time of an operator's kernels.
    """
    microseconds: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    last = _last_step(events)
    for event in events:
        if on_gpu and event.device_type.name != "CPU":
            continue  # a kernel: its time is that of the operator that launched it
        part = _part(event)
        if not part and last is not None and last.start <= event.time_range.start <= last.end:
            part = OPTIMIZER
        key = event.name, part
        microseconds[key] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
        calls[key] += 1
    rows = (
        OperatorTime(op, part, calls[op, part] / steps, spent * had / steps / 1e3)
        for (op, part), spent in microseconds.most_common()
    )
    return tuple(row for row in rows if row.ms > 0)


def _last_step(events: list[Any]) -> Any:
    """Return the span of the last optimizer step: of one in which profiling ends, operators do not know that it is."""
    spans = (event.time_range for event in events if event.name.startswith("Optimizer.step#"))
    return max(spans, key=lambda span: span.start, default=None)


def _part(event: Any) -> str:
    """Return the part of the step that an event lies in; empty for the model's."""
    while event is not None:
        for beginning, part in _PARTS.items():
            if event.name.startswith(beginning):
                return part
        event = event.cpu_parent
    return ""
