"""The environment a trial runs in: our hooks on the Python path, quiet threads, and no uploads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from autoprec.precision.hardware import cores

#: Names the JSON file that tells the hooks what to do; its absence makes the injected code inert.
CONFIG_VARIABLE = "AUTOPREC_TRIAL"
#: Carries the runner's mark into every descendant, so that all of them can be found and ended.
MARK_VARIABLE = "AUTOPREC_TRIAL_MARK"
#: Where scripts that track with MLflow do so in their trials, in the private folder: each on a copy of its own.
MLFLOW_STORE = "mlruns"
INJECT = Path(__file__).parent / "inside" / "_inject"

_QUIET = {
    # One spin-waiting OpenMP thread per core of a shared machine made steps 30 times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONUNBUFFERED": "1",  # the tail of a process that dies is worth reading
    "KINETO_LOG_LEVEL": "5",  # torch's profiler, which sees the memory of a step, prints each start and stop
    "PYTHONDONTWRITEBYTECODE": "1",  # no __pycache__ beside the user's modules
    "PYTHONFAULTHANDLER": "1",
    "PYTHONHASHSEED": "0",  # the order of a set of strings must be the same in every trial
    "TOKENIZERS_PARALLELISM": "false",  # its thread pool does not survive a fork
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "NEPTUNE_MODE": "debug",
    "COMET_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # a trial's own store is files: a database would take seconds to make
}


def run_environment(config: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of ``autoprec run``: the user's own, plus the hooks."""
    env = dict(os.environ if base is None else base)
    paths = [str(INJECT)] + [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(INJECT)]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    env[CONFIG_VARIABLE] = str(config)
    return env


def trial_environment(
    config: Path, mark: str, private: Path, *, threads: int = 1, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a trial: hooks, ``threads`` OpenMP threads, nothing uploaded, nothing cached beside us.

    A host that will be forked must be given one thread (:mod:`autoprec.trial.inside.forking`); ``threads`` 0 leaves
    the user's own settings, to what is not forked.

    Args:
        config: file that the hooks read.
        mark: the mark by which the trial's processes are found.
        private: folder of the trial.
        threads: threads of OpenMP and MKL; 0 leaves the user's own.
        base: variables to begin with; default: those of this process.
    """
    own = run_environment(config, base)
    env = own | _QUIET | {MARK_VARIABLE: mark}
    if threads:
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(threads)
    else:
        env |= {name: own[name] for name in ("OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM") if name in own}
        if "TOKENIZERS_PARALLELISM" not in own:
            del env["TOKENIZERS_PARALLELISM"]
    env["MLFLOW_TRACKING_URI"] = (private / MLFLOW_STORE).as_uri()
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID", "OPTUNA_STORAGE"):
        env.pop(name, None)
    return env


def own_threads(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what gives a copy of a one-thread process the thread settings that the user's own process would have."""
    env = os.environ if base is None else base
    threads = env.get("OMP_NUM_THREADS", str(cores()))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": env.get("MKL_NUM_THREADS", threads),
        "TOKENIZERS_PARALLELISM": env.get("TOKENIZERS_PARALLELISM", "true"),
    }


def thread_count(base: Mapping[str, str] | None = None) -> int:
    """Return how many threads a kernel of the user's own process has, where its script does not say."""
    first = own_threads(base)["OMP_NUM_THREADS"].partition(",")[0].strip()  # others are for nested regions
    return max(1, int(first)) if first.isdecimal() else cores()
