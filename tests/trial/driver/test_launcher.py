"""What the runners of one command share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.launcher import Launcher
from autoprec.trial.processes import MADE
from autoprec.trial.protocol import TrainSpec


def test_one_launcher_per_command_until_the_last_leaves(tmp_path: Path) -> None:
    command = ScriptCommand("script", "train.py", (), tmp_path)
    first, second = Launcher.join(command), Launcher.join(ScriptCommand("script", "train.py", (), tmp_path))
    assert first is second
    assert first.new_mark() != first.new_mark()
    assert first.new_mark().startswith(first.mark)
    assert not first.ready
    assert first.fork({}, {}, "m", None) is None  # no zygote yet
    folder = Path(first.address).parent
    first.leave()
    assert folder.exists()
    (tmp_path / "tmpx").mkdir()
    (tmp_path / "kept").symlink_to(tmp_path)
    (folder / MADE).write_text(f"{tmp_path}/tmpx\n{tmp_path}/kept\n{tmp_path}/gone\n")
    second.leave()
    assert not folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"], "what the script made in trials; no link is followed"
    third = Launcher.join(command)
    assert third is not first
    third.leave()


#: Stops where it was copied, as CUDA does after ``torch.cuda.is_available()`` without NVML; its loss says how many
#: worker processes loaded the data.
COPIED = """
import os, threading
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
class Items(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((4,), -1.0 if get_worker_info() is None else 2.0)
pid = os.getpid()
loader = DataLoader(Items(), batch_size=4, num_workers=2)
torch.manual_seed(0)
if os.getpid() != pid and "spoilt" in os.sys.argv:
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
threading.Thread(target=threading.Event().wait, daemon=True).start()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for x in loader:
    (x.mean() + 0.0 * model(x).sum()).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_copy_that_cannot_be_used_is_not_used_again_and_workers_load(spoilt: bool, host: Any, tmp_path: Path) -> None:
    """On a GPU: an obstacle to forking, a zygote left before the first seed, and trials with the script's workers."""
    script = tmp_path / "copied.py"
    script.write_text(COPIED)
    with host(str(script), *(["spoilt"] if spoilt else [])) as runner:
        assert runner.start().launch == ("process" if spoilt else "zygote")
        for _ in range(2):
            result = runner.run(TrainSpec(steps=3, warmup=1))
            assert result.ok, result.tail
            assert set(result.losses) == {2.0}
        with host(str(script), *(["spoilt"] if spoilt else []), seed_offset=1) as further:
            further.adopt(runner.start())
            assert further.start() == runner.start()
            assert further.run(TrainSpec(steps=3, warmup=1)).ok
            assert further._host is None, "no host was needed"
        assert runner._launcher.ready is not spoilt
