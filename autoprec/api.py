"""The search as a Python call: what ``autoprec search`` does, without the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from autoprec.errors import UnknownNameError

if TYPE_CHECKING:
    from autoprec.search.records import SearchResult

__all__ = ["search"]


def search(script: str | Sequence[str], *, track: bool = True, progress: bool = False, **options: Any) -> SearchResult:
    """Search the precision policy that trains a script fastest without changing its loss curve.

    Args:
        script: the command line of the script, as text (``"train.py --lr 3e-4"``) or as tokens.
        track: log trials to MLflow.
        progress: print phases and trials on stderr.
        **options: fields of :class:`autoprec.search.options.SearchOptions`: ``target``, ``trials``,
            ``max_divergence`` (a fraction: 0.0025), ``budget_s`` (seconds), ``output``, ``study``, ``resume``, ...

    Returns:
        What ``autoprec search --json`` prints, as an object; ``autoprec.load(result.policy)`` is the policy.

    Raises:
        UnknownNameError: no such option; the message names the nearest.
        AutoPrecError: see docs/exit-codes.md.
    """
    from autoprec.search.engine import Search
    from autoprec.search.events import Listener, Listeners
    from autoprec.search.options import SearchOptions
    from autoprec.trial.command import ScriptCommand

    valid = {field.name for field in fields(SearchOptions)} - {"command"}
    for name in options:
        if name not in valid:
            raise UnknownNameError("option of autoprec.search", name, valid)
    tokens = tuple(shlex.split(script)) if isinstance(script, str) else tuple(script)
    asked = SearchOptions(command=tokens, **options)
    command = ScriptCommand.parse(asked.command)
    listeners: list[Listener] = []
    if progress:
        from autoprec.cli.progress import TerminalProgress

        listeners.append(TerminalProgress())
    if not track:
        return Search(asked, command, Listeners(*listeners)).run()
    from autoprec.tracking.listener import TrackingListener

    tracker = TrackingListener(asked.runs_dir)
    engine = Search(asked, command, Listeners(*listeners, tracker))
    try:
        return tracker.attach(engine.run(), engine.study_dir)
    finally:
        tracker.close()
