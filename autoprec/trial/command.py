"""The training command a person typed, understood: a script, a module, or a launcher in front of one."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from autoprec.errors import UsageError, nearest
from autoprec.support.redact import redact_arguments, remember

#: Programs and modules that start the processes in which the script runs.
_STARTERS = frozenset(
    (
        *("torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "mpiexec", "srun", "composer", "fabric"),
        *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
        *("deepspeed.launcher.runner", "colossalai"),
    )
)
#: How launchers are told the number of processes of this machine (torchrun, accelerate, deepspeed, mpirun, fabric).
_PROCESS_FLAGS = frozenset(("nproc-per-node", "num-processes", "num-gpus", "np", "n", "nproc", "ntasks", "devices"))
#: Starters that start one process where nothing is said; others take what they find, or what a file of theirs says.
_ONE_PROCESS = frozenset(("torchrun", "torch.distributed.run", "torch.distributed.launch", "fabric"))
_PYTHONS = ("python", "python3", "python3.11", "python3.12", "python3.13", "python3.14")


@dataclass(frozen=True, slots=True)
class Variant:
    """Another way to run the same optimisation step: arguments behind the script's own, over which they win."""

    name: str
    args: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read ``NAME: ARGS``.

        Raises:
            UsageError: it is not that.
        """
        name, _, words = text.partition(":")
        try:
            args = tuple(shlex.split(words))
        except ValueError as error:
            raise UsageError(f"--variant {text!r} cannot be read: {error}", fix="close the quotes") from error
        if not args or not re.fullmatch(r"\w[\w.+-]*", name.strip()):
            fix = "a name of letters and digits, a colon, arguments: --variant 'mb16: --micro-batch 16 --accum 2'"
            raise UsageError(f"--variant {text!r} is not NAME: ARGS", fix=fix)
        remember(list(args))
        return cls(name.strip(), args)

    @property
    def arguments(self) -> str:
        """Its arguments as text, with their secrets hidden."""
        return shlex.join(redact_arguments(self.args))

    @property
    def label(self) -> str:
        """The variant as it is typed, with its secrets hidden."""
        return f"{self.name}: {self.arguments}"


def parse_variants(texts: Sequence[str]) -> tuple[Variant, ...]:
    """Return the variants of a command line.

    Raises:
        UsageError: one cannot be read, or two have one name.
    """
    found = tuple(map(Variant.parse, texts))
    names = [variant.name for variant in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two variants are called {name}", fix="give each a name of its own")
    return found


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    """``train.py args``, ``-m package.module args``, or ``-- torchrun ... train.py args``.

    Attributes:
        kind: ``script``, ``module`` or ``launcher``.
        target: the script's path, the module's dotted name, or the launcher's program.
        args: everything after the target.
    """

    kind: str
    target: str
    args: tuple[str, ...]
    cwd: Path

    @classmethod
    def parse(cls, tokens: Sequence[str], cwd: Path | str | None = None) -> ScriptCommand:
        """Understand the tokens after our own options.

        Raises:
            UsageError: nothing was given, or the script, module or launcher does not exist (the nearest file is named).
        """
        where = Path(cwd) if cwd is not None else Path.cwd()
        words = list(tokens)
        remember(words)  # what is printed of them again is redacted
        launched = bool(words) and words[0] == "--"
        if launched:
            words = words[1:]
        if not words:
            raise UsageError("no training script given", fix="autoprec search train.py [script args...]")
        if Path(words[0]).name in _PYTHONS and len(words) > 1 and (words[1] == "-m" or not words[1].startswith("-")):
            words = words[1:]
        if words[0] == "-m":
            if len(words) < 2 or not words[1].strip("."):
                raise UsageError("-m needs a module name", fix="autoprec search -m package.module [args...]")
            return cls("module", words[1], tuple(words[2:]), where)
        starts = Path(words[0]).name in _STARTERS  # also by its path
        if not starts and (words[0].endswith((".py", ".pyw")) or (where / words[0]).is_file()):
            _must_exist(words[0], where)
            return cls("script", words[0], tuple(words[1:]), where)
        program = _find_program(words[0])
        if program is None:
            if not launched:
                _must_exist(words[0], where)
            raise UsageError(
                f"cannot find the launcher '{words[0]}'", fix="is it installed in this environment and on PATH?"
            )
        return cls("launcher", program, tuple(words[1:]), where)

    @property
    def label(self) -> str:
        """A short name: the script's file name, the module, or ``torchrun train.py`` (``torchrun package.train``)."""
        if self.kind == "script":
            return Path(self.target).name
        if self.single and self.kind == "module":
            return self.target
        module = next((b for a, b in pairwise(self.args) if a in ("-m", "--module")), "")
        script = next((Path(a).name for a in self.args if a.endswith(".py")), module)
        return f"{Path(self.target).name} {script}".strip()

    @property
    def folder(self) -> Path:
        """The folder of the script's file; the working directory where the command names none."""
        return (self.cwd / self.target).parent if self.kind == "script" else self.cwd

    @property
    def single(self) -> bool:
        """True when one Python process is started (it may still start others itself), which can leave a zygote behind.

        That is a script, a module, or a console script (a file that Python runs, such as ``litgpt``); not ``torchrun``
        and its like, whose children run the script.
        """
        if self.kind == "script":
            return True
        if self.kind == "module":
            return self.target not in _STARTERS
        return Path(self.target).name not in _STARTERS and _is_python_file(Path(self.target))

    @property
    def processes(self) -> int:
        """How many processes a launcher starts on this machine, each of which takes a GPU; 0 where it takes all."""
        if self.single:
            return 1
        for index, word in enumerate(self.args):
            if word.endswith(".py"):
                break
            flag, _, value = word.partition("=")
            if flag.lstrip("-").replace("_", "-") in _PROCESS_FLAGS and word.startswith("-"):
                value = value or next(iter(self.args[index + 1 : index + 2]), "")
                return int(value) if value.isdecimal() else 0
        return int(Path(self.target).name in _ONE_PROCESS)

    def under(self, variant: Variant) -> ScriptCommand:
        """Return the command with a variant's arguments behind its own."""
        return replace(self, args=(*self.args, *variant.args))

    def argv(self) -> list[str]:
        """Return the command line to start, without AutoPrec's own environment."""
        if self.kind == "script":
            return [sys.executable, self.target, *self.args]
        if self.kind == "module":
            return [sys.executable, "-m", self.target, *self.args]
        return [self.target, *self.args]


def _is_python_file(path: Path) -> bool:
    """Say whether the first lines hand the file to Python (pip writes ``#!/bin/sh`` first where the path is long)."""
    try:
        with path.open("rb") as stream:
            head = stream.read(512).splitlines()[:2]
    except OSError:
        return False
    if not head or not head[0].startswith(b"#!"):
        return False
    return b"python" in head[0] or (head[1:] != [] and head[1].startswith(b"'''exec'") and b"python" in head[1])


def _find_program(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    if beside.is_file():
        return str(beside)
    return shutil.which(name)


def _must_exist(name: str, cwd: Path) -> None:
    path = cwd / name
    if path.is_file():
        return
    if path.is_dir():
        main = path / "__main__.py"
        fix = f"name the file, e.g. {name.rstrip('/')}/train.py" if not main.exists() else f"name {main}"
        raise UsageError("this is a directory, not a script", where=name, fix=fix)
    folder = path.parent if path.parent.is_dir() else cwd
    known = [p.name for p in folder.glob("*.py")]
    close = nearest(path.name, known)
    shown = str(Path(name).parent / close[0]) if close else ""
    fix = f"did you mean '{shown}'?" if close else f"no Python file of that name in {folder}"
    raise UsageError("no such script", where=name, fix=fix)
