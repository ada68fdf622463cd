"""What a search was asked to do, and the signature that a resumed search must match.

:class:`SearchOptions` is the table of options, too: what each field says about itself (:class:`Option`) makes the
options of ``autoprec search``, their headings and help, docs/cli.md, the keywords of ``help(autoprec.search)``, and the
command line that resumes a search. A new option is one field here, and one typed keyword of :func:`autoprec.search`.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from autoprec._version import __version__
from autoprec.errors import StudyError, UnknownNameError, UsageError
from autoprec.support.amounts import LEAST_BYTES
from autoprec.support.files import canonical_json
from autoprec.support.plain import Document
from autoprec.support.redact import redact_arguments, redact_uri
from autoprec.trial.command import Variant
from autoprec.trial.losses import HIGHER, LOWER, MISMATCH
from autoprec.trial.protocol import STEPS

#: The folder of all studies, in the working directory.
RUNS = "autoprec-runs"
#: Which values of a metric may be better, and how far it may change where nothing is said of that.
BETTER, MAX_CHANGE = (LOWER, HIGHER), 0.005
#: Words in the name of a metric of which more is better, as far as they are known.
_SCORES = re.compile(r"(?<![a-z])(accuracy|acc|f1|(roc_?)?auc|auroc|bleu|rouge|reward|score)(?![a-z]{2})")
#: Fewer timed steps than these have no median and no second half.
FEWEST_STEPS = 4


@dataclass(frozen=True, slots=True)
class Option:
    """What a field of :class:`SearchOptions` says about itself.

    Attributes:
        help: one sentence, for ``--help`` and ``help(autoprec.search)`` alike.
        group: the heading that it stands under.
        flag: how the command line spells it, where that is not the field's name with dashes.
        short: a second, short spelling.
        parse: the function of :mod:`autoprec.support.amounts` that reads it from a command line.
        python: what a call from Python gives instead, where that is in another unit.
        least: the smallest number that it may be.
        choices: the words that it may be.
        also: further words that are taken, and what each stands for.
        envvar: the environment variable that it is taken from where it is not given.
        hidden: not shown by ``--help``: for plans of a whole run, and for the command lines that AutoPrec prints.
        name: the field.
        default: its default.
    """

    help: str
    group: str
    metavar: str = ""
    flag: str = ""
    short: str = ""
    parse: str = ""
    python: str = ""
    least: int | None = None
    choices: tuple[str, ...] = ()
    also: Mapping[str, str] = field(default_factory=dict)
    envvar: str = ""
    hidden: bool = False
    name: str = ""
    default: Any = None

    @property
    def is_flag(self) -> bool:
        """Whether it is given without a value."""
        return isinstance(self.default, bool)


def option(default: Any, help: str, group: str, **about: Any) -> Any:
    """Return a dataclass field with a default that describes itself as an option.

    Args:
        default: the field's default.
        help: one sentence.
        group: the heading that it stands under.
        about: further fields of :class:`Option`.
    """
    return field(default=default, metadata={"option": Option(help, group, **about)})


WHAT, HOW_LONG, ACCEPTABLE = "What to search", "How long", "What is acceptable"
KEPT, TRIALS, PRINTED, RARE = "Where it is kept", "How trials are run and proposed", "What is printed", "Rarely needed"


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options of ``autoprec search``, parsed; times in seconds, memory in bytes, divergence as a fraction."""

    command: tuple[str, ...]
    target: str = option(
        "auto", "auto (the device the script trains on, timed), or a GPU to rehearse for.", WHAT, metavar="NAME"
    )
    cost_scale: str = option(
        "", "Rehearsal: evaluate the cost model at scaled shapes.", WHAT, metavar="width=16,depth=4,tokens=32"
    )
    space: str = option("", "Search space; default: the target's.", WHAT, metavar="NAME|FILE")
    reference: str = option(
        "script", "What divergence and speed are compared with.", WHAT, choices=("script", "fp32", "bf16")
    )
    backend: str = option("auto", "Backend that runs the GEMMs.", WHAT, metavar="NAME")
    variant: tuple[str, ...] = option(
        (),
        "Arguments that run the same step in another way, tried as the study's parameter variant. May be repeated.",
        WHAT,
        metavar="'NAME: ARGS'",
        python="a list of texts: ['mb16: --micro-batch 16 --accum 2']",
    )
    trials: int = option(30, "Trials at most, presets included.", HOW_LONG, metavar="N", least=1)
    budget_s: float | None = option(
        None,
        "Time of this session: 20m, 90s; an answer may take a fifth more.",
        HOW_LONG,
        metavar="TIME",
        flag="--budget",
        parse="parse_duration",
        python="seconds: 1200 for 20 minutes",
    )
    steps: int = option(STEPS, "Measured steps per trial.", HOW_LONG, metavar="N", least=FEWEST_STEPS)
    warmup: int = option(3, "Steps before measuring.", HOW_LONG, metavar="N", least=1)
    force: bool = option(False, "In a rehearsal: search even where the cost model says 'stay'.", HOW_LONG)
    max_divergence: float = option(
        0.0025,
        "Largest acceptable mean relative loss gap.",
        ACCEPTABLE,
        metavar="SHARE",
        parse="parse_share",
        python="a fraction: 0.0025 for 0.25 %",
    )
    metric: str = option(
        "",
        "Compare by this metric, which the script reports or logs, not by its loss.",
        ACCEPTABLE,
        metavar="NAME",
    )
    max_change: float | None = option(
        None,
        "Largest acceptable relative change of --metric; default: 0.5%.",
        ACCEPTABLE,
        metavar="SHARE",
        parse="parse_share",
        python="a fraction: 0.005 for 0.5 %",
    )
    better: str | None = option(
        None,
        "Which values of --metric are better; default: lower.",
        ACCEPTABLE,
        choices=BETTER,
    )
    max_gradient_error: float = option(
        0.12, "Largest gradient error, in units of the mini-batch gradient noise.", ACCEPTABLE, metavar="X"
    )
    max_memory: int | Literal["auto"] | None = option(
        None,
        "Largest peak memory, e.g. 60GiB; auto: what fits on the device, with a margin.",
        ACCEPTABLE,
        metavar="BYTES|auto",
        parse="parse_limit",
        python="bytes: 60 * 2**30 for 60 GiB; or 'auto'",
        least=LEAST_BYTES,
    )
    objective: str = option(
        "throughput",
        "What to optimise among acceptable policies.",
        ACCEPTABLE,
        choices=("throughput", "memory", "balanced"),
    )
    output: str = option("policy.yaml", "Where the policy goes.", KEPT, metavar="FILE", short="-o")
    study: str = option("", "Name of the study; default: from the script.", KEPT, metavar="NAME")
    storage: str = option("", "Optuna RDB; default: SQLite.", KEPT, metavar="URL", envvar="OPTUNA_STORAGE")
    resume: bool = option(False, "Continue a study, or begin it; finished trials are not repeated.", KEPT)
    track: bool = option(True, "Track nothing.", KEPT, flag="--no-mlflow")
    workers: int = option(0, "Parallel trials; default: by target, on one GPU 1.", TRIALS, metavar="N", least=0)
    engine: str = option("local", "Where trials run.", TRIALS, choices=("local", "ray"))
    sampler: str = option(
        "knapsack",
        "What proposes trials; all but knapsack are for comparison.",
        TRIALS,
        choices=("knapsack", "tpe", "random"),
        also={"ours": "knapsack"},
    )
    seed: int = option(0, "The first paired seed, and the seed of the sampler.", TRIALS, metavar="N")
    seeds: int = option(
        2,
        "Paired seeds of a policy where the loss cannot judge; else 2 to 24, as the decision needs.",
        RARE,
        metavar="N",
        least=1,
        hidden=True,
    )

    def __post_init__(self) -> None:
        for name, about in OPTIONS.items():
            value = getattr(self, name)
            if about.also and value in about.also:
                value = about.also[value]
                object.__setattr__(self, name, value)
            if about.choices and value not in about.choices and value is not None:
                raise UnknownNameError(name, str(value), about.choices)
            if about.least is not None and isinstance(value, int) and value < about.least:
                raise UsageError(f"{about.flag} {value} is too small", fix=f"use {about.least} or more")
        if not 0 < self.max_divergence < 1:
            raise UsageError("--max-divergence must lie between 0 and 100 %", fix="e.g. --max-divergence 0.25%")
        self._check_metric()

    def _check_metric(self) -> None:
        """Refuse what cannot be meant of a metric; beside the mismatch of training and rollout the loss has its limit.

        Raises:
            UsageError: what belongs to one without it, a limit of the loss with it, or one whose name says that more of
                it is better where nothing is said of that.
        """
        if not self.metric:
            for flag, given in (("--max-change", self.max_change), ("--better", self.better)):
                if given is not None:
                    raise UsageError(f"{flag} is of a metric, and none is named", fix="e.g. --metric eval_loss")
            return
        if self.max_divergence != OPTIONS["max_divergence"].default and self.metric not in MISMATCH:
            raise UsageError(
                "--max-divergence limits the loss, and --metric takes its place", fix="e.g. --max-change 0.5%"
            )
        if self.max_change is not None and not 0 < self.max_change < 1:
            raise UsageError("--max-change must lie between 0 and 100 %", fix="e.g. --max-change 0.5%")
        if self.better is None and _is_score(self.metric):
            raise UsageError(
                f"more of {self.metric} may be better, and --better does not say so",
                fix="--better higher (or lower)",
                code="better",
            )

    def signature(
        self,
        space_text: str,
        fingerprint: str,
        sources: Mapping[str, str] | None = None,
    ) -> Document:
        """Return everything that would change the answer: a resumed search must agree on all of it.

        Args:
            sources: file -> digest (:func:`autoprec.trial.source.source_digests`).
        """
        kept = {"target", "steps", "warmup", "reference", "seed", "cost_scale", "max_divergence", "backend"}
        kept |= {"metric", "max_change", "better"}
        out: Document = {key: value for key, value in asdict(self).items() if key in kept}
        out["script"] = self.script_text()
        out["space"] = hashlib.sha256(space_text.encode()).hexdigest()[:16]
        out["model"] = fingerprint
        out["versions"] = versions()
        if sources:
            out["sources"] = dict(sources)
        return out

    def script_text(self) -> str:
        """Return the script and its arguments as a study stores them: a new password does not make another script."""
        return shlex.join(redact_arguments(self.command))

    def resume_command(self, *, stored: bool = False) -> str:
        """Return the command line that continues this search; to be ``stored``, with the script's secrets hidden."""
        words = ["autoprec", "search", "--resume"]
        for name, about in OPTIONS.items():
            value = getattr(self, name)
            if name in ("resume", "study") or value == about.default:
                continue
            if name == "storage":
                value = redact_uri(re.sub(r"(://[^:/@]*):[^@]*@", r"\1:PASSWORD@", value), hidden="PASSWORD")
            if isinstance(value, tuple):
                words += [
                    word for text in value for word in (about.flag, Variant.parse(text).label if stored else text)
                ]
                continue
            words.append(about.flag)
            if not isinstance(value, bool):
                words.append(f"{value:g}s" if about.parse == "parse_duration" else str(value))
        words += ["--study", self.study]
        script = redact_arguments(self.command) if stored else list(self.command)
        return shlex.join(words) + " " + shlex.join(script)

    def with_budget_for(self, needed_s: float) -> SearchOptions:
        """Return these options with a time budget that is enough for a search of about ``needed_s`` seconds.

        A resumed search starts the script again. The budget was too short and becomes longer; without one nothing
        changes.
        """
        if self.budget_s is None:
            return self
        return replace(self, budget_s=60.0 * math.ceil(1.5 * max(self.budget_s, needed_s) / 60))

    def study_dir(self) -> Path:
        """Return the folder of the study's files."""
        return Path(RUNS) / self.study

    @property
    def tolerance(self) -> float:
        """The largest acceptable gap to the reference, a fraction: of the metric asked for, else of the loss."""
        if not self.metric:
            return self.max_divergence
        return MAX_CHANGE if self.max_change is None else self.max_change

    @property
    def compared(self) -> Document:
        """What runs are compared by and how far it may change, for results and evidence."""
        if not self.metric:
            return {"max_divergence": self.max_divergence}
        beside = {"max_divergence": self.max_divergence} if self.metric in MISMATCH else {}
        return {"metric": self.metric, "better": self.better or LOWER, "max_change": self.tolerance} | beside

    @property
    def memory_limit(self) -> int | None:
        """Bytes; None where there is no limit, or the device is not known yet (``Setup.of`` finds it)."""
        return self.max_memory if isinstance(self.max_memory, int) else None


