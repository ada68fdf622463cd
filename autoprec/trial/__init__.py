"""Run a training script that knows nothing of AutoPrec, under hooks, and measure it."""

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.driver.script import run_script
from autoprec.trial.protocol import HostInfo, Probe, TrialResult, TrialSpec

__all__ = ["HostInfo", "Probe", "ScriptCommand", "TrialResult", "TrialRunner", "TrialSpec", "run_script"]
