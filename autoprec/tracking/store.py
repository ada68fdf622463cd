"""One study written into MLflow: a parent run, one child run per trial; writing twice changes nothing.

Every run carries ``autoprec.record``, its identity; a run is looked up by it before it is created, and metrics carry
the time stamps of the trial, so that a replay writes rows that are already there.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from autoprec.policy.document import dump_yaml
from autoprec.support.redact import redact, redact_text
from autoprec.support.text import visible
from autoprec.tracking.notes import parent_note, parent_params, reference_figures, shown_metrics, trial_name
from autoprec.tracking.view import shared_view, telling_params
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import BY_BLOCK, Run, metrics_of, pooled

#: Tags of a trial that a person filters by: ``tags.pareto = 'true'``.
TRIAL_TAGS = ("preset", "finalist", "pareto", "best", "infeasible", "pruned", BY_BLOCK)
_BATCH = 900
#: Before the figures of a policy's first run where its row has those of all its paired runs.
FIRST_RUN = "first_run/"
_MAX_POINTS = 1000
_STATUS = {"ok": "FINISHED", "pruned": "FINISHED", "duplicate": "FINISHED"}


def safe_key(name: str) -> str:
    """Return a name that MLflow accepts for a parameter, metric or tag (letters, digits, ``_-. :/``; 250 long)."""
    text = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII).strip("/ ") or "_"
    return re.sub(r"/{2,}", "/", text.replace("..", "__"))[:250]


def _sqlite_file(uri: str) -> Path | None:
    parts = urlsplit(uri)
    return Path(unquote(parts.path)[1:]) if parts.scheme.startswith("sqlite") and parts.path else None


@contextlib.contextmanager
def _without_stray_folder(uri: str) -> Iterator[None]:
    """Remove the empty folder that MLflow makes beside one whose name is quoted in the URL (``a%3Fb`` for ``a?b``)."""
    written = Path(uri.removeprefix("sqlite:///")).parent
    quoted = uri.startswith("sqlite:///") and "%" in str(written)
    missing = [folder for folder in (written, *written.parents) if quoted and not folder.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            for folder in missing:
                folder.rmdir()


class Store:
    """A connection to one MLflow store for one study."""

    def __init__(self, uri: str, experiment: str, uid: str, study: str) -> None:
        from mlflow.tracking import MlflowClient

        file = _sqlite_file(uri)
        artifacts: str | None = None
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            artifacts = (file.resolve().parent / "mlartifacts").as_uri()
        self.uid, self.study = uid, study
        with _without_stray_folder(uri):
            self.client = MlflowClient(tracking_uri=uri)
            self.experiment_id = self._experiment(experiment, artifacts)
        self.run_id = ""
        self._children: dict[str, str] = {}

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is not None and found.lifecycle_stage == "deleted":
            self.client.restore_experiment(found.experiment_id)
        if found is not None:
            return str(found.experiment_id)
        from mlflow.exceptions import MlflowException

        location = f"{artifacts}/{re.sub(r'[^A-Za-z0-9._-]', '_', name)}" if artifacts else None
        try:
            return str(self.client.create_experiment(name, artifact_location=location))
        except MlflowException:  # another study created it in the same moment
            found = self.client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def open_parent(self, info: Mapping[str, Any], started: float) -> None:
        """Find or create the study's own run, mark it running, and log what the study was asked to do."""
        record = f"{self.uid}/study"
        is_ours = f"tags.`autoprec.record` = '{record}'"
        found = self.client.search_runs([self.experiment_id], filter_string=is_ours, max_results=1)
        if found:
            self.run_id = found[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
            self._children = {run.data.tags.get("autoprec.record", ""): run.info.run_id for run in self._trials()}
        else:
            tags = {"autoprec.record": record, "autoprec.role": "study", "autoprec.study": self.study}
            # where MLflow's own column Source looks
            known = {"mlflow.source.name": info.get("script"), "mlflow.source.git.commit": info.get("git_commit")}
            tags |= {key: str(value) for key, value in known.items() if value and isinstance(value, str)}
            run = self.client.create_run(
                self.experiment_id, start_time=int(started * 1000), tags=tags, run_name=self.study
            )
            self.run_id = run.info.run_id
        self._share_view()
        settings = parent_params(redact(dict(info)))
        # a resumed study may be given more trials, and MLflow never lets a parameter change
        tags = {"autoprec.trials": settings.pop("trials")} if "trials" in settings else {}
        self._log(self.run_id, params=settings, tags=tags, refuse_change=False)

    def _share_view(self, params: Sequence[str] = ()) -> None:
        """Store the view that ``autoprec ui`` opens; a server that refuses it shows its default table."""
        from mlflow.exceptions import MlflowException

        with contextlib.suppress(MlflowException):
            self.client.set_experiment_tag(self.experiment_id, *shared_view(self.uid, self.study, params))
            self.client.set_experiment_tag(self.experiment_id, "mlflow.experimentKind", "custom_model_development")

    def _trials(self) -> list[Any]:
        """Return the runs of the study's trials, those of earlier sessions included."""
        found: list[Any] = []
        token: str | None = None
        while True:
            page = self.client.search_runs(
                [self.experiment_id],
                filter_string=f"tags.`mlflow.parentRunId` = '{self.run_id}'",
                max_results=1000,
                page_token=token,
            )
            found += page
            token = page.token
            if not token:
                return found

    def write_trial(self, record: Run, groups: Mapping[str, str] | None) -> None:
        """Write one trial as a child run; an existing run of this trial is brought up to date."""
        identity = f"{self.uid}/{record.kind}/{record.number}/{record.seed}"
        run_id = self._children.get(identity, "")
        if not run_id:
            tags = {"mlflow.parentRunId": self.run_id, "autoprec.record": identity}
            run = self.client.create_run(
                self.experiment_id,
                start_time=int(record.started * 1000),
                tags=tags,
                run_name=visible(trial_name(record)),
            )
            run_id = self._children[identity] = run.info.run_id
        elif record.name:  # the answer is marked in its name, once it is known
            self.client.update_run(run_id, name=visible(trial_name(record)))
        params = {f"layer/{group}": str(choice) for group, choice in (groups or {}).items()}
        params |= {
            key.replace("layer:", "layer/", 1): str(value)
            for key, value in record.params.items()
            if not (key.startswith("layer:") and key[6:] in (groups or {}))
        }
        self._log(run_id, params=params, metrics=_metrics(record), tags=_tags(record, self.study))
        if record.policy:
            self.client.log_text(run_id, dump_yaml(record.policy), "policy.yaml")
        if record.tail and not record.ok:
            self.client.log_text(run_id, redact_text(record.tail), "output-tail.txt")
        end = int((record.started + record.seconds) * 1000)
        self.client.set_terminated(run_id, status=_STATUS.get(record.status, "FAILED"), end_time=end)

    def close_parent(self, status: str = "FINISHED") -> None:
        """End the study's run: FINISHED, FAILED, or KILLED when the search was interrupted."""
        if self.run_id:
            self.client.set_terminated(self.run_id, status=status)

    def write_result(self, result: SearchResult, artifacts: Sequence[Path], finished: float = 0.0) -> None:
        """Log the outcome on the study's run: winner table, metrics of the best policy, and the files.

        ``finished`` (epoch seconds) stamps the metrics: of two values with one stamp MLflow shows the larger, so a
        resumed study would show the step time of one answer beside the speed-up of another.
        """
        from mlflow.entities import Metric

        numbers = {k: float(v) for k, v in result.best.items() if isinstance(v, (int, float)) and v is not True}
        numbers |= shown_metrics(numbers)
        stamp = int(finished * 1000) or self._end_stamp()
        metrics = [Metric(safe_key(k), v, stamp, 0) for k, v in numbers.items() if math.isfinite(v)]
        metrics += [Metric(f"trials_{k}", float(v), stamp, 0) for k, v in result.trials.items()]
        tags = {
            "autoprec.verdict": result.verdict,
            "autoprec.reason": redact_text(result.reason)[:4000],
            "autoprec.target": result.target,
            "autoprec.stopped": result.stopped,
            "mlflow.note.content": redact_text(parent_note(result)),
        }
        self._log(self.run_id, metrics=metrics, tags=tags)
        trials = self._trials()
        self._fold(trials, result, stamp)
        important = [f"layer/{row['name'][6:]}" for row in result.explanation.get("importance", ())]
        chosen = [run.data.params for run in trials if run.data.tags.get("autoprec.row") == "policy"]
        self._share_view(telling_params(chosen, list(map(safe_key, important))))
        self.write_files(artifacts)
        policies = [path for path in artifacts if path.suffix in (".yaml", ".json")]
        if result.verdict == "adopt" and any(path.is_file() for path in policies):
            self._register(policies[0].name)

    def _fold(self, trials: Sequence[Any], result: SearchResult, stamp: int) -> None:
        """Give each policy's row the figures that became known after its trial.

        The row of a policy that was measured again has the figures of all its paired runs, as the report has it; those
        of its first run are beside them as ``first_run/...``. The
        script's gain over 16 bit is known once a 16-bit run was measured; without it an fp32 script would show 1.00
        beside the 1.00 of bf16, ten times as fast.
        """
        from mlflow.entities import Metric

        rows = {run.data.tags["autoprec.name"]: run for run in trials if run.data.tags.get("autoprec.row") == "policy"}
        told: dict[str, dict[str, float]] = {}
        several: dict[str, Mapping[str, Any]] = {}
        plain = _plain_speedup(result)
        for name, record in pooled(map(_recorded, trials)).items():
            over = {"speedup_over_16bit": record.figures.get("speedup", math.nan) / plain} if plain else {}
            shown = shown_metrics(record.figures | over)
            if "seeds" in record.metrics:
                told[name], several[name] = shown | {"seeds": record["seeds"]}, record.figures | over
            elif name in rows and shown.get("gain") != rows[name].data.metrics.get("gain"):
                told[name] = {
                    key: shown[key] for key in ("gain",) if key in shown
                }  # the 16-bit run was not measured yet, or not as well
        told[str(result.best.get("name"))] = shown_metrics(result.best) | {
            "seeds": float(result.best.get("seeds") or 1)
        }
        reference = str(result.reference.get("name"))
        told[reference] = reference_figures(result.reference)
        if float(result.best.get("seeds") or 1) > 1:
            several[str(result.best.get("name"))] = result.best
        for name, figures in told.items():
            if name in rows:
                values = figures | _of_all_runs(rows[name], several.get(name, {}))
                metrics = [Metric(key, value, stamp, 0) for key, value in values.items()]
                self._log(rows[name].info.run_id, metrics=metrics)

    def _register(self, name: str) -> None:
        """Register the policy in the model registry, a version per study; a store without one goes without."""
        from mlflow.exceptions import MlflowException

        model = re.sub(r"[/:]", "-", f"autoprec-{self.study}")
        with contextlib.suppress(MlflowException):
            with contextlib.suppress(MlflowException):
                self.client.create_registered_model(model, description="precision policies found by autoprec search")
            known = self.client.search_model_versions(f"name='{model}'")
            if not any(version.run_id == self.run_id for version in known):
                source = f"{self.client.get_run(self.run_id).info.artifact_uri}/{name}"
                self.client.create_model_version(model, source, run_id=self.run_id)

    def write_files(self, artifacts: Sequence[Path]) -> None:
        """Attach files to the study's run; one that is gone by now is left out."""
        for path in artifacts:
            if path.is_file():
                self.client.log_artifact(self.run_id, str(path))

    def _end_stamp(self) -> int:
        return int(self.client.get_run(self.run_id).info.start_time or 0)

    def _log(
        self,
        run_id: str,
        *,
        params: Mapping[str, str] | None = None,
        metrics: Sequence[Any] = (),
        tags: Mapping[str, str] | None = None,
        refuse_change: bool = True,
    ) -> None:
        """Send in batches; a parameter that already has another value (a resumed study) stays as it is."""
        from mlflow.entities import Param, RunTag

        items = [Param(safe_key(k), visible(str(v))[:5900]) for k, v in (params or {}).items()]
        for start in range(0, len(items), 90):
            part = items[start : start + 90]
            if refuse_change:
                self.client.log_batch(run_id, params=part)
                continue
            from mlflow.exceptions import MlflowException

            try:
                self.client.log_batch(run_id, params=part)
            except MlflowException:
                for item in part:
                    with contextlib.suppress(MlflowException):
                        self.client.log_batch(run_id, params=[item])
        for start in range(0, len(metrics), _BATCH):
            self.client.log_batch(run_id, metrics=list(metrics[start : start + _BATCH]))
        labels = [RunTag(safe_key(k), visible(str(v))) for k, v in (tags or {}).items()]
        for start in range(0, len(labels), 90):
            self.client.log_batch(run_id, tags=labels[start : start + 90])


def _plain_speedup(result: SearchResult) -> float | None:
    """Return the speed-up of the 16-bit run over the script that a result is told by; None where there is none."""
    rows = (result.best, result.reference, *result.presets)
    known = [row for row in rows if row.get("speedup") and row.get("speedup_over_16bit")]
    return known[0]["speedup"] / known[0]["speedup_over_16bit"] if known else None


def _recorded(run: Any) -> Run:
    """Return of a run what :func:`~autoprec.tuning.study.run.pooled` asks for."""
    tags, metrics = run.data.tags, dict(run.data.metrics)
    kind, name, status = (tags.get(f"autoprec.{key}", "") for key in ("kind", "name", "status"))
    own = {key.removeprefix(FIRST_RUN): value for key, value in metrics.items() if key.startswith(FIRST_RUN)}
    metrics = {key: value for key, value in metrics.items() if not key.startswith(FIRST_RUN)} | own
    blocks = (BY_BLOCK,) if tags.get(BY_BLOCK) == "true" else ()
    return Run(
        0, kind, name, {}, {}, status, metrics=metrics_of(metrics), tags=blocks, seed=int(tags.get("autoprec.seed", 0))
    )


def _of_all_runs(run: Any, figures: Mapping[str, Any]) -> dict[str, float]:
    """Return a policy's figures over all its runs by the names its first run had them, and that run's own as such."""
    out: dict[str, float] = {}
    shown = shown_metrics(figures)
    for name, own in _recorded(run).figures.items():
        value = figures.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value) and name not in shown and value != own:
            out |= {name: float(value), f"{FIRST_RUN}{name}": own}
    return out


