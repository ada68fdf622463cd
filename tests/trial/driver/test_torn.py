"""A kill in the middle of a compilation leaves a file that is no library: it is removed, and compiled again."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.driver.torn import remove_torn
from autoprec.trial.protocol import TrainSpec

SAYS = "torch._inductor.exc.InductorError: ImportError: {}: {}\n\nSet TORCHDYNAMO_VERBOSE=1"


@pytest.mark.parametrize(
    ("name", "why", "removed"),
    [
        ("ue/cueayxgagick.main.so", "file too short", True),
        ("ue/cueayxgagick.so", "invalid ELF header", True),
        ("a b/ue/cueayxgagick.main.so", "cannot read file data: Is a directory", True),
        ("ue/cueayxgagick.main.so", "undefined symbol: _Z3foov", False),
        ("lib/libcudart.so", "file too short", False),
        ("ue/libcueayx.so", "file too short", False),
        ("ue/cueayxgagick.cpp", "file too short", False),
    ],
)
def test_only_a_cut_off_library_of_torchs_cache_is_removed(tmp_path: Path, name: str, why: str, removed: bool) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x7fELF")
    assert remove_torn(SAYS.format(path, why)) is removed
    assert path.exists() is not removed
    assert not remove_torn(SAYS.format(path, why)), "one that is gone is not the cause"


SCRIPT = """\
import ctypes, os, sys, torch
path = "{path}"
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def load(name):
    if not os.path.exists(path + name):
        with open(path + name, "w") as file:
            file.write("compiled")
    if os.path.getsize(path + name) == 0:
        raise ImportError(f"{{path}}{{name}}: file too short")
for step in range(20):
    load("first.so" if step < 3 else "later.so")
    loss = model(torch.ones(4, 16)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.mark.usefixtures("warm")
def test_a_script_whose_compilation_was_killed_runs_again(tmp_path: Path) -> None:
    """A kill left an empty library, and each search after it ended with it; a trial of a policy would have failed."""
    (tmp_path / "ue").mkdir()
    for name in ("first.so", "later.so"):
        (tmp_path / "ue" / f"cue{name}").touch()
    (tmp_path / "train.py").write_text(SCRIPT.format(path=tmp_path / "ue" / "cue"))
    with TrialRunner(ScriptCommand.parse(("train.py",), tmp_path)) as runner:
        assert runner.start().layers
        result = runner.run(TrainSpec(steps=5))
    assert (result.status, result.reason) == ("ok", "")
    assert not (tmp_path / "ue" / "cuelater.so").exists(), "what a trial writes is its own"
