"""The part of AutoPrec inside the script's process: installed with torch, idle until the first training step.

``AUTOPREC_TRIAL`` names a JSON file: ``mode`` is ``host`` (stop at the first training forward and serve forks, or say
why that is not possible), ``trial`` (be one trial) or ``run`` (apply a policy and get out of the way).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoprec.trial.environment import CONFIG_VARIABLE, MARK_VARIABLE
from autoprec.trial.inside.fork_server import can_train_after_fork, serve_forks, settle
from autoprec.trial.inside.isolate import savers
from autoprec.trial.inside.isolate.entropy import repeat_entropy
from autoprec.trial.inside.isolate.isolation import add_layer, isolate, programs
from autoprec.trial.inside.isolate.loaders import load_in_process
from autoprec.trial.inside.isolate.seeding import clock_seeds, offset_seeds
from autoprec.trial.inside.isolate.sharing import shared_state
from autoprec.trial.inside.isolate.timers import stop_timers
from autoprec.trial.inside.observe.discovery import Found, discover, loss_parameters
from autoprec.trial.inside.observe.hooks import Events, Hooks
from autoprec.trial.inside.observe.loop import Loop
from autoprec.trial.inside.observe.measure import clock_for
from autoprec.trial.inside.policy_run import PolicyRun
from autoprec.trial.inside.spare import await_order
from autoprec.trial.inside.trial import Trial
from autoprec.trial.inside.zygote import leave_zygote, leave_zygote_at_first_seed, preload
from autoprec.trial.messages import connect, send_message
from autoprec.trial.processes import watch_driver
from autoprec.trial.progress import Beat, steps_file
from autoprec.trial.protocol import HostInfo, TrialSpec

_agent: Agent | None = None
_LOADER_NOTE = (
    "DataLoader workers are replaced by loading in the process, so that trials can be forked; that time is not counted"
)
#: After this many training forwards without a backward, or steps of tensors that no module owns, none will come.
_MOST_FORWARDS, _MOST_UNOWNED = 5000, 50
_STREAM_NOTE = "; an IterableDataset that shards by worker gives its data in another order"


def install(config_path: str) -> None:
    """Install the hooks in this process (called by the injected sitecustomize)."""
    global _agent
    if _agent is None:
        _agent = Agent(json.loads(Path(config_path).read_text(encoding="utf-8")))
        _agent.install()


def current() -> Agent | None:
    """Return the agent of this process; None when the script runs without AutoPrec."""
    return _agent


class Agent:
    """Waits for the first training forward, then does what its configuration says."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.mode = str(config["mode"])
        self.hooks = Hooks()
        self.trial: Trial | None = None
        self._pid = os.getpid()
        self._started = float(config.get("started", time.monotonic()))
        self._reached = False
        self._forwards = 0
        self._watching = threading.Event()
        self._loading: Any = None
        self._overlay: Any = None
        self._registered: Found | None = None
        self._running: PolicyRun | None = None
        self._forked = False
        #: Parameters of models that are trained for a few steps before the real one; held, so that no id comes back.
        self._passed_over: dict[int, torch.Tensor] = {}
        self._unowned = self._passed = 0
        self._aged = False
        self._aging: Loop | None = None

    def install(self) -> None:
        """Patch torch and start waiting."""
        if self.mode == "run" and self.config.get("policy") is None:
            return
        self.hooks.install()
        self.hooks.watch(self._on_training_call)
        self.hooks.events = _Backwards(self)
        if self.mode == "run":
            return
        if self.config.get("weights") == "fake":
            from autoprec.graph.fake import fake_weights

            fake_weights()
        self._overlay = isolate(self.config)
        stop_timers()
        self._seed()
        atexit.register(self._at_exit)
        first = os.environ.get(MARK_VARIABLE) == self.config["launcher_mark"]  # and not something the script started
        address = str(self.config.get("zygote", "")) if first else ""
        if address and not leave_zygote(address, self._configure, self._part):
            leave_zygote_at_first_seed(address, self._configure, self._part)
        if not self._forked:
            self._prepare()

    def _part(self) -> None:
        """After a zygote was left: what this process writes goes to a layer that the zygote does not see."""
        layer = f"overlay-{os.getpid()}-{len(self._overlay.layers)}"
        add_layer(self._overlay, Path(self.config["private"]) / layer)

    def _configure(self, config: dict[str, Any]) -> None:
        """In a fork of the zygote: from here on this process follows its own configuration."""
        self.config, self.mode = config, str(config["mode"])
        self._forked, self._pid = True, os.getpid()
        self._started = float(config["started"])
        self._overlay.allow(str(config["private"]), str(config["run_dir"]))
        add_layer(self._overlay, Path(config["private"]) / f"overlay-{os.getpid()}")
        self._seed()
        self._prepare()

    def _seed(self) -> None:
        offset = int(self.config.get("seed_offset", 0))
        repeat_entropy(offset)
        offset_seeds(offset)

    def _prepare(self) -> None:
        os.environ[MARK_VARIABLE] = str(self.config["mark"])
        hosting = self.mode == "host" and self.config["launch"] in ("auto", "fork") and "RANK" not in os.environ
        if hosting and self._loading is None:
            self._loading = load_in_process()
        self._watching = watch_driver(*self.config["driver"])

    # ---------------------------------------------------------------- the first training forward
    def _on_training_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forwards += 1
        # A script may evaluate in training mode for hours: without one backward no step will come.
        if self._forwards == _MOST_FORWARDS and not self.hooks.backwards:
            self._give_up("no_backward")
        if self._registered is not None:
            mine = {id(p) for p in self._registered.root.parameters()}
            if any(id(p) in mine for p in module.parameters()):
                self._stop(self._registered, module, args, kwargs)
            return
        optimizers = self.optimizers()
        if not optimizers:
            return  # perhaps there never is one: the first backward tells (see _Backwards)
        owned = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        if not any(id(p) in owned for p in module.parameters()):
            return  # a loss module or a frozen tower
        found = discover(optimizers)
        if found is not None and not self._pass_over(found):
            self._stop(found, module, args, kwargs)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The living optimizers, without those of models that were passed over."""
        known = self._passed_over
        return [
            o
            for o in self.hooks.optimizers
            if not known or not all(id(p) in known for group in o.param_groups for p in group["params"])
        ]

    def _pass_over(self, found: Found) -> bool:
        """Ignore this model from now on, if the driver has seen that the script soon goes on with another."""
        if int(self.config.get("pass_over", 0)) <= self._passed:
            return False
        self._passed += 1
        self._passed_over |= {id(p): p for p in found.parameters}
        return True

    def _give_up(self, why: str) -> None:
        """Tell the driver now that no step will be seen; the script may go on for hours."""
        if self.mode == "host" and not self._reached:
            self._report_end(why)
            os._exit(0)

    # ---------------------------------------------------------------- what a Session tells
    def register(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The script names its model and optimizers itself: nothing has to be found."""
        owned: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._registered = Found([model], list(optimizers), owned, ["named by the script"])
        if self._running is not None:
            self._running.another(self._registered)

    def boundary(self, model: nn.Module) -> None:
        """A step has ended and the next begins: as good as a training forward where forwards cannot be seen."""
        if self._reached:
            self.hooks.announce(model)
        elif self._registered is not None:
            self._stop(self._registered, model, (), {})

    def without_forward(self) -> None:
        """A step was taken and no training forward seen (``model.forward(x)``, a functional call): stop after it."""
        if self._reached or not self.hooks.backwards or self._registered is not None:
            return
        optimizers = self.optimizers()
        if not optimizers or self._searched_in_vain():
            return
        found = discover(optimizers)
        if found is None:
            self._count_unowned()
        elif not self._pass_over(found):
            found.notes.append("the model's forward is not called through the module: the first step finds the model")
            self.hooks.unseen = found.root
            self._stop(found, found.root, (), {})

    def without_optimizer(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """A backward ran without an optimizer: the next training forward is the place to stop."""
        leaves = [leaf for leaf in loss_parameters(tensors) if id(leaf) not in self._passed_over]
        if not leaves or self._searched_in_vain():
            return
        found = discover((), loss_leaves=leaves)
        if found is None and self.hooks.functional is not None:
            root = self.hooks.functional
            weights: list[torch.Tensor] = [p for p in root.parameters() if p.requires_grad]
            found = Found([root], [], weights, ["called through functional_call: each backward counts as one step"])
        if found is None:
            self._count_unowned()
            return
        self._stop_at_call(found)

    def transformed(self) -> None:
        self._give_up("functional")

    def _searched_in_vain(self) -> bool:
        """Whether to let this step pass: a search over all living objects costs tens of ms, a script takes many steps.

        After many searches that found no module one is made only each time the number of steps has doubled.
        """
        if self._unowned < _MOST_UNOWNED:
            return False
        self._unowned += 1
        return self._unowned.bit_count() != 1

    def _count_unowned(self) -> None:
        self._unowned += 1
        if self._unowned >= _MOST_UNOWNED:
            self._give_up("no_module")

    def _stop(self, found: Found, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.hooks.unwatch()
        self.hooks.events = Events()
        if self.mode != "run" and not self._aged and self._train_on(found):
            return
        self._reached = True
        if self.mode == "run":
            if self.config.get("policy") is not None:
                folder = Path(os.environ[CONFIG_VARIABLE]).parent
                self._running = PolicyRun(self.config, self.hooks, folder, writer=_rank() == 0)
                self._running.begin(found)
        elif self.mode == "trial":
            if "order" in self.config:
                spec, asked = await_order(Path(self.config["order"]))
            else:
                spec, asked = TrialSpec.from_json(self.config["spec"]), float(self.config["asked"])
            self._begin(spec, found, Path(self.config["result"]), asked, module, args, kwargs)
        else:
            self._host(found, module, args, kwargs)

    def _stop_at_call(self, found: Found) -> None:
        """Stop at the next training forward of the model, or of a part of it."""
        mine = {id(p) for p in found.root.parameters()}

        def on_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # the root by identity as well: functional_call exchanges its parameters for the time of the call
            if module is found.root or any(id(p) in mine for p in module.parameters()):
                self._stop(found, module, args, kwargs)

        self.hooks.watch(on_call)

    def _train_on(self, found: Found) -> bool:
        """Train to the step from which the search is to start (``--at-step``); False where that is now.

        Steps that the script took before, by its own checkpoint, count.
        """
        from autoprec.applying.phases import steps_taken

        self._aged = True
        taken = max((steps_taken(optimizer) for optimizer in found.optimizers), default=0)
        wanted = int(self.config.get("at_step", 0))
        if taken and wanted:
            found.notes.append(f"the script resumed at step {taken} by itself")
        if wanted <= taken:
            return False
        progress = Path(self.config["result"] if self.mode == "trial" else self.config["socket"])

        def arrived(_loop: Loop) -> None:
            self.hooks.events = Events()
            self._stop_at_call(found)

        loop = Loop(
            found,
            total=wanted - taken,
            clock=clock_for(found.parameters[0].device),
            then=arrived,
            beat=Beat(steps_file(progress)) if _rank() == 0 else lambda: None,
        )
        self._aging, self.hooks.events = loop, loop
        loop.start()
        return True

    def _begin(
        self,
        spec: TrialSpec,
        found: Found,
        result: Path,
        asked: float,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._pid = os.getpid()
        self.trial = Trial(
            spec, found, self.hooks, result=result, asked=asked, writer=_rank() == 0, may_fork=self._may_fork(found)
        )
        if self._loading is not None:
            self._loading.charge = self.trial.credit
        savers.charge.to = self.trial.credit
        self.trial.begin(module, args, kwargs)

    def _may_fork(self, found: Found) -> bool:
        return self.config.get("launch") != "process" and not fork_obstacle(found)

    # ---------------------------------------------------------------- host
    def _host(self, found: Found, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _rank() != 0:
            os._exit(0)  # every rank has stopped here, and one of them is enough to say what the script is
        obstacle = fork_obstacle(found) if self.config.get("launch", "auto") in ("auto", "fork") else "not asked for"
        if self._loading is not None and self._loading.loaders and not obstacle:
            found.notes.append(_LOADER_NOTE + (_STREAM_NOTE if self._loading.iterable else ""))
        info = host_info(found, "process" if obstacle else "fork", time.monotonic() - self._started, obstacle)
        control = self._connect()
        self._watching.set()  # from here on the control connection tells
        preload()  # what every trial would import, and then collect, is done once for all forks
        settle()
        send_message(control, op="hello", info=info.to_json())
        if obstacle:
            control.close()
            os._exit(0)
        request = serve_forks(control, str(self.config["mark"]))
        add_layer(self._overlay, Path(self.config["private"]) / f"overlay-{request.id}")
        spec = TrialSpec.from_json(request.spec)
        if spec.threads > 1:
            torch.set_num_threads(spec.threads)  # safe: this process has never run a parallel region
        self._begin(spec, found, Path(request.result), request.asked, module, args, kwargs)

    def _connect(self) -> socket.socket:
        return connect(str(self.config["socket"]))

    # ---------------------------------------------------------------- the script ended
    def _at_exit(self) -> None:
        if os.getpid() != (self.trial.pid if self.trial is not None else self._pid):
            return  # a fork of the script's own (a DataLoader worker)
        if self.trial is not None:
            self.trial.at_exit()
        elif (
            self.mode == "host"
            and not self._reached
            and (self._forwards or self.hooks.backwards or self.hooks.optimizers)
        ):
            self._report_end()

    def _report_end(self, why: str = "") -> None:
        with contextlib.suppress(OSError):
            control = self._connect()
            if self._aging is not None:
                why = f"short:{self._aging.steps}"
            seen = {
                "why": why,
                "training_forwards": self._forwards,
                "backwards": self.hooks.backwards,
                "optimizers": [type(o).__name__ for o in self.hooks.optimizers],
            }
            send_message(control, op="ended", seen=seen)
            control.close()


class _Backwards(Events):
    """Before anything is known: what happens without a training forward that could be seen."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def before_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        if not self._agent.optimizers():
            self._agent.without_optimizer(tensors)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        self._agent.without_forward()

    def transformed(self) -> None:
        self._agent.transformed()


def fork_obstacle(found: Found) -> str:
    """Say why this process must not be forked now; empty when it may."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA is initialised"
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return "a process group is initialised"
    import multiprocessing

    if multiprocessing.active_children():
        return "the script has live worker processes"
    if any(p.device.type not in ("cpu", "meta") for p in found.parameters):
        return f"the model is on {found.parameters[0].device.type}"
    if others := _other_threads():
        count = f"{len(others)} other thread{'s' if len(others) > 1 else ''}"
        return f"the script has {count}, which a fork would not have: {', '.join(others[:4])}"
    if not hasattr(os, "fork") or sys.platform != "linux":
        return "this system cannot fork"
    if shared := shared_state():
        return f"the script has {shared}, which forks would share"
    return "" if can_train_after_fork() else "autograd has started threads, which a fork would not have"


#: Threads that no training needs: ours, and the one with which tqdm looks after bars that stand still.
IDLE_THREADS = ("autoprec-watch", "tqdm_monitor")


def _other_threads() -> list[str]:
    """Return the names of threads that training may wait for, such as one that loads batches into a queue."""
    return [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and thread.name not in IDLE_THREADS
        and not str(getattr(getattr(thread, "_target", None), "__module__", "")).startswith("torch._inductor")
    ]


def host_info(found: Found, launch: str, setup_s: float, obstacle: str) -> HostInfo:
    """Describe the script at its first training forward."""
    from autoprec.applying.compiling import autotunes, is_compiled
    from autoprec.applying.units import tunable_layers
    from autoprec.numerics.sharded import world_size
    from autoprec.optim.weight_gather import is_sharded

    root = found.root
    device = found.parameters[0].device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    notes = list(found.notes)
    if obstacle and obstacle != "not asked for":
        notes.append(f"trials are started as plain processes: {obstacle}")
    if started := programs():
        what = ", ".join(started[:4])
        notes.append(
            f"the script starts other programs ({what}), which here cannot work on a copy of your files: they are "
            "refused to write outside caches and the temporary directory (docs/trials.md)"
        )
    if clock_seeds:
        notes.append(f"{', '.join(clock_seeds)} is given the time as a seed: trials use one fixed seed instead")
    return HostInfo(
        launch=launch,
        model=model_info(root),
        layers=tuple(tunable_layers(root)),
        optimizers=tuple(type(o).__name__ for o in found.optimizers),
        device=name,
        world_size=world_size(),
        setup_s=setup_s,
        notes=tuple(notes),
        compiled=is_compiled(root),
        autotunes=autotunes(),
        sharded=is_sharded(root),
    )


def model_info(root: nn.Module) -> dict[str, Any]:
    """Return ``{"class", "parameters", "fingerprint"}`` of a model."""
    from autoprec.graph.analysis.modules import ModelNames

    return dict(ModelNames(root).identity())


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0
