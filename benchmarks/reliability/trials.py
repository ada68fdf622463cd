"""Figures of the trial room: which kinds of script run, what a trial's start costs, and that nothing is left behind.

    python benchmarks/reliability/trials.py [--quick] [--only kinds,run,start,isolation,faults] [--output FILE]

Every figure is measured here and now; the scripts are those of tests/scripts. CPU only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
sys.path.insert(0, str(ROOT))

from autoprec.trial.command import ScriptCommand  # noqa: E402
from autoprec.trial.driver.runner import TrialRunner  # noqa: E402
from autoprec.trial.processes import marked_processes  # noqa: E402
from autoprec.trial.protocol import TrainSpec  # noqa: E402

TORCHRUN = ("torchrun", "--nproc-per-node", "2")
LAUNCH = ("accelerate", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no")
KINDS: dict[str, tuple[str, ...]] = {
    "plain": ("plain.py",),
    "closure (LBFGS)": ("closure.py",),
    "GAN": ("gan.py",),
    "EMA": ("ema.py",),
    "no optimizer": ("no_optimizer.py",),
    "accumulation": ("accumulation.py",),
    "GradScaler fp16": ("gradscaler.py",),
    "autocast bf16": ("autocast.py",),
    "checkpointing": ("checkpointing.py",),
    "torch.compile": ("compiled.py",),
    "DataLoader workers": ("loader.py",),
    "IterableDataset": ("loader.py", "--iterable"),
    "HF Trainer": ("hf_trainer.py",),
    "accelerate": ("accelerated.py",),
    "accelerate launch": (*LAUNCH, "--dynamo_backend", "no", "accelerated.py"),
    "Lightning": ("lightning_fit.py",),
    "DDP 2 ranks": (*TORCHRUN, "ddp.py"),
    "FSDP2 2 ranks": (*TORCHRUN, "fsdp.py"),
    "mp.spawn": ("spawned.py",),
}
NEEDS = {"HF Trainer": "transformers", "accelerate": "accelerate", "accelerate launch": "accelerate"}
NEEDS["Lightning"] = "lightning"
FAULTS = {
    "exception": "crashed",
    "exit": "too_short",
    "hard_exit": "crashed",
    "segfault": "crashed",
    "abort": "crashed",
    "hang": "hung",
    "stubborn_hang": "hung",
    "deadlock": "hung",
    "nan": "diverged",
    "oom": "oom",
    "memory_error": "oom",
    "killed": "oom",
    "endless_output": "hung",
    "orphans": "crashed",
}
EMPTY: dict[str, Any] = {"schema": "autoprec.policy/1"}


def command(*tokens: str, cwd: Path) -> ScriptCommand:
    return ScriptCommand.parse([str(SCRIPTS / t) if (SCRIPTS / t).is_file() else t for t in tokens], cwd=cwd)


def losses_in(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", text)]


def plain_run(spec: ScriptCommand) -> str:
    env = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    return subprocess.run(spec.argv(), cwd=spec.cwd, env=env, capture_output=True, text=True, check=False).stdout


def kinds(folder: Path, quick: bool) -> dict[str, Any]:
    """Run each kind: recorded losses against the script's own log, printed to six digits, with an empty policy."""
    rows = {}
    chosen = list(KINDS)[:4] if quick else list(KINDS)
    for name in chosen:
        if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
            rows[name] = {"ran": False, "why": f"{NEEDS[name]} is not installed"}
            continue
        cwd = folder / re.sub(r"\W", "", name)
        cwd.mkdir()
        spec = command(*KINDS[name], cwd=cwd)
        own = losses_in(plain_run(spec))
        with TrialRunner(spec, run_dir=folder / "runs") as runner:
            info = runner.start()
            trial = runner.run(TrainSpec(steps=5, warmup=1, policy=EMPTY))
        if info.optimizers == ():
            own = own[1:]  # without an optimizer the first step is spent on finding the model
        worst = max((abs(a - b) for a, b in zip(trial.losses, own, strict=False)), default=float("nan"))
        rows[name] = {"ran": trial.ok, "launch": info.launch, "log_difference": worst, "why": trial.reason}
        print(f"{name:20s} {rows[name]}", file=sys.stderr, flush=True)
    ran = sum(bool(row["ran"]) for row in rows.values())
    equal = sum(row.get("log_difference", 1.0) < 1e-6 for row in rows.values())
    return {"kinds": f"{ran}/{len(rows)}", "losses_equal_log": f"{equal}/{len(rows)}", "rows": rows}


