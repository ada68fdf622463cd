"""``make gpu``: everything a GPU is needed for, in one command, resumable in parts, within a time limit.

    python benchmarks/gpu_run.py [--limit 480] [--out DIR] [--pack FILE] [--parts doctor,tests,products,...]
    python benchmarks/gpu_run.py --rehearse     the same parts on a CPU with tiny models: the path, not the figures

A part takes at most nine minutes, then it is ended with every process that it started. Parts that finished are kept
in ``DIR`` (default: ``benchmarks/results/gpu-parts``, not committed) and not run again. After each part all of ``DIR``
is packed into ``FILE`` (default: ``DIR.tar.gz``): give it to another machine with ``--pack`` and it goes on from there.
The parts: what works here (doctor); tests that need a GPU, one compiled step per recipe among them; the conformance
suite on every backend; calibration, with linears by every backend; FP8 products by scales and accumulation; four blocks
of width 4096 in every precision; emulated against native and modelled against measured for a compiled script; searches
of compiled scripts against what people set by hand; a search of a script that is not compiled, and ``autoprec verify``
on what it adopts.
Parts that keep rows of their own go on where they were ended; the others are not begun with less than they need.
The report is ``benchmarks/results/<date>_<gpu>.{json,md}`` with commands, versions and hardware. Wheels of the folder
that ``make gpu-bundle`` wrote are installed into a temporary folder first, and a Transformer Engine kit beside them is
unpacked; nothing is downloaded here.
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
from benchmarks.gpu_parts import write_whole  # noqa: E402 - nothing need be installed for it

#: Exit status of what was ended past its limit, as of coreutils' timeout.
TIMED_OUT = 124
#: What a part needs at least, seconds: it is begun with no less, and rows of its own are kept where that is little.
PARTS = {
    "doctor": 20.0, "tests": 240.0, "conformance": 180.0, "calibrate": 330.0, "products": 40.0,
    "blocks": 60.0, "fidelity": 120.0, "end_to_end": 120.0, "eager": 120.0,
}  # fmt: skip


def commands(out: Path, limit: float, *, rehearse: bool = False) -> dict[str, list[str]]:
    """Return the command of each part; a rehearsal runs the same programs where there is no GPU, on tiny models."""
    python, end_to_end = sys.executable, "benchmarks/gpu_end_to_end.py"
    searched = ["--budget", f"{limit * SEARCH_SHARE:.0f}"]
    found = {
        "doctor": [python, "-m", "autoprec", "doctor"],
        "tests": [python, "-m", "pytest", "-m", "gpu", "-rs", *GPU_TESTS],
        "conformance": [python, "-m", "pytest", "-rs", CONFORMANCE],
        "calibrate": [python, "-m", "autoprec", "calibrate", "--output", str(out / "calibration.json")],
        "products": [python, "benchmarks/gpu_speed.py", "products", "--out", str(out / "products")],
        "blocks": [python, "benchmarks/gpu_speed.py", "blocks", "--out", str(out / "blocks")],
        "fidelity": [
            *(python, "benchmarks/gpu_fidelity.py", "--out", str(out / "fidelity.md")),
            *("--calibration", str(out / "calibration.json")),
        ],
        "end_to_end": [python, end_to_end, "--out", str(out / "end_to_end"), *searched],
        "eager": [
            *(python, end_to_end, "--out", str(out / "eager"), "--eager", "--verify"),
            *("--models", "gpt2-124m", "--presets", "bf16", *searched),
        ],
    }
    return _rehearsed(found, limit) if rehearse else found


#: Files with tests that need a GPU: to collect the whole suite takes a minute, and packages that the bundle lacks.
GPU_TESTS = ("tests/gpu", "tests/cost/calibrate/test_cuda_bench.py")
CONFORMANCE = "tests/testing/test_backends.py"


def _rehearsed(found: dict[str, list[str]], limit: float) -> dict[str, list[str]]:
    """Return the commands with stand-ins, for a CPU."""
    tiny = [
        "--models",
        "tiny",
        "--steps",
        "6",
        "--trials",
        "2",
        "--budget",
        f"{limit / 8:.0f}",
    ]  # the later count holds
    found["conformance"] += ["-k", "TestNative and fp8_rowwise"]
    found["calibrate"] = [*found["calibrate"][:4], "--device", "cpu"]  # whose rates have their place
    found["products"].append("--tiny")
    found["blocks"] += ["--tiny", "--names", "bf16,native-fp8_rowwise"]
    found["fidelity"] += ["--model", "tiny", "--curve-steps", "6"]
    found["end_to_end"] += [*tiny, "--presets", "bf16,torchao-rowwise"]
    found["eager"] += tiny
    return found


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


def install_bundle(folder: Path, into: Path) -> str:
    """Install the wheels of a bundle once; return what belongs on the Python path, empty without wheels."""
    wheels = sorted(str(path) for path in folder.glob("*.whl"))
    if not wheels:
        return ""
    if not into.is_dir():
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
        made = into.with_name(f"{into.name}.{os.getpid()}")
        subprocess.run([*words, str(made), *wheels], check=True)
        made.rename(into)
    return str(into)


def gpu_name() -> str:
    """Return the GPU's name, by the driver's tool or, where a container lacks that, by torch; empty without one."""
    found = ask_driver(["name"])
    if found:
        return found
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


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
    # what calibrate keeps for searches on this device goes along to the machine that goes on from here
    environment["XDG_CACHE_HOME"] = str(out.resolve() / "cache")
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
        print("no NVIDIA GPU here (nvidia-smi and torch found none): nothing was run")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    archive = arguments.pack or arguments.out.with_name(arguments.out.name + ".tar.gz")
    if archive.exists():
        unpack(archive, arguments.out)
    scratch = Path(tempfile.gettempdir())
    if not rehearse:
        site = install_bundle(arguments.bundle, scratch / "autoprec-bundle")
        kit = unpack_kit(arguments.bundle, scratch / "autoprec-te-kit")
        paths = (kit, site, os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    deadline = time.monotonic() + arguments.limit
    wanted = arguments.parts.split(",")
    if unknown := sorted({*wanted} - {*PARTS}):
        parser.error(f"no part is called {unknown[0]}: {', '.join(PARTS)}")
    results = []
    for name in wanted:
        left = deadline - time.monotonic()
        if left < (5 if rehearse else PARTS[name]) and not (arguments.out / f"{name}.json").exists():
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
