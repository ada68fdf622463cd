"""The storage of a study: how it is opened, held by one driver at a time, and waited for while its server restarts."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError

from autoprec.errors import StudyError
from autoprec.support.redact import redact_uri

R = TypeVar("R")

#: A database server that restarts, fails over or is upgraded is back within minutes: so long a search waits for it.
PATIENCE_S = 300.0
#: The first pause before it is asked again, which doubles up to the longest: a server that starts is not crowded.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
#: Without these a connection to a host that is gone waits for many minutes (libpq's names).
_LIBPQ = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}


def _parsed(url: str) -> URL | None:
    """Return a storage URL in its parts; None for what is not one."""
    with contextlib.suppress(ArgumentError):
        return make_url(url)
    return None


def without_password(url: str) -> str:
    """Return a storage URL fit to be shown."""
    parsed = _parsed(url)
    return url if parsed is None else redact_uri(parsed.render_as_string(hide_password=True), hidden="***")


def is_server(url: str) -> bool:
    """Say whether the storage is reached over a network."""
    parsed = _parsed(url)
    return parsed is not None and parsed.get_backend_name() != "sqlite"


def sqlite_file(url: str) -> Path | None:
    """Return the file of a SQLite URL; None for other storages, and for one in memory."""
    parsed = _parsed(url)
    if parsed is None or parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return None
    return Path(str(parsed.database))


class _Storage(optuna.storages.RDBStorage):  # type: ignore[misc]
    """Optuna's RDB; of a database that cannot be read the connection is closed all the same."""

    def __init__(self, url: str, engine_kwargs: dict[str, Any]) -> None:
        try:
            super().__init__(url, engine_kwargs=engine_kwargs)
        except BaseException:
            if hasattr(self, "engine"):
                self.engine.dispose()
            raise


def open_storage(url: str) -> optuna.storages.RDBStorage:
    """Open the storage; a server's connections are checked before use and never wait for a dead host for long."""
    settings: dict[str, Any] = {}
    if is_server(url):
        driver = make_url(url).get_driver_name()
        settings = {"pool_pre_ping": True}
        if driver in ("psycopg2", "psycopg"):
            settings["connect_args"] = dict(_LIBPQ)
    return _Storage(url, engine_kwargs=settings)


def patiently(action: Callable[[], R], url: str, tell: Callable[[str], None], *, patience_s: float = PATIENCE_S) -> R:
    """Call a function that uses the storage, again and again while the server does not answer.

    Args:
        action: what to do; must do nothing twice.
        tell: called with a note when the waiting begins, and when it is over.
        patience_s: how long to wait for the server; then its error is raised.
    """
    began, pause = 0.0, _FIRST_PAUSE_S
    while True:
        try:
            result = action()
        except Exception as error:
            if not (is_server(url) and _is_outage(error)):
                raise
            now = time.monotonic()
            if not began:
                began = now
                tell(f"the study's storage does not answer; it is tried again for {patience_s / 60:.3g} min")
            if now - began > patience_s:
                raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        else:
            if began:
                tell(f"the study's storage is back after {time.monotonic() - began:.0f} s; nothing was lost")
            return result


def root_cause(error: BaseException) -> str:
    """Return in one line what the database's driver said; Optuna and SQLAlchemy wrap it in sentences of their own."""
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def process_limit(url: str) -> OSError | None:
    """Return the limit of this process that SQLite met, as it does not say; None where none is near."""
    path = sqlite_file(url)
    if path is None:
        return None
    try:
        os.close(os.open(path.parent, os.O_RDONLY))
        size = path.stat().st_size if path.exists() else 0
    except OSError as error:
        return error
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    # what failed is rolled back: a transaction is less than the file and 256 KiB
    return OSError(errno.EFBIG, "limit") if 0 <= most < 2 * size + (1 << 18) else None


def _is_outage(error: BaseException | None) -> bool:
    """Say whether an error, or what caused it, is a lost or refused connection rather than a refused statement."""
    while error is not None:
        if isinstance(error, (OperationalError, InterfaceError)):
            return True
        if isinstance(error, DBAPIError) and error.connection_invalidated:
            return True
        error = error.__cause__ or error.__context__
    return False


class Claim:
    """One driver's hold on a study of a PostgreSQL storage; it ends with the process, however that ends.

    It is an advisory lock of a session of its own. (A file of this machine is locked by ``flock`` instead.)

    Args:
        study: the Optuna study; its holder is noted there, for the message to the second driver.
    """

    def __init__(self, url: str, study: optuna.Study) -> None:
        self._url, self._study = url, study
        self._connection: sqlalchemy.Connection | None = None
        self._wanted = is_server(url) and make_url(url).get_backend_name() == "postgresql"

    def hold(self) -> None:
        """Hold the study, again where the server has forgotten it (it was restarted).

        Raises:
            StudyError: another driver holds it.
        """
        if not self._wanted or self._alive():
            return
        key = int.from_bytes(hashlib.sha256(self._study.study_name.encode()).digest()[:7], "big")
        arguments = dict(_LIBPQ) if make_url(self._url).get_driver_name() in ("psycopg2", "psycopg") else {}
        # autocommit: an open transaction would be ended by servers that do not like idle ones
        engine = sqlalchemy.create_engine(self._url, isolation_level="AUTOCOMMIT", connect_args=arguments)
        connection = engine.connect()
        taken = connection.execute(sqlalchemy.text("select pg_try_advisory_lock(:key)"), {"key": key}).scalar()
        if not taken:
            connection.close()
            engine.dispose()
            holder = self._study.user_attrs.get("driver", "another process")
            raise StudyError(
                f"this study is in use by {holder}",
                where=without_password(self._url),
                fix="wait for it, stop it, or use another --study",
            )
        self._connection = connection
        self._study.set_user_attr("driver", f"pid {os.getpid()} on {socket.gethostname()}")

    def _alive(self) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.execute(sqlalchemy.text("select 1"))
        except DBAPIError:
            self.release()
            return False
        return True

    def release(self) -> None:
        """Let another driver hold the study; nothing where it is not held."""
        connection, self._connection = self._connection, None
        if connection is not None:
            engine = connection.engine
            connection.invalidate()  # closing would first talk to a server that may be gone
            connection.close()
            engine.dispose()