#: The table of options: field -> what it says about itself, in the order of ``--help``.
OPTIONS: dict[str, Option] = {
    one.name: replace(about, name=one.name, default=one.default, flag=about.flag or f"--{one.name.replace('_', '-')}")
    for one in fields(SearchOptions)
    if (about := one.metadata.get("option")) is not None
}


def _is_score(name: str) -> bool:
    """Say whether the name of a metric sounds as if more of it were better."""
    return _SCORES.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) is not None


def versions() -> dict[str, str]:
    """Return the versions that every measurement of a study is bound to."""
    return {"autoprec": __version__, "torch": metadata.version("torch")}


def check_signature(stored: Document, asked: Document, *, where: str) -> None:
    """Refuse to continue a study under a changed setup.

    Args:
        stored: the study's signature, see :meth:`SearchOptions.signature`.
        asked: the signature of this search.
        where: the study, for the message.

    Raises:
        StudyError: naming every field that differs.
    """
    if canonical_json(stored) == canonical_json(asked):
        return
    was, now = stored.get("sources", {}), asked.get("sources", {})
    edited = [name for name in sorted({*was, *now}) if was.get(name) != now.get(name)]
    if edited and {**stored, "sources": now} == asked:
        raise StudyError(
            f"what the study was measured with has been edited since: {', '.join(edited[:8])}",
            where=where,
            fix="take the edit back, or start a new study with --study NAME: the old reference does not hold any more",
        )
    changed = [
        f"{key}: was {stored.get(key)!r}, is {asked.get(key)!r}"
        for key in sorted({*stored, *asked} - {"sources"})
        if stored.get(key) != asked.get(key)
    ]
    raise StudyError(
        f"this study was started with another setup ({'; '.join(changed)})",
        where=where,
        fix="repeat the original options, under the versions of then, or start a new study with --study NAME",
    )


def fewer_steps(seen: int, warmup: int) -> str:
    """Return what a person can do whose script ended after ``seen`` steps."""
    if seen - warmup >= FEWEST_STEPS:
        return f"make it train longer, or ask for less: --steps {seen - warmup}"
    if seen > FEWEST_STEPS:
        return f"make it train longer, or ask for less: --steps {FEWEST_STEPS} --warmup {seen - FEWEST_STEPS}"
    return f"make it train for at least {FEWEST_STEPS + 1} steps: one to warm up, {FEWEST_STEPS} to measure"
