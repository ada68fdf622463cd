"""A head that is gone is told by whoever waits for a result, before Ray ends the process."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from autoprec.errors import AutoPrecError
from autoprec.tuning.workers.head import Head


class Cluster:
    """Answers after so many looks, or never."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def wait(self, references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        assert timeout > 0
        time.sleep(0.01)
        self.looks -= 1
        return ([], references) if self.looks else (references, [])

    def get(self, reference: str) -> str:
        return f"got {reference}"


@pytest.fixture
def listener() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_a_result_is_waited_for_while_the_head_answers(listener: socket.socket) -> None:
    head = Head(f"127.0.0.1:{listener.getsockname()[1]}", patience_s=0.0, every_s=0.01)
    assert head.wait(Cluster(4), "it") == "got it"
    assert not head.lost


def test_a_lost_head_ends_the_waiting(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    head = Head(f"127.0.0.1:{port}", patience_s=0.05, every_s=0.01)
    with pytest.raises(AutoPrecError, match="head of the Ray cluster has not answered"):
        head.wait(Cluster(-1), "it")
    assert head.lost


def test_a_short_silence_and_an_unknown_address_end_nothing(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert Head(f"127.0.0.1:{port}", patience_s=60.0).wait(Cluster(3), "it") == "got it"
    assert Head("", patience_s=0.0).wait(Cluster(3), "it") == "got it"
