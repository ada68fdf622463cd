"""What a search shows while it runs: one line per event on stderr, a live bar on a terminal only."""

from __future__ import annotations

from autoprec.cli.console import clock
from autoprec.cli.phases import Phases
from autoprec.support.optional import is_available
from autoprec.support.units import counted, gap_text, memory_text, parameters_text
from autoprec.tuning.events import Listener, SearchInfo
from autoprec.tuning.study.run import Run, headline

PHASES = {
    "script": "starting the script",
    "graph": "recording one training step",
    "reference": "reference runs and noise floor",
    "verdict": "what could be gained",
    "sensitivity": "gradient error per group and recipe",
    "search": "trials",
    "finalists": "further paired seeds",
    "duel": "timing beside the script, in turns",
    "variants": "running the script under its variants",
    "answer": "writing the policy",
    "tracking": "recording the answer in MLflow",
}


def describe(record: Run, reference: str = "script") -> str:
    """Return one trial in a few words: what it gained over the reference, what it cost, or why it failed."""
    if not record.ok:
        return f"{record.status}: {record.reason}"
    m = record.to_row()
    return f"{headline(m, reference)}  {gap_text(m['divergence'], record.metric)}  {memory_text(m['memory_bytes'])}"


class TerminalProgress(Listener):
    """Prints phases, trials, the best so far and the time left: one ticking line on a terminal, else a line each.

    Args:
        verbosity: -1 prints nothing but notes, 0 phases and trials, 1 also the reference runs, and every trial as a
            line of its own on a terminal, too.
    """

    def __init__(self, verbosity: int = 0) -> None:
        self._verbosity = verbosity
        self._phases = Phases(quiet=verbosity < 0)
        self._bounded = False
        self._latest = ""  # the phase that began last, where nothing was said in it yet
        self._reference = "script"

    def phase(self, name: str, detail: str = "") -> None:
        """Begin a phase of the search: its name is a key of :data:`PHASES`."""
        text = PHASES.get(name, name) + (f": {detail}" if detail else "")
        if text == self._latest:
            return
        self._latest = text
        if self._phases.live:
            self._phases.say(text)
        self._phases.begin(text)

    def started(self, info: SearchInfo) -> None:
        """Say what is searched, for which target, and how trials are started."""
        model = info.model
        self._bounded = bool(info.options.get("budget_s"))
        self._reference = str(info.options.get("reference") or "script")
        groups = f"{counted(len(info.groups), 'group')} of layers"
        self._phases.say(
            f"{model['class']}, {parameters_text(model['parameters'])}, {groups}; "
            f"target {info.target} ({info.source}); trials start by {info.launch}"
        )

    def trial(self, record: Run, done: int, total: int, best: Run | None, seconds_left: float) -> None:
        """Print a line for a run that ended, and move the bar.

        Args:
            record: the run.
            done, total: runs of its kind that ended, and those that are planned at most.
            best: the best acceptable run so far; None where that is the script as written.
            seconds_left: that the search usually takes from here on; at most, with a time budget.
        """
        if record.kind in ("reference", "noise"):
            if record.kind == "reference" and record.seed == 0 and is_available("mlflow"):
                self._phases.say("`autoprec ui` in another terminal shows the trials as they end")
            if self._verbosity > 0:
                self._phases.say(f"{record.name}: {describe(record, self._reference)}")
            return
        self._latest = ""
        leader = "best: the script as written"
        if best is not None:
            leader = f"best {headline(best.to_row(), self._reference)} ({best.name})"
        if record.kind == "finalist":
            name, count = (f"seed {record.seed + 1} of " if record.seed else "whole model of ") + record.name, ""
        else:  # "trial 6" is the number of its run, which counts the references too: the count stands apart
            name, count = record.name, f"{done} of {counted(total, 'trial')}; "
        # without a budget it is not known how many further seeds a decision takes, and it may converge before
        left = f"{'at most ' if self._bounded else ''}about {clock(seconds_left)} left"
        if not self._phases.live or self._verbosity > 0:
            self._phases.say(f"{name}: {describe(record, self._reference)}   [{count}{leader}; {left}]")
        what = "trials"
        if record.kind == "finalist":  # how many there will be depends on what they show
            done, total, what = 0, 0, "further paired seeds"
        self._phases.advance(done, total, text=f"{what}, {leader}, {left}")

    def note(self, text: str) -> None:
        """Print a note, in yellow."""
        self._latest = ""
        self._phases.print(f"note: {text}", style="yellow")

    def close(self) -> None:
        """Stop the bar, whatever happened."""
        self._phases.close()
