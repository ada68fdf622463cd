"""JSON lines over a socket, whatever pieces they arrive in."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from autoprec.trial.messages import Lines, connect, listen, receive_messages, send_message


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


@pytest.mark.parametrize("folder", ["a", "a" * 200])
def test_a_path_may_be_longer_than_the_address_of_a_socket(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    path = tmp_path / folder / "control-1"
    with pytest.raises(OSError, match=r".+"):
        connect(path)
    with listen(path, 1) as listener, connect(path) as control:
        accepted, _ = listener.accept()
        with accepted:
            send_message(control, op="hello")
            control.shutdown(socket.SHUT_WR)
            assert list(receive_messages(accepted)) == [{"op": "hello"}]
