"""A scan's process that stays at its step, and is forked for each scan of it (:mod:`autoprec.trial.driver.staying`)."""

from __future__ import annotations

from autoprec.support.plain import Document
from autoprec.trial.inside.fork_server import serve_forks, settle
from autoprec.trial.inside.isolate.isolation import add_layer_of_probe
from autoprec.trial.messages import connect


def serve_scans(address: str) -> Document:
    """Tell the driver that the step has come, and serve forks; returns in a fork, with its configuration.

    Args:
        address: of the socket on which the driver waits.
    """
    control = connect(address)
    settle()
    config = serve_forks(control)
    add_layer_of_probe()
    return config
