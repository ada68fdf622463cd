"""Which line runs: the script's, past the frames of PyTorch, Python and AutoPrec."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import autoprec
from autoprec.graph import places
from autoprec.graph.places import caller, raised_at


def test_the_innermost_line_is_named_also_below_torch_and_the_standard_library() -> None:
    seen: list[str] = []

    class Probe(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.ExitStack() as stack:
                stack.callback(lambda: seen.append(caller()))
            return x

    Probe()(torch.ones(1))
    file, _, line = seen[0].rpartition(":")
    text = Path(file).read_text().splitlines()[int(line) - 1]
    assert file == __file__
    assert "seen.append(caller())" in text


def test_the_script_s_own_line_comes_before_that_of_a_library(monkeypatch) -> None:
    script = SimpleNamespace(f_code=SimpleNamespace(co_filename="/home/me/train.py"), f_lineno=7, f_back=None)
    library = SimpleNamespace(
        f_code=SimpleNamespace(co_filename="/env/site-packages/models/llama.py"), f_lineno=3, f_back=script
    )
    monkeypatch.setattr(places.sys, "_getframe", lambda _: library)
    assert caller() == "/env/site-packages/models/llama.py:3"
    assert caller(own=True) == "/home/me/train.py:7"
    library.f_back = None
    assert caller(own=True) == "/env/site-packages/models/llama.py:3"
    monkeypatch.setattr(places.sys, "_getframe", lambda _: None)
    assert caller() == ""


@pytest.mark.parametrize(
    "fails",
    [
        lambda: torch.nn.functional.linear(torch.ones(2), torch.ones(2, 2, dtype=torch.bfloat16)),
        lambda: torch.nn.Linear(2, 2)(torch.ones(3)),
        lambda: torch.ones(2).backward(),
        lambda: json.loads("{"),
        lambda: autoprec.load("nowhere.yaml"),
        lambda: 1 / 0,
    ],
)
def test_an_error_is_raised_at_the_line_of_the_script(fails: Callable[[], object]) -> None:
    """It was that of PyTorch's code, or of ours, wherever a policy meets a script that it does not fit."""
    with pytest.raises(Exception) as raised:  # noqa: PT011
        fails()
    name, _, line = raised_at(raised.tb).partition(":")
    assert name == Path(__file__).name
    assert "lambda" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_where_no_line_of_a_script_is_known_the_innermost_is_named() -> None:
    assert raised_at(None) == ""
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("{")
    assert raised.tb.tb_next is not None
    assert raised_at(raised.tb.tb_next).startswith("decoder.py:")
