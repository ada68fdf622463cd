"""The first signal unwinds a command, the next ones do not (whole searches: tests/faults/test_signals.py)."""

from __future__ import annotations

import signal

import pytest

from autoprec.cli.signals import ended_once

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> object:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def leave(number: int, tidied: list[bool]) -> None:
    """Be ended by a signal, and by further ones while tidying up."""
    with ended_once():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            tidied.append(True)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGHUP, SystemExit)])
def test_only_the_first_signal_is_raised(number: int, raised: type[BaseException]) -> None:
    tidied: list[bool] = []
    with pytest.raises(raised) as stop:
        leave(number, tidied)
    assert tidied
    assert raised is KeyboardInterrupt or stop.value.args == (143,)
    signal.raise_signal(signal.SIGINT)  # a process that is leaving is not disturbed any more


def test_without_a_signal_everything_is_as_before() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with ended_once():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ended_once():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGHUP)
