"""Where trials run: this machine's cores or GPUs (``local``), or a Ray cluster (``ray``), behind one interface.

A further engine (Slurm, Kubernetes) subclasses :class:`autoprec.trial.driver.base.Runner` over
``python -m autoprec.trial.driver.execute``; ``examples/submitit_runner.py`` is one.
"""

from __future__ import annotations

import os
from pathlib import Path

from autoprec.errors import UsageError
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.base import Runner
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.protocol import PATIENCE_S
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.workers.local import RunnerFactory
from autoprec.tuning.workers.slots import SlotRunner, free_gpus, visible_gpus


def gpu_slots(gpus: list[str], per_trial: int) -> list[str]:
    """Return the value of ``CUDA_VISIBLE_DEVICES`` of every slot."""
    count = len(gpus) // per_trial
    return [",".join(gpus[i * per_trial : (i + 1) * per_trial]) for i in range(count)]


def runner_factory(options: SearchOptions, command: ScriptCommand, start_s: float = PATIENCE_S) -> RunnerFactory:
    """Return the factory of the engine that was asked for; ``start_s`` is until the first training forward, here.

    Args:
        options: the search's options.
        command: the script.
        start_s: seconds until its first training forward.

    Raises:
        UsageError: a Ray cluster without room for one trial.
        MissingDependencyError: ``--engine ray`` without Ray.
    """
    if options.engine == "ray":
        return _ray_factory(options, command)
    gpus = visible_gpus(dict(os.environ))
    per_trial = _gpus_per_trial(command, len(gpus))

    def runner(seed: int, folder: Path, devices: str = "") -> TrialRunner:
        own = {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
        return TrialRunner(
            command,
            run_dir=folder,
            seed_offset=seed,
            environment=own,
            setup_timeout_s=start_s,
            alone=options.target in ("auto", "cpu") and options.workers < 2,  # else runs are beside each other
        )

    if len(gpus) < 2 or per_trial == len(gpus):
        return runner
    free = free_gpus(gpus)
    free = free if len(free) >= per_trial else gpus
    slots = gpu_slots(free, per_trial)[: options.workers or None]
    left_out = [gpu for gpu in gpus if gpu not in free]
    notes = [f"another program holds memory of GPU {gpu}: no trial runs there" for gpu in left_out]

    def on_slots(seed: int, folder: Path) -> Runner:
        each = [runner(seed, folder / f"slot-{index}", devices) for index, devices in enumerate(slots)]
        return SlotRunner(runner(seed, folder), each, gpus=per_trial, notes=notes)

    return on_slots


def _gpus_per_trial(command: ScriptCommand, visible: int) -> int:
    """Return the GPUs that one trial takes: as many as its launcher starts processes, one without a launcher."""
    return max(1, min(command.processes or visible, visible))


def _ray_factory(options: SearchOptions, command: ScriptCommand) -> RunnerFactory:
    from autoprec.tuning.workers.ray import RayRunner, connect

    address = os.environ.get("RAY_ADDRESS", "")  # Ray's own name for the cluster to connect to
    ray = connect(address)
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    per_trial = _gpus_per_trial(command, gpus) if gpus else 0
    # trials that are timed on CPUs would disturb each other on one node: each claims all the cores of the smallest
    nodes = [int(node["Resources"]["CPU"]) for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    timed_on_cpus = not gpus and options.target in ("auto", "cpu")
    cores = min(nodes, default=1) if timed_on_cpus else 1
    most = gpus // per_trial if per_trial else sum(count // cores for count in nodes)
    if most < 1:
        raise UsageError("the Ray cluster has no CPU for a trial", fix="add a node with CPUs, or use --engine local")
    slots = min(options.workers or most, most)
    return lambda seed, folder: RayRunner(
        command, folder, seed, slots=slots, gpus=per_trial, cores=cores, address=address
    )
