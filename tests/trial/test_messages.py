"""JSON lines over a socket, whatever pieces they arrive in."""

from __future__ import annotations

import socket

from autoprec.trial.messages import messages


def test_lines_arrive_whole_whatever_the_pieces() -> None:
    here, there = socket.socketpair()
    for piece in (b'{"id"', b': 1}\n{"id": 2}\n{"i', b'd": 3}\n{"unfinished": '):
        there.sendall(piece)
    there.close()
    assert list(messages(here)) == [{"id": 1}, {"id": 2}, {"id": 3}]
    here.close()
    assert list(messages(here)) == []
