"""A tracked study: its folder ``autoprec-runs/<study>``, and the MLflow store that its runs go to.

Trials are in the study's own database, its answer is ``result.json``. ``tracking/id`` is the study's identity in
MLflow, ``tracking/study.json`` what it was asked, ``tracking/files/`` a copy of its policy.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autoprec.errors import AutoPrecError, UsageError
from autoprec.support.files import finite, sqlite_url, write_json
from autoprec.support.plain import rebuild
from autoprec.support.redact import HIDDEN
from autoprec.tuning.study.reading import stored_records
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from autoprec.tuning.study.storage import is_server
from autoprec.tuning.study.study import default_storage

#: Reports that a search writes into its own folder.
_REPORTS = ("report.html", "result.json")


@dataclass(frozen=True, slots=True)
class About:
    """What a study was asked (``info``) and when (epoch seconds), and where it goes; addresses without their logins."""

    study: str
    tracking_uri: str = ""
    experiment: str = "autoprec"
    storage: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    started: float = 0.0


@dataclass(frozen=True)
class TrackedStudy:
    """The folder of one study."""

    path: Path

    @property
    def own(self) -> Path:
        """The folder in the study's folder in which tracking keeps its own files."""
        return self.path / "tracking"

    @property
    def uid(self) -> str:
        """The identity of the study in MLflow, made when it is first asked for."""
        identity = self.own / "id"
        uid = identity.read_text(encoding="utf-8").strip() if identity.is_file() else ""
        if not uid:
            self.own.mkdir(parents=True, exist_ok=True)
            uid = uuid.uuid4().hex
            identity.write_text(uid + "\n", encoding="utf-8")
        return uid

    def about(self) -> About:
        """Return what the study was asked; nothing but its name where that is not known."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            found = json.loads((self.own / "study.json").read_text(encoding="utf-8"))
            return rebuild(About, {"study": self.path.name} | found)
        return About(self.path.name)

    def save_about(self, about: About) -> None:
        """Write what the study was asked to do, so that a later ``ui --sync`` has it."""
        _ = self.uid
        write_json(self.own / "study.json", finite(asdict(about)), indent=None)

    def records(self, storage: str = "") -> list[Run]:
        """Return every run that the study's database holds.

        Args:
            storage: its address, with a login if it needs one; default: ``OPTUNA_STORAGE`` where the study is on a
                server, else its file.

        Raises:
            StudyError: it cannot be read.
        """
        about = self.about()
        here = (self.path / "study.db").is_file()  # also where the folder was moved since
        own = default_storage(self.path) if here or not about.storage else about.storage
        url = storage or (os.environ.get("OPTUNA_STORAGE") or own if is_server(own) else own)
        return stored_records(url, about.study)

    def outcome(self) -> tuple[SearchResult, float] | None:
        """Return the study's answer and when it was found (epoch seconds); None before there is one."""
        path = self.path / "result.json"
        try:
            return SearchResult.from_json(json.loads(path.read_text(encoding="utf-8"))), path.stat().st_mtime
        except (AutoPrecError, OSError, KeyError, TypeError, ValueError, AttributeError):
            return None

    def save_outcome(self, result: SearchResult) -> None:
        """Keep the answer, and a copy of its policy, which may be changed where it was written."""
        policy = Path(result.policy)
        if result.policy and policy.is_file():
            (self.own / "files").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(policy, self.own / "files" / policy.name)
        write_json(self.path / "result.json", result.to_json())

    def status(self, *, running: bool) -> str:
        """Return MLflow's status of the study's run: KILLED where its last search left no answer."""
        outcome = self.outcome()
        answered = outcome is not None and outcome[1] >= self.about().started
        return "RUNNING" if running else "FINISHED" if answered else "KILLED"

    def told(self) -> str:
        """Return the store that has heard of the study's end, and of all that was written to it; empty where none."""
        with contextlib.suppress(OSError):
            note = self.own / "told"
            if note.stat().st_mtime >= self.changed:
                return note.read_text(encoding="utf-8")
        return ""

    def files(self) -> list[Path]:
        """Return the artifacts of the study's own run: policy, reports.

        A folder may be anybody's: a link in it that leads elsewhere is not followed.
        """
        found = [*(self.own / "files").glob("*"), *(self.path / name for name in _REPORTS)]
        root = self.path.resolve()
        return sorted(p for p in found if p.is_file() and p.resolve().is_relative_to(root))

    @property
    def changed(self) -> float:
        """When the study was last written to (epoch seconds)."""
        files = (self.path / name for name in ("study.db", "result.json", "tracking/study.json", "tracking/id"))
        return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)


def named_uri(given: str | None) -> str:
    """Return the store that an option or ``MLFLOW_TRACKING_URI`` names; empty when neither does.

    Raises:
        UsageError: it is not an address.
    """
    uri = given or os.environ.get("MLFLOW_TRACKING_URI") or ""
    try:
        _ = urlsplit(uri).port
    except ValueError:  # what it says may quote a password
        where = "tracking_uri" if given else "MLFLOW_TRACKING_URI"
        raise UsageError(f"{where} has no valid host and port", fix="e.g. http://127.0.0.1:5000") from None
    return uri


def default_uri(runs: Path) -> str:
    """Return the store used when nothing names one: SQLite beside the studies (MLflow refuses file stores)."""
    return sqlite_url(runs.resolve() / "mlflow.db")


def store_of(study: TrackedStudy, tracking_uri: str | None = None) -> str:
    """Return the store to show a study in: the named one, else its own, else ``mlflow.db`` beside it."""
    recorded = study.about().tracking_uri
    if HIDDEN in recorded or not recorded.startswith(("sqlite:", "file:", "http:", "https:")):
        recorded = ""  # a folder of somebody else's must not choose the database that is sent the user's password
    return named_uri(tracking_uri) or recorded or default_uri(study.path.resolve().parent)
