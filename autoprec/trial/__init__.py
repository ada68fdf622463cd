"""Run a training script that knows nothing of AutoPrec, under hooks, and measure it."""

from autoprec.trial.command import ScriptCommand
from autoprec.trial.protocol import HostInfo, Probe, TrialResult, TrialSpec
from autoprec.trial.runner import TrialRunner
from autoprec.trial.script import run_script

__all__ = ["HostInfo", "Probe", "ScriptCommand", "TrialResult", "TrialRunner", "TrialSpec", "run_script"]
