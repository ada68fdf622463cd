"""Trials in MLflow, without ever making a search wait for MLflow.

The search appends JSON lines to a spool inside the study directory (:mod:`.spool`); a background process reads them
and writes runs (:mod:`.drain`, :mod:`.store`). A dead server therefore costs nothing and loses nothing:
:func:`sync` sends later what was missed, and sending twice changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoprec.tracking.replay import SyncReport, sync
    from autoprec.tracking.tracker import Tracker

__all__ = ["SyncReport", "Tracker", "sync"]


def __getattr__(name: str) -> Any:
    if name == "Tracker":
        from autoprec.tracking.tracker import Tracker

        return Tracker
    if name in ("sync", "SyncReport"):
        import importlib

        return getattr(importlib.import_module("autoprec.tracking.replay"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
