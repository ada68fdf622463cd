"""Whether the head of a Ray cluster still answers.

Ray ends a driver that has lost its head from within its C++ code, a minute later and without an error of ours. So
whoever waits for a result checks the head meanwhile, and gives up first.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from autoprec.errors import AutoPrecError


class Head:
    """The head of one cluster, shared by all who wait for its workers.

    Args:
        address: ``host:port`` of its control service; empty where it is not known, then nothing is checked.
        patience_s: seconds without an answer after which it is lost; Ray's own limit is 60.
        every_s: seconds between two looks.
    """

    def __init__(self, address: str, *, patience_s: float = 15.0, every_s: float = 2.0) -> None:
        self.address, self._patience_s, self._every_s = address, patience_s, every_s
        self._silent_since: float | None = None
        self._lock = threading.Lock()
        #: True once it was found lost: Ray is not to be asked for anything any more, which would hang.
        self.lost = False

    def wait(self, ray: Any, reference: Any) -> Any:
        """Return what a reference stands for, as ``ray.get`` does.

        Raises:
            AutoPrecError: the head was lost meanwhile.
        """
        while not ray.wait([reference], timeout=self._every_s)[0]:
            self.check()
        return ray.get(reference)

    def check(self) -> None:
        """Look whether the head answers.

        Raises:
            AutoPrecError: it has not for ``patience_s``.
        """
        host, _, port = self.address.rpartition(":")
        if not host:
            return
        with self._lock:
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
                self._silent_since = None
            except OSError as error:
                now = time.monotonic()
                self._silent_since = self._silent_since or now
                silent = now - self._silent_since
                if silent > self._patience_s:
                    self.lost = True
                    raise AutoPrecError(
                        f"the head of the Ray cluster has not answered for {silent:.0f} s ({error})",
                        where=self.address,
                        fix="start it again, or search on this machine without --engine ray",
                    ) from error
