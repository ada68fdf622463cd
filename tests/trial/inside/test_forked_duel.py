"""Contenders of a duel in processes of their own: timed apart, one for each block, and refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoprec.policy import Policy
from autoprec.trial.inside import forked_duel
from autoprec.trial.inside.duel import ratios_of
from autoprec.trial.intervals import FEWEST, median_interval
from autoprec.trial.protocol import REFERENCE, DuelSpec, Probe, TrialResult
from tests.trial.conftest import uniform
from tests.trial.inside.test_duel import COMPILED, SCRIPT, named


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A duel ends by its processes' own seconds: those on the clock say how busy this machine is."""
    monkeypatch.setattr("autoprec.trial.inside.duel._BUSY", 1000.0)


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes part is asked, not how fast one is: a block is as long as a few steps."""
    monkeypatch.setattr(forked_duel, "_BLOCK_S", 0.02)


CRASHES = """
    if step == 3 and model[0].weight.dtype == torch.float32 and type(model[0]) is not nn.Linear:
        raise RuntimeError("this one fails")
"""


def duel(host: Any, folder: Path, steps: int, *probes: Probe, script: str = SCRIPT, **changes: Any) -> TrialResult:
    path = folder / "train.py"
    path.write_text(script)
    # the fewest rounds end it, long before its time is up: of that, settling has its share, and a slow machine's first
    # step takes more than a short duel's
    usual: dict[str, Any] = {"within_s": 10.0, "precision": 1.0, "timeout_s": 60.0, "side_by_side": len(probes) + 1}
    spec = DuelSpec(probes=probes, **({"backend": "emulated"} | usual | changes))
    with host(str(path), str(steps)) as runner:
        result: TrialResult = runner.run(spec)
    return result


EMPTY, SLOW = Probe("empty", Policy().to_dict()), Probe("emulated", uniform("fp8"))


def test_what_is_slower_is_surely_slower_and_an_empty_policy_is_neither(host: Any, tmp_path: Path) -> None:
    # until it is known within 3 %: of the fewest rounds the median is off by a quarter on a busy machine
    result = duel(host, tmp_path, 100_000, EMPTY, SLOW, within_s=3.0, precision=0.03)
    assert result.ok, result.reason
    rounds = result.answer.rounds
    _, _, slow = median_interval(ratios_of(rounds, "emulated"))
    middle, low, high = median_interval(ratios_of(rounds, "empty"))
    assert slow < 0.9
    assert low <= middle <= high
    assert slow < low < 1.33  # other tests run beside: blocks of equal work differ by 17 % there
    assert high > 0.75


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("side_by_side", [1, 2])
def test_contenders_have_the_threads_of_the_script(
    side_by_side: int, host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that they are forks of has one, and would otherwise be their end."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    more = '    if torch.get_num_threads() != 3: raise RuntimeError("threads")\n'
    script = SCRIPT.replace(
        "torch.manual_seed(0)", "torch.manual_seed(0)\ntorch.randn(600, 600) @ torch.randn(600, 600)"
    )
    assert script != SCRIPT
    result = duel(host, tmp_path, 4000, EMPTY, script=script + more, side_by_side=side_by_side, alone=True)
    assert result.ok, result.reason + result.tail
    assert result.answer.refused == {}
    assert result.answer.rounds


def test_each_block_has_a_process_of_its_own_also_of_a_script_shorter_than_a_block(host: Any, tmp_path: Path) -> None:
    found = duel(host, tmp_path, 4, EMPTY).answer
    assert len(found.rounds) > 1
    assert found.steps == 2 * 2 * len(found.rounds)  # two of four are not timed


def test_ten_steps_go_by_before_a_block_unless_they_are_long(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two steps each still asked the system for pages, and a policy was said to gain 6 % less than it does."""
    found = duel(host, tmp_path, 14, EMPTY).answer
    assert found.steps == 4 * 2 * len(found.rounds)
    monkeypatch.setattr(forked_duel, "_SETTLING_S", 0.0)  # now any step is long
    monkeypatch.setattr(forked_duel, "_BLOCK_S", 1e-9)
    found = duel(host, tmp_path, 9, EMPTY).answer
    assert found.steps == 2 * len(found.rounds)


def test_a_script_without_a_step_to_time_gives_no_round(host: Any, tmp_path: Path) -> None:
    found = duel(host, tmp_path, 2, EMPTY).answer
    assert not found.rounds


@pytest.mark.usefixtures("short_blocks")
def test_a_policy_that_cannot_be_applied_is_refused_and_the_others_are_timed(host: Any, tmp_path: Path) -> None:
    wrong = Probe("wrong", uniform("fp8", match="nothing.like.this"))
    found = duel(host, tmp_path, 100_000, EMPTY, wrong).answer
    assert list(found.refused) == ["wrong"]
    assert "nothing.like.this" in found.refused["wrong"]
    assert found.rounds
    assert found.rounds[0].keys() == {REFERENCE, "empty"}