def _shown(record: Run) -> dict[str, float]:
    """Return a trial's figures of the table; whether the script is drawn among policies is known at the end only."""
    return (
        reference_figures(record.figures, drawn=False) if record.kind == "reference" else shown_metrics(record.figures)
    )


def _metrics(record: Run) -> list[Any]:
    """Return the trial's metrics: figures once, curves per step (thinned to 1000 points), stamped with its start."""
    from mlflow.entities import Metric

    stamp = int(record.started * 1000)
    out = [
        Metric(safe_key(name), float(value), stamp, 0)
        for name, value in {**record.figures, **_shown(record), "seconds": record.seconds}.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    ]
    stride = max(1, math.ceil(max(len(record.losses), len(record.reference_losses)) / _MAX_POINTS))
    pairs = zip(record.losses, record.reference_losses, strict=False)
    gaps = tuple(round(100.0 * (own / other - 1.0), 4) if other else math.nan for own, other in pairs)
    curves = {"loss": record.losses, "reference_loss": record.reference_losses, "loss_gap_pct": gaps}
    for name, values in curves.items():
        out += [
            Metric(name, float(value), stamp, step)
            for step, value in enumerate(values)
            if step % stride == 0 and math.isfinite(value)
        ]
    return out


def _tags(record: Run, study: str) -> dict[str, str]:
    tags = {
        "autoprec.role": "trial",
        "autoprec.row": "policy" if record.kind in ("reference", "preset", "search") else "run",
        "autoprec.study": study,
        "autoprec.kind": record.kind,
        "autoprec.name": record.name,
        "autoprec.number": str(record.number),
        "autoprec.seed": str(record.seed),
        "autoprec.status": record.status,
    }
    if record.reason:
        tags["autoprec.reason"] = redact_text(record.reason)[:4000]
    if record.sources:
        modelled = sorted(name for name, source in record.sources.items() if source == "modelled")
        tags["autoprec.modelled"] = ", ".join(modelled) or "nothing: all measured"
    present = {*record.tags, *({record.kind} & {"preset", "finalist"}), *({record.status} & {"pruned"})}
    return tags | {name: "true" if name in present else "false" for name in TRIAL_TAGS}
