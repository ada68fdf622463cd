"""The corpus of faulty scripts, and how one is judged inside this process: fast enough for a test of each."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoprec.graph.report import GraphReport
from autoprec.trial.inside.applying import apply_document
from autoprec.trial.inside.first_step import FirstStep
from autoprec.trial.inside.judging.judge import Judge
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.tuning.lint.facts import Facts
from autoprec.tuning.lint.rules import Finding, findings
from autoprec.tuning.lint.source import settings_of

FAULTY = Path(__file__).with_name("faulty")
_MARK = re.compile(r"# fault: (.*)$")
_CURE = re.compile(r"^# cure: (.*) => (.*)$")


@dataclass(frozen=True)
class Fault:
    """One faulty script.

    Attributes:
        path: the script; each line to which its fault may be traced ends in ``# fault: CODE...``.
        code: the first of these codes, which has to be found.
        lines: the lines that may be named for it.
        cures: texts and what stands in their place in the script that is mended as the finding says.
    """

    path: Path
    code: str
    lines: tuple[int, ...]
    cures: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, path: Path) -> Fault:
        """Read the marks of a script."""
        marks: dict[str, list[int]] = {}
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            for code in (m.group(1) if (m := _MARK.search(line)) else "").split():
                marks.setdefault(code, []).append(number)
        code = next(iter(marks))
        cures = tuple((m.group(1), m.group(2)) for line in lines if (m := _CURE.match(line)))
        return cls(path, code, tuple(marks[code]), tuple((plain(a), plain(b)) for a, b in cures))

    def cured(self) -> str:
        """Return the script, mended.

        Raises:
            ValueError: a text that is to be replaced is not in it.
        """
        text = "\n".join(line for line in self.path.read_text().splitlines() if not line.startswith("# cure:")) + "\n"
        for old, new in self.cures:
            if old not in text:
                raise ValueError(f"{self.path.name}: there is no {old!r} to cure")
            text = text.replace(old, new)
        return text


def plain(text: str) -> str:
    """Return a text with line breaks where it says so."""
    return text.replace("\\n", "\n")


def corpus() -> list[Fault]:
    """Return every faulty script."""
    return [Fault.of(path) for path in sorted(FAULTY.glob("*.py"))]


class _EndError(BaseException):
    """Ends the script."""


@contextlib.contextmanager
def _its_own(script: Path, arguments: Sequence[str], within: Path | None = None) -> Iterator[None]:
    """Leave the process as it was: arguments, folder, threads, random streams, environment, a process group."""
    argv, folder, threads, random, path = (
        sys.argv,
        os.getcwd(),
        torch.get_num_threads(),
        torch.get_rng_state(),
        list(sys.path),
    )
    environment = dict(os.environ)
    sys.argv = [str(script.resolve()), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with tempfile.TemporaryDirectory() as empty:  # where it may write what it likes
            os.chdir(within or empty)
            yield
            os.chdir(folder)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        while torch.is_autocast_enabled("cpu"):
            torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()
        os.environ.clear()
        os.environ.update(environment)
        sys.argv, sys.path[:] = argv, path
        os.chdir(folder)
        torch.set_num_threads(threads)
        torch.set_rng_state(random)


def judged(
    script: Path, arguments: Sequence[str] = (), policy: dict[str, Any] | None = None, *, within: Path | None = None
) -> GraphReport:
    """Return the recorded and judged step of a script, which runs until then; under a policy document, if one is given.

    Args:
        script, arguments: the file, and its command line.
        policy: a document that is applied before the step.
        within: the folder it runs in; an empty one without.

    Raises:
        RuntimeError: it takes no step that can be seen.
    """
    out, judges = list[GraphReport](), list[Judge]()

    def arrived(found: Found, hooks: Hooks, end: Callable[[], None]) -> None:
        def done(report: GraphReport) -> None:
            out.append(report)
            end()

        apply_document(policy, found, "auto", run_steps=1)
        judges.append(Judge(found, hooks, done))
        judges[0].start(running=False)

    try:
        stopped_at_first_step(script, arguments, arrived, lambda: bool(judges) and judges[0].end(), within=within)
    except Exception as error:
        with contextlib.suppress(_EndError):
            if not judges or not judges[0].failed(error):
                raise
    if not out:
        raise RuntimeError("no training step was seen")
    return GraphReport.from_json(out[0].to_json())


def stopped_at_first_step(
    script: Path,
    arguments: Sequence[str],
    arrived: Callable[[Found, Hooks, Callable[[], None]], None],
    ended: Callable[[], object] = lambda: None,
    *,
    within: Path | None = None,
) -> None:
    """Run a script in this process under hooks.

    Args:
        script: to be run.
        arguments: of its command line.
        arrived: called inside the first training forward, with what is trained, the hooks, and what ends the script.
        ended: called where the script comes to its end.
        within: the folder it runs in; an empty one without.
    """
    hooks, script = Hooks(), script.resolve()

    def end() -> None:
        raise _EndError

    with _its_own(script, arguments, within):
        hooks.install()
        try:
            FirstStep(hooks, lambda found, *_: arrived(found, hooks, end), lambda _: None, judges=True).watch()
            with contextlib.suppress(_EndError):
                runpy.run_path(str(script), run_name="__main__")
                ended()
        finally:
            hooks.remove()


def found_in(script: Path, arguments: Sequence[str] = (), policy: dict[str, Any] | None = None) -> list[Finding]:
    """Return the findings about a script's own precision, the worst first; under a policy document, if one is given."""
    return findings(Facts(report=judged(script, arguments, policy), settings=settings_of([str(script)], script.parent)))


def found_in_text(text: str, policy: dict[str, Any] | None = None) -> list[Finding]:
    """Return the findings about a script that is given as a text; under a policy document, if one is given."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(text)
        return found_in(path, policy=policy)
