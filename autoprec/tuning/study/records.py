"""What a search leaves behind beside its runs (:mod:`autoprec.tuning.study.run`): one result per study, plain data.

The report, the tracker and ``--json`` read nothing else.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from autoprec.support.plain import rebuild
from autoprec.support.redact import redact_text


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The outcome of a search: exactly what ``autoprec search --json`` prints, plus what the report draws.

    ``verdict`` is ``adopt``, ``stay``, or ``undecided`` where a search was cut short before anything could be said:
    no policy is written then. ``cut_short`` says what was left out, ``resume`` is the command that goes on; both are
    empty where nothing was left out; ``stopped`` says why no further trial was run ("converged after 9 of 30 trials:
    ..."), and is in ``trials`` of the JSON document, too.
    ``best``, ``reference`` and the members of ``presets`` and ``front`` are metric
    mappings (presets and front carry ``name`` beside them); ``interval`` in ``best`` is the half width of the
    divergence's confidence interval over the finalist seeds. ``explanation`` is that of
    :func:`autoprec.tuning.decide.reasons.explanation`, or of ``stay_explanation`` where no trial was needed.
    ``study_name`` is ``study`` in JSON, ``baseline`` the name of the 16-bit run that gains are told against.
    ``reasons`` are those of ``reason`` as codes with data (:mod:`autoprec.tuning.decide.sentences`).
    ``rejected`` says, by name, why a finalist is not acceptable, ``not_taken`` why another that was measured to be
    faster is not the answer: too few paired seeds, or faster by no more than the timing noise.
    """

    verdict: str
    reason: str
    policy: str
    best: dict[str, Any]
    reference: dict[str, Any]
    presets: tuple[dict[str, Any], ...]
    front: tuple[dict[str, Any], ...]
    trials: dict[str, int]
    study_name: str
    storage: str
    mlflow: dict[str, Any]
    seconds: float
    target: str = ""
    script: str = ""
    budget: dict[str, Any] = field(default_factory=dict)
    sensitivity: tuple[dict[str, Any], ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    explanation: dict[str, Any] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    not_taken: dict[str, str] = field(default_factory=dict)
    reasons: tuple[dict[str, Any], ...] = ()
    baseline: str = ""
    cut_short: str = ""
    resume: str = ""
    stopped: str = ""

    def __post_init__(self) -> None:
        """Hide secrets in what is said: notes may quote the script's own output."""
        for name in ("reason", "cut_short", "script", "resume"):
            object.__setattr__(self, name, redact_text(getattr(self, name)))
        object.__setattr__(self, "notes", tuple(map(redact_text, self.notes)))

    def to_json(self) -> dict[str, Any]:
        out = {"study" if key == "study_name" else key: value for key, value in asdict(self).items()}
        return out | {"trials": {**self.trials, "stopped": self.stopped}}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        named = {"study_name" if key == "study" else key: value for key, value in document.items()}
        named["trials"] = {name: count for name, count in named["trials"].items() if name != "stopped"}
        return rebuild(cls, named)
