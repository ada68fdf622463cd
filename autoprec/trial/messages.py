"""JSON lines over a stream socket: what the driver and its hosts say to each other."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

__all__ = ["messages"]


def messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield every whole line as the object it says, until the other end closes or is lost.

    An unfinished last line is dropped: whoever wrote it died writing.
    """
    buffer = b""
    while True:
        try:
            chunk = connection.recv(1 << 16)
        except OSError:
            return
        if not chunk:
            return
        buffer += chunk
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            yield json.loads(line)
