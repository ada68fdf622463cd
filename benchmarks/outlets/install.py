"""What a newcomer meets: size of the installation, start-up, and the study as Optuna's own tools read it.

python benchmarks/outlets/install.py [install] [start] [optuna]
"""

import resource
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def installed(python: Path) -> tuple[set[str], float]:
    """Return (names of what pip lists, MB on disk)."""
    freeze = [python, "-m", "pip", "freeze", "--exclude", "autoprec"]
    lines = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout.splitlines()
    size = sum(path.lstat().st_size for path in (python.parent.parent / "lib").rglob("*") if path.is_file())
    return set(lines), size / 1e6


def install() -> None:
    """Install PyTorch, then AutoPrec, then its extra ui, under the pinned versions, without bytecode."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        pip = [python, "-m", "pip", "install", "-qqq", "--no-compile", "-c", ROOT / "constraints.txt"]
        subprocess.run([*pip, "torch"], check=True)
        torch, base = installed(python)
        for what in (str(ROOT), f"{ROOT}[ui]"):
            subprocess.run([*pip, what], check=True)
            names, size = installed(python)
            extra = what.removeprefix(str(ROOT))
            print(f"pip install autoprec{extra}: {len(names - torch)} packages, {size - base:.0f} MB beyond torch")


def best(command: list[str], runs: int = 15) -> tuple[float, float]:
    """Return (least wall, least CPU) seconds of a command."""
    walls, cpus = [], []
    for _ in range(runs):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        walls.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(walls), min(cpus)


def start() -> None:
    empty = best([sys.executable, "-c", "pass"])
    for name, words in (("import autoprec", ["-c", "import autoprec"]), ("autoprec --help", ["-m", "autoprec", "-h"])):
        wall, cpu = best([sys.executable, *words])
        print(f"{name}: {wall:.3f} s wall, {cpu:.3f} s CPU (python alone {empty[0]:.3f}, {empty[1]:.3f})")


def optuna() -> None:
    """A study of 60 groups: what storing a trial takes, and what Optuna finds in it."""
    import optuna

    from autoprec.tuning.study.study import StudyStore, default_storage
    from tests.tracking.conftest import make_records

    space = {f"layer:{i}": optuna.distributions.CategoricalDistribution(("keep", "bf16", "fp8")) for i in range(60)}
    with tempfile.TemporaryDirectory() as folder:
        store = StudyStore(default_storage(Path(folder)), "s", ("step_time_ms", "divergence"), resume=False)
        store.start(optuna.samplers.RandomSampler(seed=0), space, [])
        seconds = []
        for number in range(20):
            trial = store.ask()
            told = replace(make_records()[4], number=number, params=dict(trial.params))
            before = time.process_time()
            store.tell(trial, told)
            seconds.append(time.process_time() - before)
        seen = optuna.load_study(study_name="s", storage=default_storage(Path(folder)))
        columns = set(seen.trials_dataframe().columns)
        params = sum(column.startswith("params_") for column in columns)
        objectives = [column for column in sorted(columns) if column.startswith("values_")]
        middle = 1000 * sorted(seconds)[len(seconds) // 2]
        print(f"trials_dataframe(): {params} of {len(space)} parameters, objectives {', '.join(objectives)}")
        print(f"storing a trial of {len(space)} groups: {middle:.1f} ms CPU (median of {len(seconds)})")


if __name__ == "__main__":
    for row in sys.argv[1:] or ("install", "start", "optuna"):
        globals()[row]()
