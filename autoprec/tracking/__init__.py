"""Trials in MLflow, without ever making a search wait for MLflow.

The search appends JSON lines to a spool inside the study directory (:mod:`.spool`); a background process reads them
and writes runs (:mod:`.drain`, :mod:`.store`). A dead server therefore costs nothing and loses nothing:
:func:`sync` sends later what was missed, and sending twice changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec.support.lazy import names_on_use

if TYPE_CHECKING:
    from autoprec.tracking.replay import SyncReport, sync
    from autoprec.tracking.tracker import Tracker

__all__ = ["SyncReport", "Tracker", "sync"]

__getattr__ = names_on_use(__name__, {"SyncReport": "replay", "Tracker": "tracker", "sync": "replay"})
