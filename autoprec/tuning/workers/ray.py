"""Trials on a Ray cluster: one actor per slot, each supervising a :class:`~autoprec.trial.driver.runner.TrialRunner`.

One driver asks and tells; an actor holds no state that a new one could not rebuild, so a lost worker or node costs the
trials that were running there, and those are run again elsewhere, a limited number of times. The script and its data
must be readable at the same path on every node (a shared file system, or Ray's ``working_dir``).
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import signal
import threading
from pathlib import Path
from typing import Any

from autoprec.errors import AutoPrecError, NoSpaceError, ScriptError, UsageError
from autoprec.support.optional import require
from autoprec.support.plain import Document
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.base import Runner
from autoprec.trial.driver.execute import command_from_json, command_to_json
from autoprec.trial.driver.runner import RETRIES
from autoprec.trial.protocol import HostInfo, TrialResult, TrialSpec
from autoprec.tuning.workers.head import Head

#: How long a worker may wait for room in the cluster: a node that died may be replaced, or may not.
ROOM_S = 60.0


class _NoRoomError(Exception):
    """The cluster has had no room for a worker for ``ROOM_S``."""


class _Supervisor:
    """The actor: starts the script where Ray put it, and runs what it is asked."""

    def __init__(self, command: Document, run_dir: str, seed: int) -> None:
        from autoprec.trial.driver.runner import TrialRunner

        self._runner = TrialRunner(command_from_json(command), run_dir=Path(run_dir), seed_offset=seed)

    def start(self) -> Document:
        """Start the host; errors travel as documents, so that no exception class must be unpickled."""
        try:
            return {"info": self._runner.start().to_json()}
        except AutoPrecError as error:
            return {"error": error.what, "where": error.where, "fix": error.fix}

    def ready(self) -> bool:
        """Answer as soon as this worker has a place to run."""
        return True

    def run(self, spec: Document) -> Document:
        """Run one trial; a full disk is a fault of the machine, and is returned as a document as well."""
        try:
            return {"result": self._runner.run(TrialSpec.from_json(spec)).to_json()}
        except NoSpaceError as error:
            return {"error": error.what, "where": error.where, "fix": error.fix}

    def close(self) -> None:
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
    if not address:  # a cluster of our own: its ports would be open to the whole network (Ray's switch has this name)
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    ray = require("ray", purpose="--engine ray")
    if ray.is_initialized():
        return ray
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
    settings: Document = {
        "address": address or None,
        "logging_level": "ERROR",
        "log_to_driver": False,
        "runtime_env": {"env_vars": {"PYTHONPATH": path}},
    }
    if not address:
        settings["include_dashboard"] = False
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**settings)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise UsageError(
            f"no Ray cluster answers at '{address or 'this machine'}': {error}",
            fix="start one with `ray start --head`, or unset RAY_ADDRESS to start one here",
        ) from error
    if terminated is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminated)  # Ray's own handler would leave with another exit code
    return ray


@functools.cache
def _head(address: str) -> Head:
    return Head(address)


def _head_of(ray: Any) -> Head:
    return _head(str(getattr(ray.get_runtime_context(), "gcs_address", "")))


class RayRunner(Runner):
    """A runner whose trials run in Ray actors.

    Args:
        run_dir: folder on their own node in which actors write logs.
        gpus: GPUs per trial; 0 for CPU trials.
        cores: CPU cores a trial claims.
    """

    def __init__(
        self,
        command: ScriptCommand,
        run_dir: Path,
        seed: int,
        *,
        slots: int,
        gpus: int = 0,
        cores: int = 1,
        address: str = "",
    ) -> None:
        self._ray = connect(address)
        self._head = _head_of(self._ray)
        self._command, self._run_dir, self._seed = command, run_dir, seed
        self._gpus, self._cores = gpus, cores
        self._slots = self._left = slots
        self._free: queue.PriorityQueue[tuple[bool, int, Any]] = queue.PriorityQueue()
        self._turn = itertools.count()
        self._actors: dict[Any, Any] = {}  # with its placement group, if it has one
        self._lock, self._closed = threading.Lock(), False
        self._info: HostInfo | None = None

    @property
    def size(self) -> int:
        return self._slots

    def _actor(self) -> Any:
        """Create an actor and wait until it has a place; the GPUs of one trial are always on one node."""
        ray, group = self._ray, None
        options: Document = {"num_cpus": self._cores, "max_concurrency": 1}
        if self._gpus:
            from ray.util.placement_group import placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            group = placement_group([{"CPU": self._cores, "GPU": self._gpus}], strategy="STRICT_PACK")
            options |= {
                "num_gpus": self._gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group=group),
            }
        actor = (
            ray.remote(_Supervisor)
            .options(**options)
            .remote(command_to_json(self._command), str(self._run_dir.absolute()), self._seed)
        )
        self._actors[actor] = group
        try:
            ray.get(actor.ready.remote(), timeout=ROOM_S)
        except ray.exceptions.GetTimeoutError as error:
            self._end(actor)
            raise _NoRoomError from error
        return actor

    def _give(self, actor: Any) -> None:
        """Offer a slot: one whose worker runs comes before one (None) whose worker must be started first."""
        self._free.put((actor is None, next(self._turn), actor))

    def _end(self, actor: Any) -> None:
        """Give an actor, and what was reserved for it, back to the cluster."""
        group = self._actors.pop(actor, None)
        self._ray.kill(actor)
        if group is not None:
            self._ray.util.remove_placement_group(group)

    def start(self) -> HostInfo:
        """Start the first actor and its host; the other slots start with their first trial.

        Raises:
            ScriptError: the script failed before its first training step.
            AutoPrecError: the cluster has no room for a single worker.
        """
        with self._lock:
            if self._info is None:
                try:
                    actor = self._actor()
                except _NoRoomError as error:
                    raise self._no_room() from error
                answer = self._head.wait(self._ray, actor.start.remote())
                if "error" in answer:
                    raise ScriptError(answer["error"], where=answer["where"], fix=answer["fix"])
                self._info = HostInfo.from_json(answer["info"])
                self._give(actor)
                for _ in range(self._slots - 1):
                    self._give(None)
            return self._info

    def run(self, spec: TrialSpec) -> TrialResult:
        """Run one trial on a free slot; a lost worker or node is replaced, and the trial run again.

        A slot for which the cluster has no room any more is given up: the trial then waits for another slot.

        Raises:
            AutoPrecError: no slot is left, or the cluster's head is lost.
            NoSpaceError: the worker's machine has no room for a trial's files.
        """
        self.start()
        lost, reason = 0, ""
        while lost <= RETRIES:
            actor = self._free.get()[2]
            if self._closed:
                return TrialResult("crashed", "this runner was closed")
            try:
                actor = self._actor() if actor is None else actor
                answer = self._head.wait(self._ray, actor.run.remote(spec.to_json()))
            except _NoRoomError as error:
                if not self._give_up_slot():
                    raise self._no_room() from error
            except self._ray.exceptions.RayActorError as error:
                if actor is not None:
                    self._end(actor)
                self._give(None)
                lost += 1
                reason = f"the Ray worker or its node was lost {lost} times: {str(error).splitlines()[0]}"
            except self._ray.exceptions.RayError as error:
                self._give(actor)
                return TrialResult("crashed", f"Ray: {type(error).__name__}: {str(error).splitlines()[0]}")
            else:
                self._give(actor)
                if "error" in answer:
                    raise NoSpaceError(answer["error"], where=answer["where"], fix=answer["fix"])
                return TrialResult.from_json(answer["result"])
        return TrialResult("crashed", reason)

    def _give_up_slot(self) -> bool:
        """Go on with one slot less; False when it was the last."""
        with self._lock:
            self._left -= 1
            if self._left:
                return True
            self._left = 1
        self._give(None)
        return False

    def _no_room(self) -> AutoPrecError:
        wanted = f"{self._cores} CPU cores" + (f" and {self._gpus} GPUs" if self._gpus else "")
        return AutoPrecError(
            f"the Ray cluster has had no room for one worker ({wanted}) for {ROOM_S:.0f} s",
            where=f"nodes alive: {sum(bool(node['Alive']) for node in self._ray.nodes())}",
            fix="bring nodes back, or stop what else runs there (`ray status` lists it)",
        )

    def close(self) -> None:
        """End every actor and give its resources back; a running trial is not waited for."""
        self._closed = True
        if self._head.lost:
            return
        actors = list(self._actors)
        closing = [actor.close.remote() for actor in actors]
        if closing:
            self._ray.wait(closing, num_returns=len(closing), timeout=5)
        for actor in actors:
            self._end(actor)
        for _ in range(2 * self._slots + len(actors)):
            self._give(None)  # for whoever waits for a slot
