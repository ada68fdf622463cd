"""The recorded training step: which operators ran, on which shapes, and what of them can be tuned."""

from __future__ import annotations

from autoprec.errors import NothingAcceptableError
from autoprec.graph.report import GraphReport
from autoprec.trial.protocol import TrialSpec
from autoprec.tuning.workers.local import HostPool

#: A recorded step is slower than a plain one by the operators it looks at, and may compile: minutes, never hours.
RECORD_TIMEOUT_S = 600.0


def record_step(pool: HostPool, label: str) -> GraphReport:
    """Record one training step of the script.

    Raises:
        NothingAcceptableError: the step could not be recorded, or has nothing in it that can be tuned.
    """
    result = pool.run(TrialSpec(kind="record", steps=1, timeout_s=RECORD_TIMEOUT_S))
    if not result.ok:
        raise NothingAcceptableError(
            f"the training step could not be recorded: {result.reason}",
            where=label,
            fix=f"the trial printed:\n{result.tail}" if result.tail else "run it with -v",
        )
    graph = GraphReport.from_json(result.payload["graph"])
    if not graph.tunable:
        reasons = "; ".join(sorted({layer.reason for layer in graph.layers})[:3]) or "no linear or conv layer ran"
        raise NothingAcceptableError(
            f"this script has no trainable GEMM to tune: {reasons}",
            where=label,
            fix="`autoprec inspect` lists every operator and why it is not tunable",
        )
    return graph
