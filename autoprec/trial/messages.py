"""JSON lines over a stream socket: what the driver, its hosts and the zygote say to each other."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

__all__ = ["Lines", "receive_messages", "send_message"]


class Lines:
    """Cuts a stream of bytes into its lines; each is one JSON object."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """Yield the objects of every line that ``chunk`` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            yield json.loads(line)


def receive_messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield every message until the other end closes or is lost.

    An unfinished last line is dropped: whoever wrote it died writing.
    """
    lines = Lines()
    while True:
        try:
            chunk = connection.recv(1 << 16)
        except OSError:
            return
        if not chunk:
            return
        yield from lines.feed(chunk)


def send_message(connection: socket.socket, **message: Any) -> None:
    """Send one message; raises OSError when the other end is gone."""
    connection.sendall(json.dumps(message).encode() + b"\n")
