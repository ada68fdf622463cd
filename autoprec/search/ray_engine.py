"""Trials on a Ray cluster: one actor per slot, each supervising a :class:`~autoprec.trial.runner.TrialRunner`.

One driver asks and tells; an actor holds no state that a new one could not rebuild, so a lost worker or node costs the
trials that were running there, and those are run again elsewhere, a limited number of times. The script and its data
must be readable at the same path on every node (a shared file system, or Ray's ``working_dir``).
"""

from __future__ import annotations

import os
import queue
import sys
from pathlib import Path
from typing import Any

from autoprec.errors import AutoPrecError, ScriptError, UsageError
from autoprec.optional import require
from autoprec.trial.command import ScriptCommand
from autoprec.trial.execute import command_from_json, command_to_json
from autoprec.trial.protocol import HostInfo, TrialResult, TrialSpec

__all__ = ["RETRIES", "RayRunner", "connect"]

#: How often a trial is run again after its worker or node was lost.
RETRIES = 2


class _Supervisor:
    """The actor: starts the script where Ray put it, and runs what it is asked."""

    def __init__(self, command: dict[str, Any], run_dir: str, seed: int) -> None:
        from autoprec.trial.runner import TrialRunner

        self._runner = TrialRunner(command_from_json(command), run_dir=Path(run_dir), seed_offset=seed)

    def start(self) -> dict[str, Any]:
        """Start the host; errors travel as documents, so that no exception class must be unpickled."""
        try:
            return {"info": self._runner.start().to_json()}
        except AutoPrecError as error:
            return {"error": error.what, "where": error.where, "fix": error.fix}

    def run(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Run one trial."""
        return self._runner.run(TrialSpec.from_json(spec)).to_json()

    def close(self) -> None:
        """End every process."""
        self._runner.close()


def connect(address: str) -> Any:
    """Connect to a Ray cluster (``auto``, ``host:port``), or start one on this machine when ``address`` is empty.

    Raises:
        MissingDependencyError: Ray is not installed.
        UsageError: no cluster answers at the address.
    """
    # Ray would otherwise ask `uv` or rewrite the driver's environment for workers
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require("ray", purpose="--engine ray")
    if ray.is_initialized():
        return ray
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
    settings: dict[str, Any] = {
        "address": address or None,
        "logging_level": "ERROR",
        "log_to_driver": False,
        "runtime_env": {"env_vars": {"PYTHONPATH": path}},
    }
    if not address:
        settings["include_dashboard"] = False
    try:
        ray.init(**settings)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise UsageError(
            f"no Ray cluster answers at '{address or 'this machine'}': {error}",
            fix="start one with `ray start --head`, or leave out --ray-address to start one here",
        ) from error
    return ray


class RayRunner:
    """A runner whose trials run in Ray actors; see :class:`autoprec.search.hosts.Runner`.

    Args:
        command: the script.
        run_dir: where actors write logs, on their own node.
        seed: paired seed.
        slots: trials at once.
        gpus: GPUs per trial; 0 for CPU trials.
        address: of the cluster, empty for one on this machine.
    """

    def __init__(
        self, command: ScriptCommand, run_dir: Path, seed: int, *, slots: int, gpus: int = 0, address: str = ""
    ) -> None:
        self._ray = connect(address)
        self._command, self._run_dir, self._seed, self._gpus = command, run_dir, seed, gpus
        self._slots = slots
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._actors: list[Any] = []
        self._groups: list[Any] = []
        self._info: HostInfo | None = None

    @property
    def size(self) -> int:
        """How many trials run at once."""
        return self._slots

    def _actor(self) -> Any:
        """Create an actor; the GPUs of one trial are always on one node."""
        ray = self._ray
        options: dict[str, Any] = {"num_cpus": 1, "max_concurrency": 1}
        if self._gpus:
            from ray.util.placement_group import placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            group = placement_group([{"CPU": 1, "GPU": self._gpus}], strategy="STRICT_PACK")
            self._groups.append(group)
            options |= {
                "num_gpus": self._gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group=group),
            }
        actor = (
            ray.remote(_Supervisor)
            .options(**options)
            .remote(command_to_json(self._command), str(self._run_dir.absolute()), self._seed)
        )
        self._actors.append(actor)
        return actor

    def start(self) -> HostInfo:
        """Start the first actor and its host; the other slots start with their first trial.

        Raises:
            ScriptError: the script failed before its first training step.
        """
        if self._info is None:
            actor = self._actor()
            answer = self._ray.get(actor.start.remote())
            if "error" in answer:
                raise ScriptError(answer["error"], where=answer["where"], fix=answer["fix"])
            self._info = HostInfo.from_json(answer["info"])
            self._free.put(actor)
            for _ in range(self._slots - 1):
                self._free.put(None)
        return self._info

    def run(self, spec: TrialSpec) -> TrialResult:
        """Run one trial on a free slot; a lost worker or node is replaced, and the trial run again."""
        self.start()
        lost = self._ray.exceptions.RayActorError
        actor = self._free.get()
        try:
            for attempt in range(1 + RETRIES):
                actor = actor if actor is not None else self._actor()
                try:
                    return TrialResult.from_json(self._ray.get(actor.run.remote(spec.to_json())))
                except lost as error:
                    actor, reason = None, f"the Ray worker was lost {attempt + 1} times: {str(error).splitlines()[0]}"
                except self._ray.exceptions.RayError as error:
                    return TrialResult("crashed", f"Ray: {type(error).__name__}: {str(error).splitlines()[0]}")
            return TrialResult("crashed", reason)
        finally:
            self._free.put(actor)

    def close(self) -> None:
        """End every actor and give its resources back."""
        for actor in self._actors:
            try:
                self._ray.get(actor.close.remote(), timeout=10)
            except Exception as error:  # a dead actor has nothing to close
                print(f"autoprec: a Ray worker did not close: {type(error).__name__}", file=sys.stderr)
            self._ray.kill(actor)
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._actors, self._groups = [], []
