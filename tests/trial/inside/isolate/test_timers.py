"""No deadline of the script's runs in a trial, however it was set."""

from __future__ import annotations

import signal
import time

from autoprec.trial.inside.isolate.timers import stop_timers

from .test_overlay import in_fork


def test_neither_a_running_alarm_nor_a_later_one_goes_off() -> None:
    def work() -> None:
        def late(*_: object) -> None:
            raise TimeoutError

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        stop_timers()
        assert signal.alarm(1) == 0
        assert signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01) == (0.0, 0.0)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        time.sleep(0.1)

    assert in_fork(work)
