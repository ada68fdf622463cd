"""The spool: an append-only file of JSON lines in the study directory, and how far each server has been told.

``tracking/spool.jsonl`` holds what happened; ``tracking/state-<store>.json`` holds, per tracking store, how many
bytes of it have been written there. A torn last line (a crash in the middle of a write) is skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autoprec.errors import AutoPrecError, UsageError
from autoprec.support.files import finite, sqlite_url, write_json
from autoprec.support.plain import rebuild
from autoprec.support.redact import redact_uri


def default_uri(runs: Path) -> str:
    """Return the store used when nobody names one: SQLite beside the studies (MLflow refuses file stores)."""
    return sqlite_url(runs / "mlflow.db")


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


@dataclass(slots=True)
class State:
    """What one tracking store knows of one study.

    ``status`` is ``new``, ``draining``, ``drained``, ``unreachable`` or ``failed`` (with ``reason``); ``offset`` the
    bytes of the spool that were written there; ``ended`` says that the study's end is among them.
    """

    tracking_uri: str = ""
    experiment: str = ""
    experiment_id: str = ""
    run_id: str = ""
    offset: int = 0
    ended: bool = False
    status: str = "new"
    reason: str = ""


@dataclass(frozen=True)
class Spool:
    """The tracking folder of one study."""

    directory: Path
    uid: str = field(default="")

    @classmethod
    def of(cls, study_dir: Path | str) -> Spool:
        """Open the spool of a study, creating its folder and its identity when there is none yet."""
        directory = Path(study_dir) / "tracking"
        identity = directory / "id"
        try:
            uid = identity.read_text(encoding="utf-8").strip()
        except OSError:
            uid = ""
        if not uid:
            directory.mkdir(parents=True, exist_ok=True)
            uid = uuid.uuid4().hex
            identity.write_text(uid + "\n", encoding="utf-8")
        return cls(directory, uid)

    @property
    def path(self) -> Path:
        return self.directory / "spool.jsonl"

    @property
    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def append(self, kind: str, **payload: Any) -> None:
        """Append one line; a torn line left by a crash is ended first, so that it spoils nothing but itself."""
        line = json.dumps({"kind": kind, **finite(payload)}, separators=(",", ":"), allow_nan=False, default=str)
        if self._torn():
            line = "\n" + line
        # one write, not synced to the disk: a killed process loses nothing, and the study's own database is durable
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, (line + "\n").encode())
        finally:
            os.close(handle)

    def keep(self, path: Path | str) -> str:
        """Return the name, below the study's folder, under which a file can be sent later.

        A file from elsewhere is copied: what is sent is what there was, and nothing outside the study ever is.
        """
        study, path = self.directory.parent.resolve(), Path(path).resolve()
        if not path.is_relative_to(study) and path.is_file():
            kept = study / self.directory.name / "files" / path.name
            kept.parent.mkdir(parents=True, exist_ok=True)
            path = Path(shutil.copyfile(path, kept))
        return os.path.relpath(path, study)

    def kept(self, name: str) -> Path | None:
        """Return the file behind a name of :meth:`keep`; None for one that leads out of the study's folder.

        A spool is data, perhaps somebody else's: ``autoprec sync`` must not send ``../../.ssh/id_rsa`` for it.
        """
        study = self.directory.parent.resolve()
        path = (study / name).resolve()
        return path if path.is_relative_to(study) else None

    def _torn(self) -> bool:
        try:
            with self.path.open("rb") as stream:
                stream.seek(-1, os.SEEK_END)
                return stream.read(1) != b"\n"
        except OSError:
            return False

    def read(self, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield (event, offset after it) for every complete, well-formed line from ``offset`` on."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(offset)
                for raw in stream:
                    if not raw.endswith(b"\n"):
                        return
                    offset += len(raw)
                    try:
                        event = json.loads(raw)
                    except ValueError:
                        continue
                    if isinstance(event, dict) and isinstance(event.get("kind"), str):
                        yield event, offset
        except FileNotFoundError:
            return

    def ended(self, offset: int = 0) -> bool:
        """Say whether the study's end is spooled after ``offset`` (a resumed study begins anew)."""
        last = ""
        for event, _ in self.read(offset):
            if event["kind"] in ("open", "end"):
                last = event["kind"]
        return last == "end"

    def target(self) -> dict[str, str]:
        """Return ``{"tracking_uri", "experiment"}`` of the newest opening, logins left out."""
        found: dict[str, str] = {}
        for event, _ in self.read():
            if event["kind"] == "open":
                found = {key: str(event.get(key) or "") for key in ("tracking_uri", "experiment", "study")}
        return found

    def state_path(self, uri: str) -> Path:
        """Return the file that says how far one store has been told."""
        digest = hashlib.sha256(redact_uri(uri).encode()).hexdigest()[:12]
        return self.directory / f"state-{digest}.json"

    def load_state(self, uri: str) -> State:
        """Read a store's state; a missing or damaged file means that it knows nothing yet."""
        try:
            document = json.loads(self.state_path(uri).read_text(encoding="utf-8"))
            return rebuild(State, document)
        except (OSError, ValueError, TypeError, AutoPrecError):
            return State(tracking_uri=redact_uri(uri))

    def save_state(self, uri: str, state: State) -> None:
        write_json(self.state_path(uri), asdict(state))
