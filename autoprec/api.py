"""The search as a Python call: what ``autoprec search`` does, without the terminal."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoprec.tuning.study.records import SearchResult

__all__ = ["search"]


def search(
    script: str | Sequence[str],
    *,
    target: str = "auto",
    space: str = "",
    trials: int = 30,
    budget_s: float | None = None,
    steps: int = 20,
    warmup: int = 3,
    max_divergence: float = 0.0025,
    max_gradient_error: float = 0.12,
    max_memory: int | None = None,
    objective: str = "throughput",
    reference: str = "script",
    seed: int = 0,
    output: str = "policy.yaml",
    study: str = "",
    storage: str = "",
    resume: bool = False,
    workers: int = 0,
    engine: str = "local",
    ray_address: str = "",
    gpus_per_trial: int = 1,
    sampler: str = "ours",
    cost_scale: str = "",
    calibration: str = "",
    force: bool = False,
    seeds: int = 4,
    finalists: int = 3,
    backend: str = "auto",
    runs_dir: str = "autoprec-runs",
    track: bool = True,
    progress: bool = False,
) -> SearchResult:
    """Search the precision policy that trains a script fastest without changing its loss curve.

    Args:
        script: the command line of the script, as text (``"train.py --lr 3e-4"``) or as tokens.
        target: ``auto`` (the device the script trains on, timed), or a name of ``autoprec targets`` (modelled).
        space: a shipped search space, or a file; empty: the one that suits the target.
        trials, budget_s: the most trials and seconds; it ends earlier when nothing left is worth a trial.
        steps, warmup: training steps of a trial that are scored, and those before them that are not.
        max_divergence: accepted mean relative loss gap, as a fraction (0.0025 is 0.25 %).
        max_gradient_error: accepted gradient error, as a share of the mini-batch gradient noise.
        max_memory: accepted peak memory in bytes.
        objective: ``throughput``, ``memory`` or ``balanced``.
        reference: what divergence is measured against: ``script``, ``fp32`` or ``bf16``.
        seed: the first paired seed, and the seed of the sampler.
        finalists, seeds: how many policies are measured again, and over how many paired seeds.
        output: where the policy is written.
        study, storage, resume: name and database of the study, and whether to continue it.
        workers, engine: trials side by side (0: as many as can be timed), ``local`` or on a ``ray`` cluster.
        ray_address, gpus_per_trial: the Ray cluster, and the GPUs that one trial takes there.
        sampler: ``ours``, ``tpe``, ``nsga2``, ``random``, ``ilp`` or ``greedy``.
        cost_scale: model time at larger shapes, e.g. ``"width=16,depth=4,tokens=32"``.
        calibration: rates written by ``autoprec calibrate``, for a modelled target.
        force: search although the verdict is that nothing can be gained.
        backend: who runs the GEMMs, see ``autoprec doctor``.
        runs_dir: folder of all studies.
        track, progress: log trials to MLflow; print phases and trials on stderr.

    Returns:
        What ``autoprec search --json`` prints, as an object; ``autoprec.load(result.policy)`` is the policy.

    Raises:
        UsageError: an option that cannot be meant; the message says what can.
        AutoPrecError: see docs/exit-codes.md.
    """
    asked = dict(locals())  # every keyword by its name; tests hold them to the fields of SearchOptions
    for name in ("script", "track", "progress"):
        del asked[name]
    return _run(script, asked, track=track, progress=progress)


def _run(script: str | Sequence[str], asked: dict[str, Any], *, track: bool, progress: bool) -> SearchResult:
    from autoprec.trial.command import ScriptCommand
    from autoprec.tuning.engine import Search
    from autoprec.tuning.events import Listener, Listeners
    from autoprec.tuning.options import SearchOptions

    tokens = tuple(shlex.split(script)) if isinstance(script, str) else tuple(script)
    options = SearchOptions(command=tokens, **asked)
    command = ScriptCommand.parse(options.command)
    listeners: list[Listener] = []
    with contextlib.ExitStack() as stack:
        if progress:
            from autoprec.cli.progress import TerminalProgress

            terminal = TerminalProgress()
            stack.callback(terminal.close)
            listeners.append(terminal)
        if not track:
            return Search(options, command, Listeners(*listeners)).run()
        from autoprec.tracking.listener import TrackingListener

        tracker = TrackingListener(options.runs_dir)
        stack.callback(tracker.close)
        engine = Search(options, command, Listeners(*listeners, tracker))
        return tracker.attach(engine.run(), engine.study_dir)
