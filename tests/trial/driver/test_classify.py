"""From an end to a status."""

from __future__ import annotations

import signal

import pytest

from autoprec.trial.driver.classify import classify, describe_exit, last_lines
from autoprec.trial.protocol import TrialResult


@pytest.mark.parametrize(
    ("code", "timed_out", "tail", "status"),
    [
        (-signal.SIGKILL, True, "", "hung"),
        (-signal.SIGKILL, False, "", "oom"),
        (-signal.SIGSEGV, False, "", "crashed"),
        (1, False, "RuntimeError: CUDA out of memory.", "oom"),
        (1, False, "ValueError", "crashed"),
        (0, False, "", "too_short"),
    ],
)
def test_without_a_result(code: int, timed_out: bool, tail: str, status: str) -> None:
    result = classify(None, code, timed_out=timed_out, timeout_s=3, tail=tail)
    assert result.status == status
    assert result.reason
    assert result.tail == tail


def test_the_trials_own_result_wins() -> None:
    ok = classify(TrialResult("ok", losses=(1.0,)), -9, timed_out=True, timeout_s=1, tail="noise")
    assert ok.ok
    assert ok.tail == ""
    failed = classify(TrialResult("diverged", "nan"), 0, timed_out=False, timeout_s=1, tail="last words")
    assert (failed.status, failed.tail) == ("diverged", "last words")


def test_tails_are_bounded() -> None:
    text = "\n".join(f"{i}\r" + "x" * 10_000 for i in range(100))
    assert len(last_lines(text)) < 25 * 410
    assert describe_exit(-11) == "was killed by SIGSEGV"
    assert describe_exit(-99).startswith("was killed by signal")
    assert describe_exit(3) == "ended with exit code 3"


def test_a_traceback_that_ends_in_our_code_is_our_fault() -> None:
    import sysconfig

    import autoprec.trial.inside.agent as agent
    from autoprec.trial.driver.classify import is_own_fault

    library = sysconfig.get_paths()["stdlib"]

    def traceback(*files: str) -> str:
        frames = "".join(f'  File "{name}", line 3, in somewhere\n    do()\n' for name in files)
        return f"Traceback (most recent call last):\n{frames}ValueError: no\n"

    assert is_own_fault(traceback("train.py", str(agent.__file__), f"{library}/pathlib.py"))
    assert not is_own_fault(traceback("train.py", str(agent.__file__), "model.py"))
    assert not is_own_fault(traceback("train.py", str(agent.__file__), f"{library}/site-packages/torch/optim/adamw.py"))
    assert not is_own_fault("killed")


def test_what_a_trials_own_mkdir_passes_on_is_not_our_fault() -> None:
    import autoprec.trial.inside.isolate.overlay_calls as calls
    from autoprec.trial.driver.classify import is_own_fault

    frame = (
        f'  File "train.py", line 3, in <module>\n    os.mkdir("out")\n  File "{calls.__file__}", line 294, in make\n'
    )
    error = "FileExistsError: [Errno 17] File exists: 'out'\n"
    assert not is_own_fault(f"{frame}    original(place, *args, **kwargs)\n{error}")
    assert is_own_fault(f"{frame}    place = self.nowhere[path]\n{error}")
