"""JSON lines over a stream socket: what the driver, its hosts and the zygote say to each other."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoprec.support.plain import Document

#: Bytes that the address of a Unix socket may have (108 with the final zero on Linux, fewer elsewhere).
_LONGEST = 100


@contextlib.contextmanager
def _address(path: Path | str) -> Iterator[str]:
    """Give an address that is short enough: by the descriptor of its directory where the path itself is too long."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    directory = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{Path(path).name}"
    finally:
        os.close(directory)


def listen(path: Path | str, backlog: int) -> socket.socket:
    """Return a listening stream socket at a path of any length."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _address(path) as address:
        listener.bind(address)
    listener.listen(backlog)
    return listener


def connect(path: Path | str) -> socket.socket:
    """Return a stream socket connected to :func:`listen`'s; raises OSError when nothing listens there."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            control.connect(address)
    except OSError:
        control.close()
        raise
    return control


class Lines:
    """Cuts a stream of bytes into its lines; each is one JSON object."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Document]:
        """Yield the objects of every line that ``chunk`` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            yield json.loads(line)


def receive_messages(connection: socket.socket) -> Iterator[Document]:
    """Yield every message until the other end closes or is lost.

    An unfinished last line is dropped: its writer died while writing.
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
