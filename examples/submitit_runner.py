"""Run trials as jobs of a cluster by submitit (Slurm): a runner for ``autoprec.tuning.engine.Search``.

from autoprec.tuning.engine import Search
Search(options, command, listener, lambda seed, folder: SubmititRunner(command, folder, seed)).run()
"""

from pathlib import Path

import submitit

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.base import Runner
from autoprec.trial.driver.execute import execute, request
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.protocol import HostInfo, TrialResult, TrialSpec


class SubmititRunner(Runner):
    """Runs every trial as a job of its own."""

    def __init__(
        self, command: ScriptCommand, folder: Path, seed: int, cluster: str = "slurm", **parameters: object
    ) -> None:
        self._command, self._seed, self._folder = command, seed, Path(folder)
        self._executor = submitit.AutoExecutor(folder=self._folder / "jobs", cluster=cluster)
        self._executor.update_parameters(**parameters)  # e.g. gpus_per_node=1, timeout_min=30

    def start(self) -> HostInfo:
        """Find out what the script trains, on the driver's machine."""
        with TrialRunner(self._command, run_dir=self._folder, launch="process") as local:
            return local.start()

    def run(self, spec: TrialSpec) -> TrialResult:
        """Run one trial as a job, and wait for it."""
        document = request(self._command, spec, seed_offset=self._seed, launch="process")
        return self._executor.submit(execute, document).result()

    def close(self) -> None:
        """Nothing is left running between trials."""
