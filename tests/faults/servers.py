"""Tracking servers that do what no server should: refuse, stay silent, fail, or trickle."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator

__all__ = ["SERVERS", "serving"]

SERVERS = ("dead", "hanging", "failing", "trickling")


class _Failing(http.server.BaseHTTPRequestHandler):
    def _fail(self) -> None:
        self.send_response(500)
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST = do_PATCH = do_PUT = _fail  # noqa: N815 - the names that http.server looks for

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Trickling(_Failing):
    """Answers a byte per second: never so late that a connection times out, never ready."""

    def _trickle(self) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while True:
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(1.0)

    do_GET = do_POST = do_PATCH = do_PUT = _trickle  # noqa: N815


@contextlib.contextmanager
def serving(kind: str) -> Iterator[str]:
    """Yield the address of a bad server."""
    if kind in ("dead", "hanging"):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            if kind == "hanging":
                listener.listen(64)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        return
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Failing if kind == "failing" else _Trickling)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
