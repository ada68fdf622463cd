"""What a search leaves behind beside its runs (:mod:`autoprec.tuning.study.run`): one result per study, plain data.

The report, the tracker, ``--json`` and :func:`autoprec.search` read nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Self

from autoprec.errors import StudyError
from autoprec.support.optional import require
from autoprec.support.plain import Document, rebuild
from autoprec.support.redact import redact_text
from autoprec.support.tables import Shown, Table
from autoprec.support.units import gap_name
from autoprec.tuning.study.rows import Row, headings, note_of, number, over_16bit, percent, row_cells, source_of
from autoprec.tuning.study.run import (
    MEASURED,
    MODELLED,
    error_text,
    headline,
    noise_text,
    over_what,
    reference_name,
)

if TYPE_CHECKING:
    import optuna
    import pandas


@dataclass(frozen=True, slots=True, repr=False)
class SearchResult(Shown):
    """The outcome of a search: exactly what ``autoprec search --json`` prints, and what can be done with it.

    ``print(result)`` and notebooks show the policy beside the script and the presets; ``result.study`` is the
    Optuna study, ``result.to_pandas()`` its trials, ``autoprec.load(result.policy)`` the policy.

    Attributes:
        verdict: ``adopt``, ``stay``, or ``undecided`` where a search was cut short before anything could be said: no
            policy is written then.
        reason: why, in words; ``reasons`` the same as codes with data (:mod:`autoprec.tuning.decide.sentences`).
        policy: path of the policy.
        best, reference, presets, front: metric mappings with ``name``; ``divergence`` is that of the metric which
            ``budget`` names, else of the losses; ``interval`` in ``best`` is the half width of
            the divergence's confidence interval over the paired seeds.
        baseline: name of the 16-bit run that gains are given over; empty on a CPU, and where none was measured.
        trials: counts of trials by how they ended.
        study_name: ``study`` in JSON.
        explanation: ``layers`` of :func:`autoprec.tuning.decide.explain.explanation`, and ``decisions`` of
            :func:`autoprec.tuning.decide.sampler.shares.decision_shares`; empty where no trial was needed.
        rejected: why a policy is not acceptable, by name; ``not_taken`` why another that was measured to be faster is
            not the answer: too few paired seeds, or faster by no more than the timing noise.
        cut_short: what was left out, and ``resume`` the command that goes on; both are empty where nothing was.
        variants: how each variant of the script's arguments went: ``name``, ``arguments``, ``status`` (accepted,
            refused, failed or not tried) and ``reason``; where it was measured ``divergence`` of the script's losses
            under it, and ``speedup`` over the script as given (``low``, ``high`` if timed); ``chosen``: gains
            are over it; ``adopted``: the answer is for it.
        stopped: why no further trial was run ("converged after 9 of 30 trials: ..."); in ``trials`` of the JSON, too.
    """

    verdict: str
    reason: str
    policy: str
    best: Document
    reference: Document
    presets: tuple[Document, ...]
    front: tuple[Document, ...]
    trials: dict[str, int]
    study_name: str
    storage: str
    mlflow: Document
    seconds: float
    target: str = ""
    script: str = ""
    budget: Document = field(default_factory=dict)
    sensitivity: tuple[Document, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    explanation: Document = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    not_taken: dict[str, str] = field(default_factory=dict)
    reasons: tuple[Document, ...] = ()
    baseline: str = ""
    cut_short: str = ""
    resume: str = ""
    stopped: str = ""
    variants: tuple[Document, ...] = ()
    #: The storage with its password, which ``storage`` hides; never printed or written.
    _address: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Hide secrets in what is said: notes may quote the script's own output."""
        for name in ("reason", "cut_short", "script", "resume"):
            object.__setattr__(self, name, redact_text(getattr(self, name)))
        object.__setattr__(self, "notes", tuple(map(redact_text, self.notes)))

    def to_json(self) -> Document:
        """Return the JSON document of ``autoprec search --json``."""
        out = {"study" if key == "study_name" else key: value for key, value in asdict(self).items()}
        del out["_address"]
        return out | {"trials": {**self.trials, "stopped": self.stopped}}

    @classmethod
    def from_json(cls, document: Document) -> Self:
        """Rebuild from :meth:`to_json`."""
        named = {"study_name" if key == "study" else key: value for key, value in document.items()}
        named["trials"] = {name: count for name, count in named["trials"].items() if name != "stopped"}
        return rebuild(cls, named)

    # --- as people read it ------------------------------------------------------------------------------------------
    def rows(self) -> tuple[Row, ...]:
        """Return the comparison: the policy, the reference and the presets, each with its ``role``."""
        label = "the policy" if self.verdict == "adopt" else "fastest candidate"
        # a verdict from the cost model alone has no candidate: its best is the reference itself
        candidate = self.verdict == "adopt" or self.best.get("name") != self.reference.get("name")
        shown = number(self.best.get("step_time_ms")) is not None and candidate
        rows: list[Row] = [{**self.best, "role": "best", "name": label}] if shown else []
        autocast = str(self.budget.get("written", "")).endswith("autocast")
        script = "the script's own autocast" if autocast and self.over == "the script" else f"the {self.written}"
        rows.append({**self.reference, "role": "reference", "name": f"reference: {script}"})
        return (*rows, *({**preset, "role": "preset"} for preset in self.presets))

    @property
    def written(self) -> str:
        """The name of the reference's runs."""
        return reference_name(self._reference)

    @property
    def _reference(self) -> str:
        """What the reference is: ``script``, ``fp32`` or ``bf16``."""
        return next((kind for kind in ("fp32", "bf16") if self.reference.get("name") == reference_name(kind)), "script")

    @property
    def over(self) -> str:
        """What speed-ups are over."""
        return over_what(self._reference)

    @property
    def title(self) -> str:
        """The study and its target."""
        return f"{self.study_name or 'study'} on {self.target or 'this machine'}"

    @property
    def variant(self) -> Document:
        """The row of the variant that gains are over; empty for the script as it was given."""
        return next((row for row in self.variants if row.get("chosen")), {})

    @property
    def noise_floor(self) -> float | None:
        """The divergence that rounding the weights once makes; None where it was not measured."""
        floors = (number(source.get("noise_floor")) for source in (self.best, self.reference, self.budget))
        return next((floor for floor in floors if floor is not None), None)

    @property
    def limit(self) -> float | None:
        """The budget of the divergence."""
        return number(self.budget.get("max_change" if self.metric else "max_divergence"))

    @property
    def metric(self) -> str:
        """The metric that policies were compared by; empty where by their losses."""
        return str(self.budget.get("metric") or "")

    @property
    def gradient_limit(self) -> float | None:
        """The largest acceptable gradient error as a fraction of the gradient; None where it is not known."""
        share, noise = number(self.budget.get("max_gradient_error")), number(self.budget.get("gradient_noise"))
        usual = share * noise if share is not None and noise is not None else None
        return number(self.budget.get("gradient_limit")) or usual

    def facts(self) -> list[str]:
        """Return noise floor, limits and where figures come from, as far as they are known; and what ``~`` means."""
        row = self.variant
        out = [f"under {row['name']}: {row['arguments']}, where no other variant is named"] if row else []
        out += [f"noise floor {percent(self.noise_floor)}"] if self.noise_floor is not None else []
        out += [f"{gap_name(self.metric)} budget {percent(self.limit)}"] if self.limit is not None else []
        if self.gradient_limit is not None:
            predicted = any(row.get("gradient_error_source") == "predicted" for row in self.rows())
            limit = error_text(self.gradient_limit, number(self.budget.get("gradient_noise")))
            out.append(f"gradient error at most {limit}{'; ~ predicted' if predicted else ''}")
        source = self.budget.get("cost") or next((source for row in self.rows() if (source := source_of(row))), "")
        held = {(row.get("sources") or {}).get("memory_bytes", source) for row in self.rows()}
        what = (
            "times measured, memory modelled"
            if source == MEASURED and MODELLED in held
            else f"times and memory {source}"
        )
        out += [what] if source else []
        out += ["modelled as if compiled, which the script is not"] if self.budget.get("as_compiled") else []
        if self.over_16bit:
            out.append(f"over 16-bit is over {self.baseline or self.over}")
        if noise := number(self.timings.get("timing_noise")) if source == MEASURED and self._single else None:
            out.append(f"speeds without an interval were not timed beside {self.over}: within {noise_text(noise)}")
        return out

    @property
    def _single(self) -> bool:
        """Whether a policy's speed is that of its trials, with no interval."""
        others = (row for row in self.rows() if row["role"] != "reference" and number(row.get("speedup")) is not None)
        return any("speedup" not in row.get("intervals", {}) for row in others)

    @property
    def over_16bit(self) -> bool:
        """Whether gains over 16 bit are known: a GPU is the target."""
        return over_16bit(self.rows())

    def comparison(
        self, rows: Iterable[Row] | None = None
    ) -> tuple[tuple[str, ...], list[tuple[Row, tuple[str, ...]]]]:
        """Return the headings of the comparison, and each row (default: each of :meth:`rows`) with its cells."""
        over, written = self.over_16bit, str(self.budget.get("written", ""))
        written = written if self.over == "the script" else ""
        titles = headings(over_16bit=over, over=self.over, written=written, metric=self.metric)
        return titles, [(row, row_cells(row, over_16bit=over)) for row in (self.rows() if rows is None else rows)]

    def table(self) -> Table:
        """Return the policy, the script as written and the presets; below, why some are not taken, and the verdict."""
        titles, rows = self.comparison()
        others = (f"{row.get('name', '?')}: {why}" for row, _ in rows if (why := note_of(row)))
        notes = (*others, "; ".join(self.facts()), f"verdict: {self.verdict}. {self.reason}")
        return Table(titles, tuple(cells for _, cells in rows), self.title, tuple(filter(None, notes)))

    def __repr__(self) -> str:
        gain = f", {headline(self.best, self._reference)}" if "speedup" in self.best else ""
        return f"SearchResult({self.verdict}{gain}, policy={self.policy!r}, study_name={self.study_name!r})"

    # --- its runs ---------------------------------------------------------------------------------------------------
    @property
    def study(self) -> optuna.Study:
        """The study in Optuna, for its plots, its importances and its dashboard.

        Objectives are ``step_time_ms`` and ``divergence``; complete trials have every parameter, and figures, kind and
        status as user attributes. Finalists lie beside them as pruned trials, references, which
        have no parameters, as failed ones.

        Raises:
            StudyError: the database is gone.
        """
        import optuna

        try:
            return optuna.load_study(study_name=self.study_name, storage=self._address or self.storage)
        except Exception as error:  # of SQLAlchemy, of a driver, or Optuna's KeyError
            raise StudyError(
                f"the study '{self.study_name}' cannot be opened: {error}", where=self.storage, fix="was it moved?"
            ) from error

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each run: number, kind, name, status, figures, then every parameter under its own name.

        Raises:
            StudyError: the database is gone.
            MissingDependencyError: pandas is not installed.
        """
        pandas = require("pandas", purpose="result.to_pandas()")
        rows = []
        for trial in self.study.get_trials(deepcopy=False):
            about = {key: value for key, value in trial.user_attrs.items() if key != "record"}
            first = {key: about.pop(key, None) for key in ("kind", "name", "status", "reason", "seed", "tags")}
            number = trial.user_attrs["record"]["number"]
            rows.append({"number": number, **first, **about, **trial.params})
        return pandas.DataFrame(rows).set_index("number") if rows else pandas.DataFrame()
