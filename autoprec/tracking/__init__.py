"""The trials of a study in MLflow, without ever making a search wait for MLflow.

The Optuna study is the durable record of a search. :func:`log_study` reads it and brings MLflow up to date: what is
there already stays as it is. A process beside the search calls it after every trial (:mod:`.__main__`), ``autoprec ui``
calls it when it is started; so a server that is dead, slow or full, and a search that was
killed, lose nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec.support.lazy import names_on_use

if TYPE_CHECKING:
    from autoprec.tracking.log import Logged, log_study

__all__ = ["Logged", "log_study"]

__getattr__ = names_on_use(__name__, {"Logged": "log", "log_study": "log"})
