"""The driver's side of trials: start a host once, ask it for trials, and clean up whatever they do.

No torch here: everything that touches the user's model lives in the processes this module starts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoprec.errors import ScriptError
from autoprec.support.plain import Document
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver import failures
from autoprec.trial.driver.base import Runner
from autoprec.trial.driver.classify import classify, describe_exit, last_lines
from autoprec.trial.driver.forks import ForkedProcess, Forks
from autoprec.trial.driver.launcher import Launcher
from autoprec.trial.driver.process_tree import NewProcess, ProcessTree
from autoprec.trial.driver.results import over_ranks
from autoprec.trial.driver.staying import Staying
from autoprec.trial.driver.torn import MOST_TORN, remove_torn
from autoprec.trial.environment import CONFIG_VARIABLE, MARK_VARIABLE, own_threads, thread_count, trial_environment
from autoprec.trial.messages import listen, receive_messages
from autoprec.trial.processes import remove_folder, start_ticks
from autoprec.trial.progress import Deadline, steps_file
from autoprec.trial.protocol import (
    PATIENCE_S,
    SMALL_MODEL,
    DuelSpec,
    HostInfo,
    ScanSpec,
    TrialResult,
    TrialSpec,
    TrySpec,
)

#: How often a trial is run again whose host was lost, and how often in a row a host may be lost at all.
RETRIES, _MAX_LOST = 2, 3
#: How many models a script may train for a few steps each before the one that it is about.
_MAX_PASSED_OVER = 5


#: What a trial that hangs is given to end after SIGTERM (s).
_GRACE_S = 2.0
#: Progress callback: completed steps.
Progress = Callable[[int], None] | None


class _HostLostError(Exception):
    """The host ended while a trial ran: killed by a person, or by the kernel for its memory."""


class TrialRunner(Runner):
    """Runs trials of one command, for one seed.

    Args:
        command: what to run.
        run_dir: where the host's output goes (``host-<seed_offset>.log``); default: the private temporary directory of
            results and sockets, which is removed by :meth:`close`, or by a later command of ours.
        seed_offset: added to every seed the script sets: a further paired seed is a further runner.
        launch: ``auto`` takes the cheapest launch mode that is safe; ``fork``, ``zygote`` or ``process`` asks for one.
        setup_timeout_s: how long the script may take to reach its first training forward.
        environment: variables set for every process of this runner, such as ``CUDA_VISIBLE_DEVICES``.
        weights: ``fake`` gives the script parameters without data, so that a step of any model can be recorded here.
        tunes: a model without a layer that a policy could decide about is refused; without it its step can be judged.
        alone: most of its trials run alone, and so does the first look at its steps: they need what that compiles.
    """

    def __init__(
        self,
        command: ScriptCommand,
        *,
        run_dir: Path | None = None,
        seed_offset: int = 0,
        launch: str = "auto",
        setup_timeout_s: float = PATIENCE_S,
        environment: Mapping[str, str] | None = None,
        weights: str = "",
        tunes: bool = True,
        alone: bool = False,
    ) -> None:
        self.command, self._tunes, self._alone = command, tunes, alone
        self._environment, self._weights = dict(environment or {}), weights
        self._seed_offset, self._launch = seed_offset, launch
        self._setup_timeout = setup_timeout_s
        self._launcher = Launcher.join(command)
        self.run_dir = self._launcher.new_folder() if run_dir is None else Path(run_dir)
        self._log = self.run_dir / f"host-{seed_offset}.log"
        self._mark = self._launcher.new_mark()
        self._private: Path | None = None
        self._host: ProcessTree | None = None
        self._forks: Forks | None = None  # of the host
        self._staying = Staying()
        self._info: HostInfo | None = None
        self._lock = threading.RLock()
        self._starts = self._lost = 0
        self._running: set[ProcessTree] = set()
        self._closed = False
        self._passed_over: list[str] = []  # models that were trained for a few steps before the real one

    def __enter__(self) -> TrialRunner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def mark(self) -> str:
        """The mark in the environment of every process that this runner started."""
        return self._mark

    # ---------------------------------------------------------------- start
    def adopt(self, info: HostInfo) -> None:
        """Take what a host of another seed found: where trials are processes of their own, it does nothing else."""
        with self._lock:
            if self._info is None and info.launch != "fork":
                self._info = info
                self._private = self._launcher.new_folder()

    def start(self) -> HostInfo:
        """Start the host and wait for the script's first training forward.

        Raises:
            ScriptError: the script failed, ended, or took too long before its first training step, trains nothing
                AutoPrec can see, or has no layer a policy could decide about where this runner ``tunes``.
        """
        with self._lock:
            if self._info is not None:
                return self._info
            self._info = self._started()
            if self._info.launch == "fork":
                return self._info
            if self.command.single and self._launcher.ready and self._info.world_size == 1:
                # Trials are forks of the copy that the host left behind when its imports were done.
                self._info = replace(self._info, launch="zygote")
            return self._info

    def _started(self) -> HostInfo:
        for _ in range(MOST_TORN):
            try:
                return self._first_steps(self._start_host())
            except ScriptError as error:
                if not remove_torn(str(error)):
                    raise
        return self._first_steps(self._start_host())

    def _first_steps(self, info: HostInfo) -> HostInfo:
        """Find out at once whether the script takes steps, and whether its first model is the one it goes on training.

        In a fork this costs as long as the first step, at most a second more. A small model that falls silent while
        another is trained (a notebook's warm-up fit) is passed over, and the next one is looked at.
        """
        for _ in range(0 if self._weights else _MAX_PASSED_OVER):
            result = self._try_steps(info)
            if result.passed_over:
                self._passed_over.append(result.passed_over)
                self._end_host()
                info = self._start_host()
                continue
            if result.status in ("ok", "diverged") or result.losses:
                return info
            self._info = None
            self._end_host()
            raise failures.first_step_failed(self.command, result)
        return info

    def _try_steps(self, info: HostInfo) -> TrialResult:
        spec = TrySpec(timeout_s=self._setup_timeout, alone=self._alone)
        self._info = info
        forked = info.launch == "fork"
        if not forked and (info.world_size > 1 or int(info.model.get("parameters", 0)) > SMALL_MODEL):
            return TrialResult("ok")  # another start of the whole script is too much for a mere suspicion
        try:
            result = self._in_process(spec)
        except _HostLostError:
            return self._host_lost("")
        return result if forked or result.passed_over else TrialResult("ok")

    def _end_host(self) -> None:
        if self._host is not None:
            self._host.end()
        self._forks = None

    def _start_host(self) -> HostInfo:
        if self._private is None:
            self._private = self._launcher.new_folder()
        self._starts += 1
        address = self._private / f"control-{self._starts}"
        with contextlib.closing(listen(address, 16)) as listener:
            listener.settimeout(0.05)
            config = self._config(mode="host", socket=str(address), launch=self._launch)
            self._host = self._launch_process(config, self._mark, threads=1, log=self._log)
            try:
                control, messages = self._accept(listener, self._host)
            except BaseException:
                self._host.end()
                raise
        message = next(messages, None)
        if message is None or message["op"] == "ended":
            control.close()
            self._host.wait(10.0)
            self._host.end()
            raise failures.no_host(self.command, message, self._host.poll(), self._host.tail, self._log)
        info = HostInfo.from_json(message["info"])
        info = replace(info, notes=(*info.notes, *self._passed_over), passed_over=len(self._passed_over))
        if self._tunes and not info.layers:
            control.close()
            self._host.end()
            raise failures.nothing_tunable(self.command, str(info.model.get("class", "")), scripted=info.scripted)
        if info.launch == "fork":
            self._forks = Forks(control, messages)
        else:  # this host only said what the script is: every trial is a process of its own
            control.close()
            self._host.wait(5.0)
            self._host.end()
        return info

    def _config(self, **values: Any) -> Document:
        if self._private is None:
            raise ScriptError("this runner is closed", fix="make a new TrialRunner")
        return values | {
            "mark": self._mark,
            "launcher_mark": self._launcher.mark,
            "private": str(self._private),
            "folder": str(self._launcher.folder),
            "run_dir": str(self.run_dir.absolute()),
            "cwd": str(self.command.cwd.absolute()),
            "script": self.command.target if self.command.kind == "script" else "",
            "seed_offset": self._seed_offset,
            "weights": self._weights,
            "judges": not self._tunes,
            "pass_over": max(len(self._passed_over), self._info.passed_over if self._info is not None else 0),
            "started": time.monotonic(),
            "driver": [os.getpid(), start_ticks(os.getpid())],
        }

    def _launch_process(self, config: Document, mark: str, *, threads: int, log: Path | None) -> ProcessTree:
        """Start the script: from the zygote if there is one and it may be used, else as a new process.

        ``threads`` 0 means the user's own settings.
        """
        private = Path(config["private"])
        config["mark"] = mark
        path = private / f"{config['mode']}-{uuid.uuid4().hex[:12]}.json"
        copies = self.command.single and threads <= 1 and self._launch != "process"
        if copies and self._launcher.ready:
            path.write_text(json.dumps(config), encoding="utf-8")  # for what the script itself starts (mp.spawn)
            own = {} if threads else own_threads()
            extra = {**own, **self._environment, MARK_VARIABLE: mark, CONFIG_VARIABLE: str(path)}
            forked = self._launcher.fork(config, extra, mark, log)
            if forked is not None:
                return forked
        config["zygote"] = self._launcher.address if copies and config["mode"] == "host" else ""
        path.write_text(json.dumps(config), encoding="utf-8")
        env = trial_environment(path, self._launcher.mark, private, threads=threads) | self._environment
        return NewProcess(self.command.argv(), env, self.command.cwd, mark, log)

    def _accept(self, listener: socket.socket, host: ProcessTree) -> tuple[socket.socket, Iterator[Document]]:
        deadline = Deadline(self._setup_timeout, host.pid)
        while True:
            code = host.poll()  # asked first: what it said before its end is heard below
            with contextlib.suppress(TimeoutError):
                control, _ = listener.accept()
                control.settimeout(None)
                return control, receive_messages(control)
            if code is not None:
                host.settle()
                raise failures.script_failed(self.command, code, host.tail)
            if self._closed:
                raise ScriptError("this runner was closed", where=self.command.label)
            if deadline.passed():
                raise ScriptError(
                    f"no training step began within {round(self._setup_timeout, 1):g} s\n{last_lines(host.tail)}",
                    where=self.command.label,
                    fix="give the script less to prepare, or a longer set-up time",
                )

    # ---------------------------------------------------------------- trials
    def run(self, spec: TrialSpec, progress: Progress = None) -> TrialResult:
        """Run one trial and return how it ended, whatever it does. Safe to call from several threads at once.

        Args:
            spec: what to run.
            progress: called with the number of completed steps (and probes), about once a second.

        Raises:
            NoSpaceError: its files do not fit on the disk, which says nothing about the policy.
        """
        result = self._ran(spec, progress)
        for _ in range(MOST_TORN):
            if result.ok or not remove_torn(result.reason + result.tail):
                break
            result = self._ran(spec, progress)
        return result

    def _ran(self, spec: TrialSpec, progress: Progress) -> TrialResult:
        result = None
        try:
            self.start()
            for _ in range(1 + RETRIES):
                with contextlib.suppress(_HostLostError):
                    result = self._in_process(spec, progress)
                    break
        except ScriptError as error:
            return TrialResult("crashed", str(error))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise failures.no_space(self._private or self.run_dir, str(error)) from error
            return TrialResult("crashed", f"the trial could not be started: {error}")
        if result is None:
            result = self._host_lost(f" {1 + RETRIES} times while this trial ran; see {self._log}")
        if not result.ok and "No space left on device" in result.reason + result.tail:
            raise failures.no_space(self._private or self.run_dir, result.reason)
        return result

    def _host_lost(self, when: str) -> TrialResult:
        code = self._host.wait(1.0) if self._host is not None else None
        ended = describe_exit(code) if code is not None else "ended"
        tail = last_lines(self._host.tail) if self._host is not None else ""
        return TrialResult("oom" if code == -9 else "crashed", f"the host process {ended}{when}", tail=tail)

    def _in_process(self, spec: TrialSpec, progress: Progress = None) -> TrialResult:
        """Start a process of the script for one trial, wait for its end, and read what it wrote."""
        began = time.monotonic()
        if isinstance(spec, (ScanSpec, DuelSpec)) and spec.log:
            spec = replace(spec, log=str(self.run_dir.absolute() / spec.log))
        config = self._config(mode="trial", launch=self._launch, spec=spec.to_json(), asked=began)
        private, name = Path(config["private"]), f"result-{uuid.uuid4().hex[:12]}"
        path = private / f"{name}.json"
        config["result"] = str(path)
        info, mark = self._info, f"{self._mark}{name}"
        own = spec.alone or (info is not None and info.device != "cpu")  # a GPU fed by one thread would look slower
        config["threads"] = thread_count() if own else 0
        forked = info is not None and info.launch == "fork"
        if forked and isinstance(spec, ScanSpec) and spec.stays:
            process = self._fork_scan(spec, config, mark)
        elif forked:
            process = self._fork_host(config, mark)
        else:
            process = self._launch_process(config, mark, threads=0 if own else 1, log=None)
        self._running.add(process)
        timed_out = False
        try:
            # a plain process pays the script's set-up again; the deadline of the trial itself starts after it
            allowance_s = 0.0 if forked else 30.0 + 3.0 * (info.setup_s if info else 0.0)
            deadline = Deadline(spec.timeout_s + allowance_s, process.pid, steps_file(path), progress)
            while process.poll() is None:
                if path.exists():  # every rank has its result: the launcher gets a moment to end by itself
                    process.wait(5.0)
                    break
                if deadline.steps:  # set-up is over: from here on the trial's own limit holds
                    deadline.limit_s = spec.timeout_s
                if deadline.passed() or self._closed:
                    timed_out = True
                    break
                process.wait(0.02)
            code = process.poll()
            process.end(grace_s=_GRACE_S if timed_out else 0.0)
        finally:
            self._running.discard(process)
            steps_file(path).unlink(missing_ok=True)
            remove_folder(private / f"overlay-{process.pid}")
        written = over_ranks(path)
        if written is None and self._closed:
            return TrialResult("crashed", "this runner was closed")
        if written is None and isinstance(process, ForkedProcess) and process.lost:
            raise _HostLostError
        from_zygote = not forked and isinstance(process, ForkedProcess)
        if written is None and code and not timed_out and not deadline.steps and from_zygote:
            self._launcher.fork_no_more()  # the host has trained: CUDA, say, cannot be used in such a fork
            return self._in_process(spec, progress)
        self._lost = 0  # only hosts that are lost in a row count: the machine can run this script
        code = code if code is not None else -9
        result = classify(written, code, timed_out=timed_out, timeout_s=spec.timeout_s, tail=process.tail)
        return replace(result, wall_s=time.monotonic() - began)

    def _fork_host(self, config: Document, mark: str) -> ProcessTree:
        """Fork the host; where it was lost, another takes its place."""
        with self._lock:
            if self._forks is None or not self._forks.alive:
                self._restart()
            forks = self._forks
        found = None if forks is None else forks.fork(config, {MARK_VARIABLE: mark}, mark, None)
        if found is None:
            if forks is not None and forks.alive and self._host is not None:
                self._host.end()  # it hangs; the next trial gets another
            raise _HostLostError
        return found

    def _fork_scan(self, spec: ScanSpec, config: Document, mark: str) -> ProcessTree:
        """Fork the process that stays at the step of a scan, after starting it where there is none.

        One that ends on its way there has answered itself, and one that takes too long is the caller's affair.
        """
        environment = {MARK_VARIABLE: mark}
        found = self._staying.fork(spec, config, environment, mark)
        if found is not None:
            return found
        result = Path(config["result"])
        own = f"{self._mark}stays-{result.stem}"  # not derived from the mark of a scan, whose processes end with it
        address = result.with_suffix(".stays")
        with contextlib.closing(listen(address, 1)) as listener:
            listener.settimeout(0.05)
            process = self._fork_host(config | {"mark": own, "stays": str(address)}, own)
            self._running.add(process)
            deadline = Deadline(spec.timeout_s, process.pid, steps_file(result))
            while process.poll() is None and not (result.exists() or deadline.passed() or self._closed):
                with contextlib.suppress(TimeoutError):
                    control, _ = listener.accept()
                    control.settimeout(None)
                    self._staying.hold(spec, process, Forks(control, receive_messages(control)))
                    return self._staying.fork(spec, config, environment, mark) or process
        return process

    def _restart(self) -> None:
        """The host has died (for instance killed for memory): start another, unless none ever lives long enough."""
        self._lost += 1
        if self._closed or self._lost > _MAX_LOST:
            raise ScriptError(
                "this runner is closed" if self._closed else "the host process has died too often",
                where=self.command.label,
                fix=f"its last output is in {self._log}; is there enough memory for two copies of the script?",
            )
        if self._host is not None:
            self._host.end()
        self._info = None
        self._info = self._start_host()

    # ---------------------------------------------------------------- end
    def close(self) -> None:
        """End every process this runner started and remove its private files; nothing the second time."""
        if self._closed:
            return
        self._closed = True
        self._staying.end()
        with self._lock:
            forks, self._forks = self._forks, None
        if forks is not None:
            forks.end()
        if self._host is not None:
            self._host.wait(1.0)
            self._host.end()
        for process in list(self._running):
            process.end()
        if self._private is not None:
            remove_folder(self._private)
            self._private = None
        self._launcher.leave()