def run(folder: Path, quick: bool) -> dict[str, Any]:
    """``autoprec run`` with an empty policy against plain python: losses, CPU time per step, alternating."""
    cwd = folder / "run"
    cwd.mkdir()
    spec = command("plain.py", "--steps", "120" if quick else "300", "--width", "128", cwd=cwd)
    code = (
        "import sys; from pathlib import Path; from autoprec.trial.command import ScriptCommand;"
        "from autoprec.trial.driver.script import run_script;"
        f"sys.exit(run_script(ScriptCommand.parse(sys.argv[1:]), {EMPTY!r}))"
    )
    times: dict[str, list[float]] = {"plain": [], "hooked": []}
    texts: dict[str, list[list[float]]] = {"plain": [], "hooked": []}
    env = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", PYTHONPATH=str(ROOT))
    for _ in range(2 if quick else 5):
        for name, argv in (("plain", spec.argv()), ("hooked", [sys.executable, "-c", code, *spec.argv()[1:]])):
            out = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=True).stdout
            times[name].append(float(re.findall(r"cpu_ms_per_step ([\d.]+)", out)[0]))
            texts[name].append(losses_in(out))
    ratio = statistics.median(times["hooked"]) / statistics.median(times["plain"])
    same = all(text == texts["plain"][0] for name in texts for text in texts[name])
    return {"identical_losses": same, "overhead": ratio - 1, "cpu_ms_per_step": times}


def start(folder: Path, quick: bool) -> dict[str, Any]:
    """From the request to the first training step, by rung; the zygote's includes the script's own set-up."""
    out: dict[str, Any] = {}
    cwd = folder / "start"
    cwd.mkdir()
    with TrialRunner(command("plain.py", cwd=cwd), run_dir=folder / "runs") as runner:
        runner.start()
        spec = TrainSpec(steps=1, warmup=0)
        forks = [runner.run(spec).start_s * 1e3 for _ in range(10 if quick else 50)]
        out["fork_ms"] = {"median": statistics.median(forks), "max": max(forks)}
        began = time.monotonic()
        with TrialRunner(command("plain.py", cwd=cwd), run_dir=folder / "runs", seed_offset=1) as second:
            second.start()
            out["second_seed_host_s"] = time.monotonic() - began
        with TrialRunner(command("plain.py", cwd=cwd), run_dir=folder / "runs", launch="zygote") as zygote:
            zygote.start()
            out["zygote_s"] = statistics.median(zygote.run(spec).start_s for _ in range(3))
    with TrialRunner(command("plain.py", cwd=cwd), run_dir=folder / "runs", launch="process") as process:
        process.start()
        out["process_s"] = process.run(spec).start_s
    return out


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in sorted(folder.rglob("*"))}


def isolation(folder: Path, quick: bool) -> dict[str, Any]:
    """Trials of a script that writes wherever it can; what has changed in its directory afterwards."""
    cwd = folder / "user"
    (cwd / "old").mkdir(parents=True)
    (cwd / "existing.txt").write_text("precious\n")
    (cwd / "old" / "file").write_text("x")
    before, count, good = snapshot(cwd), 10 if quick else 100, 0
    with TrialRunner(command("writer.py", cwd=cwd), run_dir=folder / "runs") as runner:
        for _ in range(count):
            good += runner.run(TrainSpec(steps=6, warmup=0)).ok
    after = snapshot(cwd)
    changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    return {"trials": count, "ok": good, "files_created_or_changed": len(changed)}


def faults(folder: Path, quick: bool) -> dict[str, Any]:
    """Every fault classified; then killed, hung and crashed trials in a row, and the processes they left."""
    cwd = folder / "faults"
    cwd.mkdir()
    order = cwd / "order.txt"
    order.write_text("none")
    wrong = {}
    with TrialRunner(command("faults.py", str(order), cwd=cwd), run_dir=folder / "runs") as runner:
        reference = runner.run(TrainSpec(steps=4, warmup=0))
        for fault, status in FAULTS.items():
            order.write_text(fault)
            result = runner.run(TrainSpec(steps=20, timeout_s=1.0 if status == "hung" else 60.0))
            if result.status != status:
                wrong[fault] = f"{result.status}: {result.reason}"
        count = 10 if quick else 100
        for index in range(count):
            order.write_text(("hang", "killed", "orphans", "exception")[index % 4])
            runner.run(TrainSpec(steps=20, timeout_s=0.3))
        order.write_text("none")
        still = runner.run(TrainSpec(steps=4, warmup=0)).losses == reference.losses
        mark = runner.mark
    return {
        "faults_classified": f"{len(FAULTS) - len(wrong)}/{len(FAULTS)}",
        "wrong": wrong,
        "bad_trials": count,
        "processes_left": len(marked_processes(mark)),
        "trial_after_them_identical": still,
    }


PARTS: dict[str, Callable[[Path, bool], dict[str, Any]]] = {
    "kinds": kinds,
    "run": run,
    "start": start,
    "isolation": isolation,
    "faults": faults,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and kinds")
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
    }
    for name in arguments.only.split(","):
        with tempfile.TemporaryDirectory(prefix="autoprec-bench-") as folder:
            began = time.monotonic()
            result[name] = PARTS[name](Path(folder), arguments.quick) | {"seconds": time.monotonic() - began}
        print(f"{name}: done in {result[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
