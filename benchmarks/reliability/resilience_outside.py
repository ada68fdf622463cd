"""What comes from outside: programs that write files, secrets in arguments, a policy of a mebibyte.

Parts of ``benchmarks/reliability/resilience.py``: ``files``, ``secrets`` and ``policy``; small versions are tests.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autoprec.support.redact import redact_arguments, redact_text
from autoprec.trial.processes import remove_folder
from tests.faults.file_programs import OPERATIONS, build, run_program, snapshot
from tests.faults.planted import COMMAND_LINES, WAYS, leaks, planted

__all__ = ["files", "policy", "secrets"]

Row = tuple[str, str, str]
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS, PROGRAMS_EACH, OPERATIONS_EACH = 2000, 50, 12
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

#: Prints its arguments in every way that scripts do, and ends badly in its last step.
SCRIPT = """
import argparse, json, sys, torch
print(sys.argv, argparse.Namespace(words=sys.argv), json.dumps(sys.argv), *sys.argv[1:], sep="\\n", flush=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(40):
    loss = (model(torch.randn(32, 64)) - 1).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    print(step, " ".join(sys.argv), file=sys.stderr, flush=True)
"""


def _host(programs: range, user: Path, config: dict[str, str], *, mounts: bool) -> bool:
    """Hold a fork of this process as a host is, and run each program in a fork of that, as a trial is.

    Returns whether the programs worked on the kernel's copy.
    """
    pid = os.fork()
    if pid == 0:
        mounted = False
        try:
            from autoprec.trial.inside.isolate.isolation import add_layer, isolate

            os.chdir(user)
            if not mounts:
                os.environ["AUTOPREC_TRIAL_MOUNTED"] = ""
            overlay = isolate(config)
            mounted = bool(overlay.mounted)
            for program in programs:
                trial = os.fork()
                if trial == 0:
                    try:
                        add_layer(overlay, Path(config["private"]) / f"overlay-{program}")
                        run_program(program, user, operations=OPERATIONS_EACH)
                    finally:
                        os._exit(0)
                os.waitpid(trial, 0)
        finally:
            os._exit(int(mounted))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def files() -> list[Row]:
    """Random programs of file operations: what is different afterwards in two directories of the user's."""
    changed, mounted, began = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        user, other = build(base)
        before = snapshot(user, other)
        for first in range(0, PROGRAMS, PROGRAMS_EACH):
            private = base / "private"
            private.mkdir()
            config = dict.fromkeys(("private", "run_dir"), str(private)) | {"cwd": str(user)}
            config["script"] = str(other / "train.py")
            programs = range(first, first + PROGRAMS_EACH)
            mounted += PROGRAMS_EACH * _host(programs, user, config, mounts=first // PROGRAMS_EACH % 2 == 0)
            after = snapshot(user, other)
            changed += len(set(before.items()) ^ set(after.items()))
            before = after
            remove_folder(private)
    rate = PROGRAMS / (time.monotonic() - began)
    what = f"random programs of {OPERATIONS_EACH} of {len(OPERATIONS)} file operations, children included"
    return [
        (what, ">= 2,000", f"{PROGRAMS:,} ({rate:.0f} per second)"),
        ("of them on the kernel's copy (the others: overlay in Python and Landlock)", "", f"{mounted:,}"),
        ("files of the user's that were changed, made or removed", "0", str(changed)),
    ]


def secrets() -> list[Row]:
    """One real search whose script is given a secret in every way, and prints them all."""
    ways, hidden = planted()
    words = [word for way in ways for word in way]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        (folder / "train.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "autoprec", "search", "-q", "--force", "--trials", "3", "--seeds", "2"]
        command += ["--steps", "8", "--output", "policy.yaml", "train.py", *words]
        done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        stored = [path for path in folder.rglob("*") if path.is_file()]
        found = leaks(folder, hidden)
    lines = [line for line in COMMAND_LINES.read_text().splitlines() if not line.startswith("#")]
    eaten = [x for x in lines if redact_arguments(shlex.split(x)) != shlex.split(x) or redact_text(x) != x]
    where = f"the {len(stored)} files of a search (exit {done.returncode}): study, MLflow, reports, logs"
    return [
        ("ways to pass a secret", ">= 60", str(len(WAYS))),
        (f"of them found in {where}", "0", str(len(found))),
        (f"real command lines of {len(lines)} in which an ordinary argument is hidden", "0", str(len(eaten))),
    ]


def policy() -> list[Row]:
    """A policy as large as a file may be, on a model of a hundred layers."""
    import torch

    from autoprec import Policy
    from autoprec.policy import parse_policy
    from autoprec.policy.globs import MOST_RULES

    rules = 19_443
    rows = [f"  - {{match: 'bloc[!x{index}]*.{index % 100}', recipe: b}}\n" for index in range(rules)]
    text = "schema: autoprec.policy/1\nrecipes: {b: {format: bf16}}\nlayers:\n" + "".join(rows)
    text += "#" * ((1 << 20) - len(text))
    model = torch.nn.ModuleDict({"block": torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(100)))})
    began, spent = time.monotonic(), time.process_time()
    loaded = parse_policy(text, cls=Policy)
    loaded.apply(model)
    seconds, spent = time.monotonic() - began, time.process_time() - spent
    what = f"policy of {len(text):,} bytes, {len(loaded.layers):,} rules (of {MOST_RULES:,}): load, apply to 100 layers"
    return [(what, "<= 5 s", f"{seconds:.2f} s, {spent:.2f} s of CPU time")]
