"""What dispatch modes need beside torch's own class: Dynamo kept out of their methods, without importing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo out of a dispatch method and what it calls; unlike torch's own way it does not import Dynamo.

    Under a dispatch mode Dynamo leaves the script's frames to Python; inside the mode's method, where the mode is off,
    it would begin again, and compile each operator by itself: forward outputs then have other dtypes than the
    backward pass expects of them (the statistics of a norm under autocast), and every operator takes seconds.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