@pytest.mark.usefixtures("short_blocks")
def test_a_contender_that_crashes_is_refused(host: Any, tmp_path: Path) -> None:
    found = duel(host, tmp_path, 100_000, EMPTY, SLOW, script=SCRIPT + CRASHES).answer
    assert found.refused == {"emulated": "RuntimeError: this one fails"}
    assert found.rounds


def test_a_reference_that_crashes_fails_the_duel(host: Any, tmp_path: Path) -> None:
    script = SCRIPT + "    if step == 1: raise RuntimeError('always')\n"
    result = duel(host, tmp_path, 100_000, EMPTY, script=script)
    assert not result.ok
    assert "RuntimeError: always" in result.reason


@pytest.mark.usefixtures("compiler", "short_blocks")
def test_what_compiles_does_so_in_each_block_and_off_its_clock(host: Any, tmp_path: Path) -> None:
    """In one process a duel cannot see by how much two processes of one program differ."""
    result = duel(host, tmp_path, 100_000, Probe("bf16", uniform("bf16")), script=COMPILED, within_s=0.5)
    assert result.ok, result.reason + result.tail
    found = result.answer
    assert found.block == 0
    assert not found.refused
    assert len(found.rounds) >= FEWEST
    assert found.settled_s > 0.5, "compiling takes a process a few tenths of a second"


ALONE = """
    if step > 1:
        import socket, time
        held = socket.socket(socket.AF_UNIX)
        held.bind(chr(0) + "autoprec " + __file__)  # one process at a time can have this address
        time.sleep(0.01)
        held.close()
"""


@pytest.mark.usefixtures("short_blocks")
def test_two_begin_at_once_and_none_trains_beside_one_that_is_timed(host: Any, tmp_path: Path) -> None:
    found = duel(host, tmp_path, 100_000, EMPTY, SLOW, script=SCRIPT + ALONE, side_by_side=3).answer
    assert not found.refused
    assert len(found.rounds) >= FEWEST


@pytest.mark.usefixtures("short_blocks")
def test_one_that_hangs_before_its_turn_is_ended_after_one_deadline(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ended = forked_duel.await_answer, list[int]()

    def told(pid: int, reader: int, limit_s: float) -> Any:
        found = real(pid, reader, limit_s)
        ended.append(pid)
        return f"{found} after {limit_s:g} s, process {len(ended)}" if isinstance(found, str) else found

    monkeypatch.setattr(forked_duel, "await_answer", told)
    hangs = "    while type(model[0]) is not nn.Linear: pass\n    optimizer.zero_grad()"
    script = SCRIPT.replace("    optimizer.zero_grad()", hangs)
    found = duel(host, tmp_path, 100_000, EMPTY, SLOW, script=script, side_by_side=3, timeout_s=4.0).answer
    # before the other takes its turn: what hangs uses a core
    assert found.refused == {"emulated": "no block of steps: the deadline passed after 0.1 s, process 1"}


@pytest.mark.usefixtures("compiler", "short_blocks")
def test_two_compile_side_by_side(host: Any, tmp_path: Path) -> None:
    probes = Probe("bf16", uniform("bf16")), Probe("fp8", uniform("fp8"))
    result = duel(host, tmp_path, 100_000, *probes, script=COMPILED, within_s=0.5, side_by_side=3)
    assert result.ok, result.reason + result.tail
    assert not result.answer.refused
    assert len(result.answer.rounds) >= FEWEST


LOADS = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)

class Slow(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, at):
        end = time.process_time() + 0.003
        while time.process_time() < end:
            pass
        return torch.randn(16)

model = nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x in DataLoader(Slow(), batch_size=8, num_workers=1):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def test_loading_that_workers_would_do_is_not_on_the_clock(host: Any, tmp_path: Path) -> None:
    found = duel(host, tmp_path, 0, EMPTY, script=LOADS, within_s=0.3).answer
    assert found.rounds
    assert all(ms < 12.0 for ms in found.rounds[0].values())  # 24 ms of loading


@pytest.mark.usefixtures("short_blocks")
def test_a_policy_that_its_backend_cannot_run_is_refused_and_vetoes_nobody(host: Any, tmp_path: Path) -> None:
    probes = (named("native"), named("transformer_engine"))
    found = duel(host, tmp_path, 100_000, *probes, backend="auto", by_backend=True).answer
    assert found.refused.keys() == {"transformer_engine"}
    assert "cannot run here" in found.refused["transformer_engine"]
    assert sum("native" in ms for ms in found.rounds) >= 6
    free = duel(host, tmp_path, 100_000, *probes, backend="auto").answer
    assert free.refused == {}, "elsewhere native runs what a library cannot"
