"""``make gpu``: everything a GPU is needed for, in one command, resumable in parts, within a time limit.

    python benchmarks/gpu_run.py [--limit 480] [--out DIR] [--pack FILE] [--parts tests,calibrate,fidelity,end_to_end]
    python benchmarks/gpu_run.py --rehearse     the same parts on a CPU with tiny models: the path, not the figures

A part takes at most nine minutes, then it is ended with every process that it started. Parts that finished are kept
in ``DIR`` (default: ``benchmarks/results/gpu-parts``, not committed) and not run again. After each part all of ``DIR``
is packed into ``FILE`` (default: ``DIR.tar.gz``): give it to another machine with ``--pack`` and it goes on from there.
A Transformer Engine kit beside the bundle's wheels is unpacked and used.
The last part writes ``benchmarks/results/<date>_<gpu>.{json,md}`` with commands, versions and hardware. Wheels that
the machine lacks are taken from the folder that ``make gpu-bundle`` wrote; nothing is downloaded here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from autoprec.trial.inside.observe.conditions import QUERY, Conditions, ask_driver  # noqa: E402 - nothing need be installed for it

#: Exit status of what was ended past its limit, as of coreutils' timeout.
TIMED_OUT = 124
PARTS = ("tests", "calibrate", "fidelity", "end_to_end")


def commands(out: Path, limit: float, *, rehearse: bool = False) -> dict[str, list[str]]:
    """Return the command of each part; a rehearsal runs the same programs where there is no GPU, on tiny models."""
    python = sys.executable
    if rehearse:
        words = commands(out, limit)
        suite = ["tests/testing/test_backends.py", "-k", "TestNative and fp8_rowwise"]
        words["tests"] = [python, "-m", "pytest", "-q", *suite]
        words["calibrate"] = [python, "-m", "autoprec", "calibrate", "--device", "cpu"]  # whose rates have their place
        words["fidelity"] += ["--model", "tiny", "--curve-steps", "6"]
        words["end_to_end"] += [
            "--models",
            "tiny",
            "--presets",
            "bf16,torchao-rowwise",
            "--trials",
            "3",
            "--steps",
            "6",
        ]
        words["end_to_end"] += ["--budget", f"{limit / 8:.0f}"]  # the later of two counts
        return words
    return {
        "tests": [python, "-m", "pytest", "-m", "gpu", "-rs", "-q"],
        "calibrate": [python, "-m", "autoprec", "calibrate", "--output", str(out / "calibration.json")],
        "fidelity": [
            *(python, "benchmarks/gpu_fidelity.py", "--out", str(out / "fidelity.md")),
            *("--calibration", str(out / "calibration.json")),
        ],
        "end_to_end": [
            *(python, "benchmarks/gpu_end_to_end.py", "--out", str(out / "end_to_end")),
            *("--budget", f"{limit * SEARCH_SHARE:.0f}"),
        ],
    }


#: Seconds that one part takes at most, and what one call takes: on a GPU, and in a rehearsal, which runs every part.
PART_LIMIT, CALL_LIMIT, REHEARSAL_LIMIT = 540.0, 480.0, 900.0
#: Of one call's limit: the reference, the presets and the finalists of a search need the rest.
SEARCH_SHARE = 0.5


def pack(out: Path, archive: Path) -> None:
    """Put everything measured so far into one file, replacing the last one at once."""
    made = archive.with_name(archive.name + ".new")
    with tarfile.open(made, "w:gz") as stream:
        stream.add(out, arcname=".")
    made.replace(archive)


def unpack(archive: Path, out: Path) -> None:
    """Go on from what another machine packed; what is here already stays."""
    with tarfile.open(archive) as stream:
        for member in stream.getmembers():
            if not (out / member.name).exists() or member.isdir():
                stream.extract(member, out, filter="data")


def unpack_kit(folder: Path, into: Path) -> str:
    """Unpack a Transformer Engine kit once; return what belongs on the Python path, empty without a kit."""
    kit = next(iter(sorted(folder.glob("te_kit.tar.*"))), None)
    if kit is None:
        return ""
    if not (into / "site").is_dir():
        with tarfile.open(kit) as stream:
            stream.extractall(into, filter="data")
    return str(into / "site")


def gpu_name() -> str:
    """Return the GPU's name, empty without one."""
    return ask_driver(["name"])


def throttled() -> str:
    """Return why timings would be unreliable now (clocks throttled, other processes), empty when they are fine."""
    state, _, busy = ask_driver((*QUERY, "utilization.gpu")).rpartition(",")
    slowed = Conditions.parse(state).slowed
    if slowed:
        return f"the GPU is throttled ({', '.join(slowed)})"
    used = int(re.sub(r"\D", "", busy) or 0)
    return f"somebody else uses {used} % of the GPU" if used > 5 else ""


