"""JSON lines over a socket, whatever pieces they arrive in."""

from __future__ import annotations

import socket

from autoprec.trial.messages import Lines, receive_messages, send_message


def test_lines_arrive_whole_whatever_the_pieces() -> None:
    here, there = socket.socketpair()
    for piece in (b'{"id"', b': 1}\n{"id": 2}\n{"i', b'd": 3}\n{"unfinished": '):
        there.sendall(piece)
    there.close()
    assert list(receive_messages(here)) == [{"id": 1}, {"id": 2}, {"id": 3}]
    here.close()
    assert list(receive_messages(here)) == []


def test_what_is_sent_is_received() -> None:
    here, there = socket.socketpair()
    send_message(there, op="run", id=3, text="two\nlines")
    there.close()
    assert list(receive_messages(here)) == [{"op": "run", "id": 3, "text": "two\nlines"}]
    here.close()


def test_lines_keep_what_is_unfinished() -> None:
    lines = Lines()
    assert list(lines.feed(b'{"a": 1}\n{"b"')) == [{"a": 1}]
    assert list(lines.feed(b": 2}\n")) == [{"b": 2}]
