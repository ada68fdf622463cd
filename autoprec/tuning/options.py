"""What a search was asked to do, and the signature that a resumed search must match."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from autoprec.errors import StudyError, UnknownNameError, UsageError
from autoprec.policy import Policy, boundaries
from autoprec.policy.phases import speedup_of_run, with_presets
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.files import canonical_json
from autoprec.support.redact import HIDDEN, redact_arguments, redact_uri
from autoprec.trial.protocol import STEPS

#: Fewer timed steps than these have no median and no second half.
FEWEST_STEPS = 4
#: What the options that are one of a few words may be.
CHOICES = {
    "objective": ("throughput", "memory", "balanced"),
    "reference": ("script", "fp32", "bf16"),
    "engine": ("local", "ray"),
    "sampler": ("ours", "tpe", "nsga2", "random", "gp", "ilp", "greedy"),
}


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options of ``autoprec search``, parsed; times in seconds, memory in bytes, divergence as a fraction."""

    command: tuple[str, ...]
    target: str = "auto"
    space: str = ""
    trials: int = 30
    budget_s: float | None = None
    steps: int = STEPS
    warmup: int = 3
    max_divergence: float = 0.0025
    max_gradient_error: float = 0.12
    max_memory: int | None = None
    objective: str = "throughput"
    reference: str = "script"
    seed: int = 0
    output: str = "policy.yaml"
    study: str = ""
    storage: str = ""
    resume: bool = False
    workers: int = 0
    engine: str = "local"
    ray_address: str = ""
    gpus_per_trial: int = 1
    sampler: str = "ours"
    cost_scale: str = ""
    calibration: str = ""
    force: bool = False
    seeds: int = 4
    run_steps: int = 0
    phases: str = ""
    at_step: int = 0
    at: str = ""
    backend: str = "auto"
    runs_dir: str = "autoprec-runs"
    track: bool = True

    def __post_init__(self) -> None:
        for name, valid in CHOICES.items():
            if getattr(self, name) not in valid:
                raise UnknownNameError(name, str(getattr(self, name)), valid)
        for name, least in (
            ("trials", 1),
            ("steps", FEWEST_STEPS),
            ("warmup", 1),
            ("seeds", 1),
            ("gpus_per_trial", 1),
        ):
            if getattr(self, name) < least:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} {getattr(self, name)} is too small", fix=f"use {least} or more")
        if not 0 < self.max_divergence < 1:
            raise UsageError("--max-divergence must lie between 0 and 100 %", fix="e.g. --max-divergence 0.25%")
        self._check_phases()
        self._check_ages()
        if self.workers < 0:
            raise UsageError("--workers must not be negative", fix="leave it out to let AutoPrec choose")

    def _check_phases(self) -> None:
        if self.run_steps < 0 or (self.phases and not self.run_steps):
            raise UsageError(
                f"--phases {self.phases} needs the steps of the whole run, to know what share of it they take",
                fix="add --run-steps N",
            )
        if self.phases:
            boundaries(with_presets(Policy(), self.phase_names), self.run_steps)

    def _check_ages(self) -> None:
        if self.at_step < 0 or any(not age.isdecimal() for age in self._at):
            raise UsageError(
                "--at-step and --at are optimizer steps of the script", fix="e.g. --at-step 1000, or --at 0,1000,5000"
            )
        if self.engine == "ray" and any(self.ages):
            raise UsageError("--engine ray starts every trial at the script's first step", fix="use --engine local")

    @property
    def _at(self) -> list[str]:
        return [part.strip() for part in self.at.split(",") if part.strip()]

    @property
    def ages(self) -> tuple[int, ...]:
        """The steps of the script at which gradient errors are measured; trials start at the first."""
        asked = [int(age) for age in self._at]
        return tuple(dict.fromkeys([self.at_step, *asked] if self.at_step or not asked else asked))

    @property
    def phase_names(self) -> tuple[str, ...]:
        """The presets of ``--phases``."""
        return tuple(name.strip() for name in self.phases.split(",") if name.strip())

    @property
    def run_limit(self) -> float:
        """The gradient error that a policy may have where it runs below 16 bits, in units of the mini-batch noise.

        Squared errors are averaged over the steps of the run that ``run_steps`` names: a policy whose run ends in bf16
        (``phases``, or the search's own choice of ``last-bf16``) may have a little more of it before.
        """
        if not self.run_steps:
            return self.max_gradient_error
        fp8 = Policy(recipes={"fp8": BUILTIN_RECIPES["fp8_rowwise"]}, default="fp8")
        phased = with_presets(fp8, self.phase_names or ("last-bf16",))
        return self.max_gradient_error / math.sqrt(speedup_of_run(phased, self.run_steps, 1.0, 1.0)[1])

    def signature(
        self,
        space_text: str,
        fingerprint: str,
        calibration: Mapping[str, Any] | None = None,
        sources: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return everything that would change the answer: a resumed search must agree on all of it.

        Args:
            calibration: rates laid over the target's.
            sources: file -> digest (:func:`autoprec.trial.source.source_digests`).
        """
        kept = {"target", "steps", "warmup", "reference", "seed", "cost_scale", "max_divergence", "backend"}
        out: dict[str, Any] = {key: value for key, value in asdict(self).items() if key in kept}
        out["script"] = shlex.join(redact_arguments(self.command))  # a new password does not make another script
        if self.ages != (0,):  # studies without it stay as they were
            out["at"] = list(self.ages)
        out["space"] = hashlib.sha256(space_text.encode()).hexdigest()[:16]
        out["model"] = fingerprint
        if calibration is not None:  # by what it says: the file may move, and studies without one stay as they were
            digest = hashlib.sha256(canonical_json(dict(calibration)).encode()).hexdigest()[:16]
            out["calibration"] = f"{calibration['device']} ({calibration['date']}), sha256 {digest}"
        if sources:
            out["sources"] = dict(sources)
        return out

    def resume_command(self, *, stored: bool = False) -> str:
        """Return the command line that continues this search; to be ``stored``, with the script's secrets hidden."""
        words = ["autoprec", "search", "--resume"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("command", "resume", "study") or value == field.default:
                continue
            flag = {"budget_s": "--budget"}.get(field.name, f"--{field.name.replace('_', '-')}")
            if field.name == "storage":
                value = redact_uri(re.sub(r"(://[^:/@]*):[^@]*@", r"\1:PASSWORD@", value), hidden="PASSWORD")
            if field.name == "track":
                words.append("--no-mlflow")
            elif value is True:
                words.append(flag)
            elif value is not None and value is not False:
                words += [flag, f"{value:g}s" if field.name == "budget_s" else str(value)]
        words += ["--study", self.study]
        script = redact_arguments(self.command) if stored else list(self.command)
        return shlex.join(words) + " " + shlex.join(script)

    def with_budget_for(self, needed_s: float) -> SearchOptions:
        """Return these options with a time budget that is enough for a search of about ``needed_s`` seconds.

        A resumed search starts the script again. The budget is never shortened; without one nothing changes.
        """
        if self.budget_s is None:
            return self
        return replace(self, budget_s=max(self.budget_s, 60.0 * math.ceil(1.5 * needed_s / 60)))

    def study_dir(self) -> Path:
        return Path(self.runs_dir) / self.study


def check_signature(stored: dict[str, Any], asked: dict[str, Any], *, where: str) -> None:
    """Refuse to continue a study under a changed setup.

    Raises:
        StudyError: naming every field that differs.
    """
    if "sources" not in stored:  # of a version that did not look at them
        asked = {key: value for key, value in asked.items() if key != "sources"}
    if _same_command(str(stored.get("script")), str(asked.get("script"))):
        asked = {**asked, "script": stored["script"]}
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
        fix="repeat the original options, or start a new study with --study NAME",
    )


def _same_command(stored: str, asked: str) -> bool:
    """Compare two command lines; what either hides is the same: an earlier version knew other names of secrets."""
    try:
        pairs = list(zip(shlex.split(stored), shlex.split(asked), strict=True))
    except ValueError:
        return False
    return all(was == now or HIDDEN in was or HIDDEN in now for was, now in pairs)


def fewer_steps(seen: int, warmup: int) -> str:
    """Return what a person can do whose script ended after ``seen`` steps."""
    if seen - warmup >= FEWEST_STEPS:
        return f"make it train longer, or ask for less: --steps {seen - warmup}"
    if seen > FEWEST_STEPS:
        return f"make it train longer, or ask for less: --steps {FEWEST_STEPS} --warmup {seen - FEWEST_STEPS}"
    return f"make it train for at least {FEWEST_STEPS + 1} steps: one to warm up, {FEWEST_STEPS} to measure"


def parse_duration(text: str) -> float:
    """Parse ``90s``, ``20m`` or ``1.5h`` into seconds. A number alone is refused: 2 could be meant in any unit.

    Raises:
        UsageError: anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not found or float(found[1]) <= 0:
        raise UsageError(f"'{text}' is not a duration", fix="write seconds, minutes or hours: 90s, 20m, 1.5h")
    if not found[2]:
        number = found[1]
        raise UsageError(f"'{text}' is a duration without a unit", fix=f"write {number}s, {number}m or {number}h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def parse_share(text: str) -> float:
    """Parse ``0.25%`` or ``0.0025`` into a fraction.

    Raises:
        UsageError: anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(%?)\s*", text)
    if not found:
        raise UsageError(f"'{text}' is not a share", fix="write a percentage or a fraction: 0.25% or 0.0025")
    return float(found[1]) / (100 if found[2] else 1)


def parse_bytes(text: str) -> int:
    """Parse ``60GiB``, ``60GB`` or a number of bytes.

    Raises:
        UsageError: anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", text.lower())
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):
        units |= {letter: 1000**power, f"{letter}b": 1000**power, f"{letter}i": 1024**power, f"{letter}ib": 1024**power}
    if not found or found[2] not in units:
        raise UsageError(f"'{text}' is not an amount of memory", fix="e.g. 60GiB or 512MiB")
    return int(float(found[1]) * units[found[2]])
