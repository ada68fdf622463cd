"""One study written into MLflow: a parent run, one child run per trial; writing twice changes nothing.

Every run carries ``autoprec.record``, its identity, by which it is found, and ``autoprec.logged``, a digest of what was
written into it, set last: a run with the digest of what would be written is left alone, and one that was cut short is
written again. Metrics carry the time stamps of the trial and of the answer, so they are never there twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from autoprec.policy.document import dump_yaml
from autoprec.support.redact import redact, redact_text
from autoprec.support.text import visible
from autoprec.tracking.notes import limits_of, parent_note, parent_params
from autoprec.tracking.rows import TrialRun, shown_metrics
from autoprec.tracking.view import shared_view, telling_params
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run

_RECORD, _LOGGED = "autoprec.record", "autoprec.logged"
#: What MLflow takes in one call.
_BATCHES = {"metrics": 900, "params": 90, "tags": 90}
#: Charts are narrower than this, and each point is a row of MLflow's database.
_MAX_POINTS = 1000


def safe_key(name: str) -> str:
    """Return a name that MLflow accepts for a parameter, metric or tag (letters, digits, ``_-. :/``; 250 long)."""
    text = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII).strip("/ ") or "_"
    return re.sub(r"/{2,}", "/", text.replace("..", "__"))[:250]


def _sqlite_file(uri: str) -> Path | None:
    parts = urlsplit(uri)
    return Path(unquote(parts.path)[1:]) if parts.scheme.startswith("sqlite") and parts.path else None


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _metrics(figures: Mapping[str, Any], stamp: int) -> list[Metric]:
    numbers = {k: v for k, v in figures.items() if isinstance(v, (int, float)) and v is not True and math.isfinite(v)}
    return [Metric(safe_key(name), float(value), stamp, 0) for name, value in numbers.items()]


def _curves(record: Run, stamp: int) -> list[Metric]:
    """Return the losses per step (thinned to 1000 points), the reference's, and the gap between them.

    Of the metric that runs are compared by, where there is one, also the values, by how many came before.
    """
    stride = max(1, math.ceil(max(len(record.losses), len(record.reference_losses)) / _MAX_POINTS))
    pairs = zip(record.losses, record.reference_losses, strict=False)
    gaps = tuple(round(100.0 * (own / other - 1.0), 4) if other else math.nan for own, other in pairs)
    return [
        Metric(name, float(value), stamp, step)
        for name, values in (
            ("loss", record.losses),
            ("reference_loss", record.reference_losses),
            ("loss_gap_pct", gaps),
            (safe_key(f"metric/{record.metric}"), record.values),
            (safe_key(f"reference_metric/{record.metric}"), record.reference_values),
        )
        for step, value in enumerate(values)
        if step % stride == 0 and math.isfinite(value)
    ]


class Store:
    """A connection to one MLflow store for one study."""

    def __init__(self, uri: str, experiment: str, uid: str, study: str) -> None:
        file = _sqlite_file(uri)
        artifacts: str | None = None
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            artifacts = (file.resolve().parent / "mlartifacts").as_uri()
        self.uid, self.study, self.run_id = uid, study, ""
        self.client = MlflowClient(tracking_uri=uri)
        self.experiment_id = self._experiment(experiment, artifacts)
        self._known: dict[str, Any] = {}  # identity -> run
        self._params: list[dict[str, str]] = []  # of the rows of the table

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is not None and found.lifecycle_stage == "deleted":
            self.client.restore_experiment(found.experiment_id)
        if found is not None:
            return str(found.experiment_id)
        location = f"{artifacts}/{re.sub(r'[^A-Za-z0-9._-]', '_', name)}" if artifacts else None
        return str(self.client.create_experiment(name, artifact_location=location))

    def open_parent(self, info: Mapping[str, Any], started: float, *, running: bool) -> None:
        """Find or create the study's own run, and log what the study was asked to do.

        Args:
            info: what the study was asked to do; secrets are taken out.
            started: epoch seconds.
            running: whether the search goes on: the run is marked so.
        """
        self.info = info
        own = f"{self.uid}/study"
        found = self.client.search_runs(
            [self.experiment_id], filter_string=f"tags.`{_RECORD}` = '{own}'", max_results=1
        )
        if found:
            self.parent = found[0]
        else:
            tags = {_RECORD: own, "autoprec.role": "study", "autoprec.study": self.study}
            # where MLflow's own column Source looks
            known = {"mlflow.source.name": info.get("script"), "mlflow.source.git.commit": info.get("git_commit")}
            tags |= {key: str(value) for key, value in known.items() if value and isinstance(value, str)}
            self.parent = self.client.create_run(
                self.experiment_id, start_time=int(started * 1000), tags=tags, run_name=self.study
            )
            self._share_view()
        self.run_id = self.parent.info.run_id
        if running and self.parent.info.status != "RUNNING":
            self.client.update_run(self.run_id, status="RUNNING")
        self._known = {run.data.tags.get(_RECORD, ""): run for run in self._trials()} if found else {}
        settings = parent_params(redact(dict(info)))
        # a resumed study may be given more trials, and MLflow never lets a parameter change
        tags = {"autoprec.trials": settings.pop("trials")} if "trials" in settings else {}
        if tags.items() - self.parent.data.tags.items() or settings.keys() - self.parent.data.params.keys():
            self._log(self.run_id, params=settings, tags=tags)

    def _share_view(self, params: Sequence[str] = ()) -> None:
        """Store the view that ``autoprec ui`` opens; a server that refuses it shows its default table."""
        with contextlib.suppress(MlflowException):
            self.client.set_experiment_tag(self.experiment_id, *shared_view(self.uid, self.study, params))
            self.client.set_experiment_tag(self.experiment_id, "mlflow.experimentKind", "custom_model_development")

    def _trials(self) -> Iterator[Any]:
        """Yield the runs of the study's trials that are there already."""
        mine, token = f"tags.`mlflow.parentRunId` = '{self.run_id}'", None
        while True:
            page = self.client.search_runs([self.experiment_id], mine, max_results=1000, page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def write_trial(self, record: Run, run: TrialRun, found_at: float) -> bool:
        """Write one trial as a child run, or bring it up to date; return whether there was anything to write.

        ``found_at`` (epoch seconds) stamps the figures that an answer gave it: of two values with one stamp MLflow
        shows the larger.

        Args:
            record: the run of the study.
            run: what MLflow is to show of it.
            found_at: epoch seconds, see above.
        """
        if run.tags["autoprec.row"] == "policy":
            self._params.append({safe_key(key): value for key, value in run.params.items()})
        identity = f"{self.uid}/{record.kind}/{record.number}/{record.seed}"
        known, digest = self._known.get(identity), _digest(run, record)
        if known is not None and known.data.tags.get(_LOGGED) == digest:
            return False
        started = int(record.started * 1000)
        if known is None:
            tags = {"mlflow.parentRunId": self.run_id, _RECORD: identity}
            known = self.client.create_run(
                self.experiment_id, start_time=started, tags=tags, run_name=visible(run.name)
            )
        elif known.info.run_name != visible(run.name):  # the answer is marked in its name, once it is known
            self.client.update_run(known.info.run_id, name=visible(run.name))
        run_id = known.info.run_id
        metrics = [*_metrics(run.figures, max(started, int(found_at * 1000))), *_curves(record, started)]
        self._log(run_id, params=run.params, metrics=metrics)
        if record.policy:
            self.client.log_text(run_id, dump_yaml(record.policy), "policy.yaml")
        if record.tail and not record.ok:
            self.client.log_text(run_id, redact_text(record.tail), "output-tail.txt")
        self.client.set_terminated(run_id, status=run.status, end_time=int((record.started + record.seconds) * 1000))
        self._log(run_id, tags=run.tags | {_LOGGED: digest})
        return True

    def write_study(
        self, result: SearchResult | None, records: Sequence[Run], files: Sequence[Path], status: str, at: float
    ) -> bool:
        """Write the outcome on the study's run: winner table, metrics of the best policy, and the files.

        Args:
            result: the answer, None before there is one; ``at`` is when it was found (epoch seconds).
            status: of the run: RUNNING, FINISHED, or KILLED for an interrupted search.

        Returns:
            Whether there was anything to write.
        """
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        digest = _digest(result, stats, status, len(records))
        if self.parent.data.tags.get(_LOGGED) == digest:
            return False
        if result is not None:
            self._write_result(result, int(at * 1000))
        for path in files:
            self.client.log_artifact(self.run_id, str(path))
        policies = [path for path in files if path.suffix in (".yaml", ".json") and path.parent.name == "files"]
        if result is not None and result.verdict == "adopt" and policies:
            self._register(policies[0].name)
        if status != "RUNNING":
            ended = max([at, *(record.started + record.seconds for record in records)])
            self.client.set_terminated(self.run_id, status=status, end_time=int(ended * 1000) or None)
        self._log(self.run_id, tags={_LOGGED: digest})
        return True

    def _write_result(self, result: SearchResult, stamp: int) -> None:
        figures = {**result.best, **shown_metrics(result.best)}
        metrics = _metrics(figures | {f"trials_{k}": v for k, v in result.trials.items()}, stamp)
        tags = {
            "autoprec.verdict": result.verdict,
            "autoprec.reason": redact_text(result.reason)[:4000],
            "autoprec.target": result.target,
            "autoprec.stopped": result.stopped,
            "mlflow.note.content": redact_text(parent_note(result)),
        }
        limits = limits_of(result, self.info)
        self._log(self.run_id, params=limits, metrics=metrics, tags=tags)
        self._share_view(telling_params(self._params))

    def _register(self, name: str) -> None:
        """Register the policy in the model registry, a version per study; a store without one goes without."""
        model = re.sub(r"[/:]", "-", f"autoprec-{self.study}")
        with contextlib.suppress(MlflowException):
            with contextlib.suppress(MlflowException):
                self.client.create_registered_model(model, description="precision policies found by autoprec search")
            known = self.client.search_model_versions(f"name='{model}'")
            if not any(version.run_id == self.run_id for version in known):
                source = f"{self.client.get_run(self.run_id).info.artifact_uri}/{name}"
                self.client.create_model_version(model, source, run_id=self.run_id)

    def _log(
        self,
        run_id: str,
        *,
        params: Mapping[str, str] | None = None,
        metrics: Sequence[Metric] = (),
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Send in batches; a parameter that has another value already (a resumed study) stays as it is."""
        items: dict[str, Sequence[Any]] = {
            "params": [Param(safe_key(k), visible(str(v))[:5900]) for k, v in (params or {}).items()],
            "metrics": metrics,
            "tags": [RunTag(safe_key(k), visible(str(v))) for k, v in (tags or {}).items()],
        }
        for kind, values in items.items():
            for start in range(0, len(values), _BATCHES[kind]):
                part = values[start : start + _BATCHES[kind]]
                try:
                    self.client.log_batch(run_id, **{kind: part})
                except MlflowException as error:
                    if kind != "params" or error.error_code != "INVALID_PARAMETER_VALUE":
                        raise
                    for item in part:
                        with contextlib.suppress(MlflowException):
                            self.client.log_batch(run_id, params=[item])
