"""What tracking keeps in a study's folder, beside the study itself: ``autoprec-runs/<study>/tracking/``.

``id`` is the study's identity in MLflow, ``study.json`` what it was asked and where its runs go, ``outcome.json`` its
answer, ``files/`` copies of artifacts from elsewhere. ``state.json`` says what the process beside the search has done,
and ``news`` grows by a line whenever there is something new to log. Trials are in the study's own database.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autoprec.errors import AutoPrecError, UsageError
from autoprec.support.files import finite, sqlite_url, write_json
from autoprec.support.plain import rebuild
from autoprec.support.redact import redact_uri
from autoprec.tuning.study.reading import stored_records
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from autoprec.tuning.study.storage import is_server
from autoprec.tuning.study.study import default_storage

#: Reports that a search writes into its own folder.
_REPORTS = ("report.html", "report.md", "result.json")


def named_uri(given: str | None) -> str:
    """Return the store that an option or ``MLFLOW_TRACKING_URI`` names; empty when neither does.

    Raises:
        UsageError: it is not an address.
    """
    uri = given or os.environ.get("MLFLOW_TRACKING_URI") or ""
    try:
        _ = urlsplit(uri).port
    except ValueError:  # what it says may quote a password
        where = "--tracking-uri" if given else "MLFLOW_TRACKING_URI"
        raise UsageError(f"{where} has no valid host and port", fix="e.g. http://127.0.0.1:5000") from None
    return uri


@dataclass(frozen=True, slots=True)
class About:
    """What a study was asked (``info``), and where its runs go; addresses without their logins.

    ``ended`` is empty while its search is at work, and where it was killed; else FINISHED, or KILLED for an interrupted
    search.
    """

    study: str
    tracking_uri: str = ""
    experiment: str = "autoprec"
    storage: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    started: float = 0.0
    ended: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """What one store is known to hold: all of the study up to ``news``, or the ``reason`` why not."""

    tracking_uri: str = ""
    experiment_id: str = ""
    run_id: str = ""
    news: int = 0
    reason: str = ""


@dataclass(frozen=True)
class TrackedFolder:
    """The folder of one study."""

    path: Path

    @property
    def own(self) -> Path:
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

    def _read(self, name: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}

    def about(self) -> About:
        """Return what the study was asked; of an earlier version's study, what its event log says."""
        found = {"study": self.path.name} | (self._read("tracking/study.json") or self._of_event_log())
        return rebuild(About, found)

    def _of_event_log(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, KeyError), (self.own / "spool.jsonl").open("rb") as lines:
            for line in lines:
                event = json.loads(line)
                out |= {k: v for k, v in event.items() if k in ("tracking_uri", "experiment", "study", "info")}
                out |= {"started": event["time"]} if event["kind"] == "study" else {}
                out |= {"ended": event["status"]} if event["kind"] == "end" else {}
        return out

    def save_about(self, about: About) -> None:
        _ = self.uid
        write_json(self.own / "study.json", finite(asdict(about)), indent=None)
        self.tell("study")

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
        kept = self._read("tracking/outcome.json")
        plain = {} if kept else self._read("result.json")  # of an earlier version's study
        try:
            found = SearchResult.from_json(kept.get("result") or plain)
            return found, float(kept.get("time") or (self.path / "result.json").stat().st_mtime)
        except (AutoPrecError, OSError, KeyError, TypeError, ValueError):
            return None

    def save_outcome(self, result: SearchResult) -> None:
        """Keep the answer, and a copy of its policy, which may be changed where it was written."""
        policy = Path(result.policy)
        if result.policy and policy.is_file():
            (self.own / "files").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(policy, self.own / "files" / policy.name)
        write_json(self.own / "outcome.json", finite({"time": time.time(), "result": result.to_json()}), indent=None)
        self.tell("outcome")

    def files(self) -> list[Path]:
        """Return the artifacts of the study's own run: policy, charts, reports.

        A folder may be anybody's: a link in it that leads elsewhere is not followed.
        """
        found = [*(self.own / "files").glob("*"), *(self.path / "charts").glob("*")]
        found += [self.path / name for name in _REPORTS]
        root = self.path.resolve()
        return sorted(p for p in found if p.is_file() and p.resolve().is_relative_to(root))

    @property
    def news(self) -> int:
        """A number that grows with whatever there is to log."""
        with contextlib.suppress(OSError):
            return (self.own / "news").stat().st_size
        return 0

    @property
    def changed(self) -> float:
        """When the study was last written to (epoch seconds)."""
        files = (self.own / name for name in ("news", "spool.jsonl", "id"))
        return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)

    def tell(self, what: str) -> None:
        """Note that there is something new to log."""
        with (self.own / "news").open("a", encoding="utf-8") as stream:
            stream.write(f"{what}\n")

    def state(self, uri: str) -> State:
        """Return what the store of an address is known to hold; a missing or damaged file says nothing."""
        with contextlib.suppress(TypeError):
            found = rebuild(State, self._read("tracking/state.json"))
            return found if found.tracking_uri == redact_uri(uri) else State()
        return State()

    def save_state(self, state: State) -> None:
        with contextlib.suppress(AutoPrecError):
            write_json(self.own / "state.json", asdict(state), indent=None)


def default_uri(runs: Path) -> str:
    """Return the store used when nothing names one: SQLite beside the studies (MLflow refuses file stores)."""
    return sqlite_url(runs.resolve() / "mlflow.db")