def run_part(name: str, command: list[str], out: Path, left: float, *, on_gpu: bool = True) -> dict[str, Any]:
    stored = out / f"{name}.json"
    if stored.exists():
        return dict(json.loads(stored.read_text()))
    warning = throttled() if on_gpu else ""
    began = time.monotonic()
    log = out / f"{name}.log"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    with log.open("w") as stream:
        code = ended(command, environment, stream, min(left, PART_LIMIT))
    value = {"name": name, "code": code, "seconds": time.monotonic() - began, "warning": warning}
    value["output"] = log.read_text(errors="replace")[-20_000:]
    if code == TIMED_OUT:
        value["unfinished"] = True
    if code == 0:
        write_whole(stored, json.dumps(value))
    return value


def ended(command: list[str], environment: dict[str, str], output: IO[str], limit: float) -> int:
    """Run a command in a session of its own and return its exit status, :data:`TIMED_OUT` past the limit.

    However it ends, nothing that it started goes on: a trial left behind would keep the GPU's memory.
    """
    try:
        part = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        print(f"{command[0]} could not be started: {error}", file=output)
        return 127
    try:
        return part.wait(limit)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(part.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            part.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(part.pid, signal.SIGKILL)
        part.wait()


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    made = path.with_name(path.name + ".new")
    made.write_text(text)
    made.replace(path)


def report(results: list[dict[str, Any]], gpu: str, parts: list[str]) -> tuple[str, dict[str, Any]]:
    versions = {}
    for name in ("torch", "triton", "torchao", "transformer_engine", "optuna"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    document = {
        "gpu": gpu,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "versions": versions,
        "command": f"python benchmarks/gpu_run.py --parts {','.join(parts)}",
        "parts": results,
    }
    lines = [f"# {gpu}, {document['date']}", "", f"`{document['command']}`", ""]
    lines += [f"Python {document['python']}, " + ", ".join(f"{k} {v}" for k, v in versions.items()), ""]
    for part in results:
        state = "unfinished" if part.get("unfinished") else f"exit {part['code']}"
        lines += [f"## {part['name']}: {state}, {part['seconds']:.0f} s", ""]
        lines += [f"unreliable: {part['warning']}", ""] if part.get("warning") else []
        lines += ["```", part.get("output", "").strip()[-6000:], "```", ""]
    return "\n".join(lines), document


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="everything that needs a GPU")
    parser.add_argument("--limit", type=float, help=f"seconds (default: {CALL_LIMIT:.0f}, {REHEARSAL_LIMIT:.0f})")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu-parts")
    parser.add_argument("--pack", type=Path, help="one file with all parts: read first, written after each part")
    parser.add_argument("--bundle", type=Path, default=ROOT / "gpu-bundle", help="folder of `make gpu-bundle`")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU: does every part run through?")
    arguments = parser.parse_args(argv)
    rehearse = arguments.rehearse
    arguments.limit = arguments.limit or (REHEARSAL_LIMIT if rehearse else CALL_LIMIT)
    if rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gpu = "CPU, a rehearsal with stand-ins" if rehearse else gpu_name()
    if not gpu:
        print("no NVIDIA GPU here (nvidia-smi found none): nothing was run")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    archive = arguments.pack or arguments.out.with_name(arguments.out.name + ".tar.gz")
    if archive.exists():
        unpack(archive, arguments.out)
    kit = "" if rehearse else unpack_kit(arguments.bundle, Path(tempfile.gettempdir()) / "autoprec-te-kit")
    if kit:
        os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (kit, os.environ.get("PYTHONPATH", "")) if p)
    deadline = time.monotonic() + arguments.limit
    wanted = arguments.parts.split(",")
    results = []
    for name in wanted:
        left = deadline - time.monotonic()
        if left < 5:
            results.append({"name": name, "code": TIMED_OUT, "seconds": 0.0, "unfinished": True})
            continue
        print(f"... {name}, {left:.0f} s left", flush=True)
        command = commands(arguments.out, arguments.limit, rehearse=rehearse)[name]
        results.append(run_part(name, command, arguments.out, left, on_gpu=not rehearse))
        pack(arguments.out, archive)
    text, document = report(results, gpu, wanted)
    stem = f"{document['date']}_{re.sub(r'[^A-Za-z0-9]+', '-', gpu).strip('-').lower()}"
    target = arguments.out if rehearse else ROOT / "benchmarks" / "results"
    (target / f"{stem}.md").write_text(text)
    (target / f"{stem}.json").write_text(json.dumps(document, indent=1))
    print(text)
    if any(part.get("unfinished") for part in results):
        print("not everything was done: call it again, finished parts are kept")
    return max(int(part["code"] != 0 and not part.get("unfinished")) for part in results)


if __name__ == "__main__":
    sys.exit(main())
