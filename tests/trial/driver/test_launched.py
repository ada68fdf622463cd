"""A launcher's report of a failure does not hide what the script said: the outputs are real ones, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.classify import classify, last_lines
from autoprec.trial.driver.failures import script_failed
from autoprec.trial.driver.launched import own_words

COMMAND = ScriptCommand("script", "train.py", (), Path("/"))
BROKEN = 'Traceback (most recent call last):\n  File "train.py", line 27, in <module>\n    f()\n{error}\n'


def _torchrun(*failures: tuple[int, str]) -> str:
    """What torchrun says itself, of ranks and what it knows of each; the last one failed first."""
    frames = "".join(
        f'  File "/lib/python3.12/site-packages/torch/distributed/{name}", line {line}, in main\n    run(args)\n'
        for line, name in enumerate(["run.py", *[f"launcher/api{i}.py" for i in range(11)]])
    )
    told = [f"[{i}]:\n  rank      : {rank} (local_rank: {rank})\n  exitcode  : 1 (pid: 7)\n  error_file: <N/A>\n"
            f"  traceback : {what}\n" for i, (rank, what) in enumerate(failures)]  # fmt: skip
    return (
        "W1129 22:47:29.278000 25210 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 7 closing\n"
        "E1129 22:47:29.280000 25210 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)\n"
        f"Traceback (most recent call last):\n{frames}    raise ChildFailedError(\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"{'=' * 60}\ntrain.py FAILED\n{'-' * 60}\nFailures:\n{''.join(told[:-1]) or '  <NO_OTHER_FAILURES>' + chr(10)}"
        f"{'-' * 60}\nRoot Cause (first observed failure):\n{told[-1]}{'=' * 60}\n"
    )


def _ranks(text: str, *ranks: int) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for rank in ranks for line in text.splitlines())


ENABLE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
ENDED = "Signal 15 (SIGTERM) received by PID 7"
KILLED = "Signal 9 (SIGKILL) received by PID 8"
SAID = BROKEN.format(error="ValueError: bad config")
ACCELERATE = (
    'Traceback (most recent call last):\n  File "/lib/site-packages/accelerate/commands/launch.py", line 9, in x\n'
    "    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)\n"
    "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.\n"
)


@pytest.mark.parametrize(
    ("output", "left"),
    [
        pytest.param(_ranks(SAID, 0, 1) + _torchrun((1, ENABLE), (0, ENABLE)), SAID, id="both ranks"),
        pytest.param(_ranks(SAID, 1) + _torchrun((0, ENDED), (1, ENABLE)), SAID, id="rank 1 alone"),
        pytest.param(
            _ranks("ConnectionError: peer", 0) + _ranks(SAID, 1) + _torchrun((0, ENABLE), (1, ENABLE)),
            SAID,
            id="rank 0 fails as rank 1 has left",
        ),
        pytest.param("loading\n" + SAID + _torchrun((0, ENABLE)), "loading\n" + SAID, id="before a process group"),
        pytest.param(
            "python: can't open file 'train.py'\n" + _torchrun((0, ENABLE)), "python: can't open file 'train.py'\n",
            id="no such file",
        ),
        pytest.param(
            "loading\n" + _torchrun((0, ENDED), (1, KILLED)), f"loading\nrank 1: {KILLED}\n", id="a rank was killed"
        ),
        pytest.param("loading\n" + SAID + ACCELERATE, "loading\n" + SAID, id="accelerate"),
        pytest.param(_torchrun((0, ENABLE)), _torchrun((0, ENABLE)), id="nobody else spoke"),
        pytest.param("step 1\nstep 2\n", "step 1\nstep 2\n", id="no failure"),
        pytest.param(SAID, SAID, id="no launcher"),
        pytest.param("", "", id="silent"),
        pytest.param(
            BROKEN.format(error="subprocess.CalledProcessError: Command 'make' returned 2."),
            BROKEN.format(error="subprocess.CalledProcessError: Command 'make' returned 2."),
            id="the script's own child",
        ),
    ],
)  # fmt: skip
def test_the_scripts_own_words_are_left(output: str, left: str) -> None:
    assert own_words(output) == left


def test_a_rank_that_lacks_a_module_is_answered_with_its_installation() -> None:
    lacks = _ranks(BROKEN.format(error="ModuleNotFoundError: No module named 'einops'"), 0, 1)
    error = script_failed(COMMAND, 1, own_words(lacks + _torchrun((1, ENABLE), (0, ENABLE))))
    assert error.fix.endswith("-m pip install einops")
    assert "ChildFailedError" not in error.what


def test_what_is_shown_holds_the_cause() -> None:
    """The launcher's report is as long as what is shown."""
    output = _ranks(SAID, 0, 1) + _torchrun((1, ENABLE), (0, ENABLE))
    assert "bad config" not in last_lines(output)
    assert "bad config" in last_lines(own_words(output))


def test_a_rank_that_the_kernel_killed_is_out_of_memory() -> None:
    tail = own_words("loading\n" + _torchrun((0, ENDED), (1, KILLED)))
    assert classify(None, 1, timed_out=False, timeout_s=1, tail=tail).status == "oom"
