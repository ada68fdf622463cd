"""``autoprec run``: the script as it is, to its own end, under a policy."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoprec.policy import Policy
from autoprec.trial.command import ScriptCommand
from autoprec.trial.environment import run_environment
from autoprec.trial.processes import sweep

__all__ = ["run_script"]


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass SIGTERM on to the script; Ctrl-C reaches it by itself, being in the same foreground group."""

    def terminate(number: int, _frame: Any) -> None:
        process.send_signal(number)

    try:
        before = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, terminate),
            signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        }
    except ValueError:  # not in the main thread: signals are somebody else's
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_script(
    command: ScriptCommand,
    policy: Policy | dict[str, Any] | None = None,
    backend: str = "auto",
    audit: Path | str | bool = False,
) -> int:
    """Run a script in its own process, with its own input, output, files and environment; returns its exit code.

    The policy is applied inside the first training forward, in every rank; after that no hook is left, so steps cost
    what they did. A policy that does not fit ends the script there with exit code 1 and the reason.

    Args:
        command: what to run.
        policy: the policy or its document; None (or one that keeps everything) changes no bit of the training.
        backend: which backend runs the GEMMs.
        audit: where to write the audit (asked against executed, JSON) when the script ends; True for ``audit.json``
            beside the script's working directory; False for none.
    """
    document = policy.to_dict() if isinstance(policy, Policy) else policy
    private = Path(tempfile.mkdtemp(prefix="autoprec-run-"))
    mark = f"autoprec-{uuid.uuid4().hex}"
    target = command.cwd / "audit.json" if audit is True else (Path(audit).absolute() if audit else None)
    config = private / "run.json"
    settings = {"mode": "run", "policy": document, "backend": backend, "audit": str(target) if target else ""}
    config.write_text(json.dumps(settings), encoding="utf-8")
    try:
        process = subprocess.Popen(command.argv(), env=run_environment(config, mark), cwd=command.cwd)
        with _passed_on(process):
            code = process.wait()
        sweep(mark)
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return code
