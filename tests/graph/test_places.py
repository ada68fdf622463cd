"""Which line runs: the script's, past the frames of PyTorch, Python and AutoPrec."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import torch

from autoprec.graph import places
from autoprec.graph.places import caller


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
