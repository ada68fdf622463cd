"""The part of AutoPrec inside the script's process: installed with torch, idle until the first training step.

``AUTOPREC_TRIAL`` names a JSON file. Its ``mode`` says which of three programs this process becomes at that step
(:mod:`.first_step`): a ``host`` that serves forks (:mod:`.host`), one ``trial`` (:mod:`.trial`), or a ``run`` of the
whole script under a policy (:mod:`.policy_run`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoprec.numerics.sharded import rank
from autoprec.support.plain import Document
from autoprec.trial.environment import CONFIG_VARIABLE, MARK_VARIABLE
from autoprec.trial.inside import host
from autoprec.trial.inside.first_step import FirstStep
from autoprec.trial.inside.forking import ask_nvml_for_gpus, hold_one_thread, offer_threads, take_threads
from autoprec.trial.inside.isolate import savers
from autoprec.trial.inside.isolate.entropy import repeat_entropy
from autoprec.trial.inside.isolate.isolation import add_layer, isolate
from autoprec.trial.inside.isolate.loaders import Loading
from autoprec.trial.inside.isolate.ports import use_own_ports
from autoprec.trial.inside.isolate.seeding import offset_seeds
from autoprec.trial.inside.isolate.timers import stop_timers
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Events, Hooks
from autoprec.trial.inside.policy_run import PolicyRun, claim
from autoprec.trial.inside.reporting.pickups import pick_up
from autoprec.trial.inside.reporting.reports import Reports
from autoprec.trial.inside.trial import Trial
from autoprec.trial.inside.zygote import leave_zygote, leave_zygote_at_first_seed
from autoprec.trial.processes import prefer_as_oom_victim, watch_driver
from autoprec.trial.protocol import TrialSpec

_agent: Agent | None = None


def install(config_path: str) -> None:
    """Install the hooks in this process (called by the injected sitecustomize)."""
    global _agent
    if _agent is None:
        with contextlib.suppress(FileNotFoundError):  # of a run that has ended, and left this process behind
            _agent = Agent(json.loads(Path(config_path).read_text(encoding="utf-8")))
            _agent.install()


def current() -> Agent | None:
    """Return the agent of this process; None when the script runs without AutoPrec."""
    return _agent


class Agent:
    """Prepares the process for what its configuration says, and starts that at the first training step.

    Attributes:
        config: the configuration; in a fork of the zygote, its own.
        hooks: the hooks on torch.
        reports: what the script reports of its metrics.
        trial: the trial that this process is, once it is one.
    """

    def __init__(self, config: Document) -> None:
        self.config = config
        self.mode = str(config["mode"])
        self.hooks, self.reports = Hooks(), Reports()
        self.trial: Trial | None = None
        self._first = FirstStep(self.hooks, self._arrived, self._give_up, judges=bool(config.get("judges")))
        self._pid = os.getpid()
        self._started = float(config.get("started", time.monotonic()))
        self._watching = threading.Event()
        self._loading: Loading | None = None
        self._overlay: Any = None
        self._running: PolicyRun | None = None
        self._forked = self._reached = False

    def install(self) -> None:
        """Patch torch and start waiting."""
        if self.mode == "run" and self.config.get("policy") is None:
            return
        if self.mode == "run":
            claim(Path(os.environ[CONFIG_VARIABLE]).parent)
        self.hooks.install()
        self._first.watch()
        if self.mode == "run":
            return
        if self.config.get("weights") == "fake":
            from autoprec.graph.fake import fake_weights

            fake_weights()
        ask_nvml_for_gpus()  # first: after a boot CUDA's first start makes device files, by a program that must be root
        if self.mode == "host":
            hold_one_thread()
        self._overlay = isolate(self.config)
        pick_up(self.reports)
        stop_timers()
        use_own_ports(lambda: Path(self.config["private"]))
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

    def _configure(self, config: Document) -> None:
        """In a fork of the zygote: from here on this process follows its own configuration."""
        self.config, self.mode = config, str(config["mode"])
        self._forked, self._pid = True, os.getpid()
        self._started = float(config["started"])
        self._overlay.allow(str(config["private"]), str(config["run_dir"]))
        add_layer(self._overlay, Path(config["private"]) / f"overlay-{os.getpid()}")
        self._seed()
        offer_threads(int(config.get("threads", 0)))
        if self.mode == "trial":  # the script's set-up has them as well
            take_threads()
        self._prepare()

    def _seed(self) -> None:
        offset = int(self.config.get("seed_offset", 0))
        repeat_entropy(offset)
        offset_seeds(offset)

    def _prepare(self) -> None:
        self._first.pass_over = int(self.config.get("pass_over", 0))
        os.environ[MARK_VARIABLE] = str(self.config["mark"])
        hosting = self.mode == "host" and self.config["launch"] in ("auto", "fork") and "RANK" not in os.environ
        if hosting and self._loading is None:
            self._loading = Loading()
        elif self._loading is not None and not hosting:  # inherited from a host by way of the zygote
            self._loading.undo()
            self._loading = None
        self._watching = watch_driver(*self.config["driver"])

    # ---------------------------------------------------------------- what a Session reports
    def register(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take the model and optimizers that the script names."""
        owned: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        found = Found([model], list(optimizers), owned, ["named by the script"])
        self._first.register(found)
        if self._running is not None:
            self._running.another(found)

    def boundary(self, model: nn.Module) -> None:
        """Handle the end of one step, where the next begins."""
        self._first.boundary(model)

    # ---------------------------------------------------------------- the first training step
    def _arrived(self, found: Found, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.mode == "run":
            if self.config.get("policy") is not None:
                folder = Path(os.environ[CONFIG_VARIABLE]).parent
                self._running = PolicyRun(self.config, self.hooks, folder, writer=rank() == 0)
                self._running.begin(found)
        else:
            self._become(found, module, args, kwargs)

    def _become(self, found: Found, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Be a host, or a trial, from this training forward on."""
        self.hooks.unwatch()
        self.hooks.events = Events()
        self._reached = True
        if self.mode == "host":
            self.config = host.serve(
                self.config,
                found,
                setup_s=time.monotonic() - self._started,
                loading=self._loading,
                heard=self._watching,
            )
            self.mode = str(self.config["mode"])
            add_layer(self._overlay, Path(self.config["private"]) / f"overlay-{os.getpid()}")
        prefer_as_oom_victim()
        result = Path(self.config["result"])
        spec, asked = TrialSpec.from_json(self.config["spec"]), float(self.config["asked"])
        self._pid = os.getpid()
        may_fork = self.config.get("launch") != "process" and not host.fork_obstacle(found)
        stays = str(self.config.get("stays", ""))
        offer_threads(int(self.config.get("threads", 0)))
        self.trial = Trial(
            spec,
            found,
            self.hooks,
            result=result,
            asked=asked,
            writer=rank() == 0,
            may_fork=may_fork,
            stays=stays,
            turns=Path(self.config["folder"]) / "turns",
            reports=self.reports,
        )
        if self._loading is not None:
            self._loading.charge = self.trial.credit
        savers.charge.to = self.trial.credit
        self.trial.begin(module, args, kwargs)

    # ---------------------------------------------------------------- the script ended
    def _give_up(self, why: str) -> None:
        """Report now that no step will be seen; the script may go on for hours."""
        if self.mode == "host":
            self._report_end(why)
            os._exit(0)

    def _at_exit(self) -> None:
        if os.getpid() != (self.trial.pid if self.trial is not None else self._pid):
            return  # a fork of the script's own (a DataLoader worker)
        if self.trial is not None:
            self.trial.at_exit()
        trained = self._first.forwards or self.hooks.backwards or self.hooks.optimizers
        if self.trial is None and self.mode == "host" and not self._reached and trained:
            self._report_end(self._first.why())

    def _report_end(self, why: str) -> None:
        seen = {
            "why": why,
            "training_forwards": self._first.forwards,
            "backwards": self.hooks.backwards,
            "optimizers": [type(o).__name__ for o in self.hooks.optimizers],
        }
        host.report_end(self.config, seen)
