"""``make gpu``: everything a GPU is needed for, in one command, resumable in parts, within a time limit.

    python benchmarks/gpu/run.py [--limit 530] [--out DIR] [--pack FILE] [--parts doctor,fidelity,...]
    python benchmarks/gpu/run.py --rehearse     the same parts on a CPU with tiny models: the path, not the figures

A part takes at most nine minutes, then it is ended with every process that it started. Parts that finished are kept
in ``DIR`` (default: ``benchmarks/results/gpu-parts``, not committed) and not run again. After each part all of ``DIR``,
the report of what is known so far among it, is packed into ``FILE`` (default: ``DIR.tar.gz``): give it to another
machine with ``--pack`` and it goes on from there.

What the day's figures are made of comes first, for a machine may be had for a quarter of an hour: what works (doctor);
gradient errors of every backend against emulated, and modelled against
measured step times (fidelity); four blocks of width 4096 by torchao and by us (blocks); searches of compiled scripts,
timed, against what people set by hand (gpt2, billion). After that: tests that need a GPU, one compiled step per recipe
among them; the conformance suite on every backend; the other blocks; loss curves; FP8 products by scales and
accumulation; a search of a script that is not compiled, with ``autoprec verify`` on what it adopts; a ViT.
Parts that keep rows of their own go on where they were ended; the others are not begun with less than they need.
The report is ``benchmarks/results/<date>_<gpu>.{json,md}``, in ``DIR`` as well, with commands, versions and hardware;
it begins with the figures, their goals and verdicts (``figures.py``), told of whatever rows there are. Wheels of
the folder that ``make gpu-bundle`` wrote are installed into a temporary folder first, and a Transformer Engine kit
beside them is unpacked; nothing is downloaded here.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from autoprec.trial.inside.observe.conditions import QUERY, Conditions, ask_driver  # noqa: E402 - nothing need be installed for it
from benchmarks.gpu.figures import documents, figures, table  # noqa: E402 - nothing need be installed for it
from benchmarks.gpu.parts import write_whole  # noqa: E402 - nothing need be installed for it
from benchmarks.gpu.speed import FIRST, NAMES  # noqa: E402 - nothing need be installed for it

#: Seconds after which the driver no longer counts what has ended as work.
SETTLES_S = 2.0
#: Exit status of what was ended past its limit, as of coreutils' timeout.
TIMED_OUT = 124
#: What a part needs at least, seconds: it is begun with no less, and rows of its own are kept where that is little.
PARTS = {
    "doctor": 20.0, "fidelity": 60.0, "blocks": 60.0, "gpt2": 300.0, "billion": 200.0,
    "tests": 200.0, "conformance": 180.0, "other_blocks": 60.0, "curves": 60.0, "products": 40.0, "eager": 120.0,
    "vit": 120.0,
}  # fmt: skip
#: Models of the parts that search: on a GPU, and in a rehearsal.
MODELS = {"gpt2": ("gpt2-124m", "tiny"), "billion": ("llama-1.3b", "tiny-llama"), "vit": ("vit-l", "tiny-vit")}
#: Trials and seconds of each search: gpt2's as its figure is told of, with time for runs beside it.
SEARCHES = {"gpt2": (30, 400), "billion": (12, 260), "vit": (12, 260), "eager": (30, 260)}


def commands(out: Path, limit: float, *, rehearse: bool = False) -> dict[str, list[str]]:
    """Return the command of each part; a rehearsal runs the same programs where there is no GPU, on tiny models."""
    python, speed = sys.executable, "benchmarks/gpu/speed.py"

    def fidelity(sections: str) -> list[str]:
        words = [python, "benchmarks/gpu/fidelity.py", "--out", str(out / f"{sections.replace(',', '-')}.md")]
        return [*words, "--answers", str(out / "fidelity"), "--sections", sections]

    def search(part: str, *words: str) -> list[str]:
        trials, seconds = SEARCHES[part]
        script = [python, "benchmarks/gpu/end_to_end.py", *words, "--trials", str(trials)]
        return [*script, "--budget", f"{min(seconds, limit * SEARCH_SHARE):.0f}"]

    blocks, ends = (
        [python, speed, "blocks", "--out", str(out / "blocks"), "--names"],
        ["--out", str(out / "end_to_end")],
    )
    found = {
        "doctor": [python, "-m", "autoprec", "doctor"],
        "fidelity": fidelity("gradients,times"),
        "blocks": [*blocks, ",".join(FIRST)],
        "gpt2": search("gpt2", *ends, "--models", MODELS["gpt2"][0]),
        "billion": search("billion", *ends, "--models", MODELS["billion"][0]),
        "tests": [python, "-m", "pytest", "-W", "default", "-m", "gpu", "-rs", *GPU_TESTS],
        "conformance": [python, "-m", "pytest", "-W", "default", "-rs", CONFORMANCE],
        "other_blocks": [*blocks, ",".join(NAMES)],
        "curves": fidelity("curves"),
        "products": [python, speed, "products", "--out", str(out / "products")],
        "eager": search(
            "eager", "--out", str(out / "eager"), "--models", "gpt2-124m", "--presets", "bf16", "--eager", "--verify"
        ),
        "vit": search("vit", *ends, "--models", MODELS["vit"][0]),
    }
    return _rehearsed(found, limit) if rehearse else found


#: Files with tests that need a GPU: to collect the whole suite takes a minute, and packages that the bundle lacks.
GPU_TESTS = ("tests/gpu",)
CONFORMANCE = "tests/conformance/test_backends.py"


def _rehearsed(found: dict[str, list[str]], limit: float) -> dict[str, list[str]]:
    """Return the commands with stand-ins, for a CPU."""
    tiny = ["--steps", "6", "--trials", "2", "--budget", f"{limit / 12:.0f}"]  # the later count holds
    found["conformance"] += ["-k", "TestNative and fp8_rowwise"]
    found["products"].append("--tiny")
    found["blocks"] += ["--tiny", "--names", "bf16,native-fp8_rowwise,torchao-rowwise"]
    found["other_blocks"] += ["--tiny", "--names", "bf16,native-fp8_tensorwise"]
    for name in ("fidelity", "curves"):
        found[name] += ["--model", "tiny", "--curve-steps", "6"]
    found["eager"] += [*tiny, "--models", "tiny"]
    for name, (_, model) in MODELS.items():
        presets = "bf16,torchao-rowwise" if name == "gpt2" else "bf16"
        found[name] += [*tiny, "--models", model, "--presets", presets]
    return found


#: Seconds that one part takes at most, and what one call takes: on a GPU, and in a rehearsal, which runs every part.
PART_LIMIT, CALL_LIMIT, REHEARSAL_LIMIT = 540.0, 530.0, 900.0
#: Of one call's limit, at most: what is compared with a search needs the rest.
SEARCH_SHARE = 0.8


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
    if not into.is_dir():
        made = into.with_name(f"{into.name}.{os.getpid()}")  # a kit unpacked in part must not be taken for a whole one
        with tarfile.open(kit) as stream:
            stream.extractall(made, filter="data")
        made.rename(into)
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
    if used > 5:  # the driver looks back about a second, at the part before
        time.sleep(SETTLES_S)
        used = int(re.sub(r"\D", "", ask_driver(["utilization.gpu"])) or 0)
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
    # what is kept of this device goes along to the machine that goes on from here
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


def version(name: str) -> str:
    """Return the version of a distribution as the parts find it: what the bundle brought is on their path alone."""
    path = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    return next((found.version for found in metadata.distributions(name=name, path=path)), "absent")


def report(
    results: list[dict[str, Any]], gpu: str, parts: list[str], out: Path, *, rehearse: bool = False
) -> tuple[str, dict[str, Any]]:
    """Return the report of what is known so far, as text and as data."""
    names = ("torch", "triton", "torchao", "transformer_engine", "nvidia-cudnn-cu13", "optuna")
    versions = {name: version(name) for name in names}
    small, billion = (MODELS[name][1 if rehearse else 0] for name in ("gpt2", "billion"))
    told = figures(out, small=small, billion=billion)
    document = {
        "gpu": gpu,
        "hardware": "" if rehearse else ask_driver(("name", "driver_version", "memory.total")),
        "date": time.strftime("%Y-%m-%d"),
        "figures": documents(told),
        "python": platform.python_version(),
        "versions": versions,
        "command": f"python benchmarks/gpu/run.py --parts {','.join(parts)}",
        "parts": results,
    }
    lines = [f"# {gpu}, {document['date']}", "", f"`{document['command']}`", ""]
    lines += ["Tiny models on a CPU: the path to the figures, which say nothing of a GPU.", ""] if rehearse else []
    lines += [*table(told), ""]
    lines += [f"{document['hardware']}", ""] if document["hardware"] else []
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
    deadline = time.monotonic() + arguments.limit  # installing and unpacking count
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
    wanted = arguments.parts.split(",")
    if unknown := sorted({*wanted} - {*PARTS}):
        parser.error(f"no part is called {unknown[0]}: {', '.join(PARTS)}")
    results: list[dict[str, Any]] = []
    text = ""
    for name in wanted:
        left = deadline - time.monotonic()
        if left < (5 if rehearse else PARTS[name]) and not (arguments.out / f"{name}.json").exists():
            results.append({"name": name, "code": TIMED_OUT, "seconds": 0.0, "unfinished": True})
        else:
            print(f"... {name}, {left:.0f} s left", flush=True)
            command = commands(arguments.out, arguments.limit, rehearse=rehearse)[name]
            results.append(run_part(name, command, arguments.out, left, on_gpu=not rehearse))
        text, document = report(results, gpu, wanted, arguments.out, rehearse=rehearse)
        stem = f"{document['date']}_{re.sub(r'[^A-Za-z0-9]+', '-', gpu).strip('-').lower()}"
        for folder in (arguments.out, *([] if rehearse else [ROOT / "benchmarks" / "results"])):
            (folder / f"{stem}.md").write_text(text)
            (folder / f"{stem}.json").write_text(json.dumps(document, indent=1))
        pack(arguments.out, archive)  # the machine may be gone before the next part is done
    print(text)
    if any(part.get("unfinished") for part in results):
        print("not everything was done: call it again, finished parts are kept")
    return max(int(part["code"] != 0 and not part.get("unfinished")) for part in results)


if __name__ == "__main__":
    sys.exit(main())
