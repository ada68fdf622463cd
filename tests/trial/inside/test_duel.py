"""A duel times policies in one process: on forks and on plain processes, as far as a script goes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.policy import OptimizerPolicy, Policy
from autoprec.precision.hardware import cpu_bf16_units
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.trial.inside.duel import Duel, ratios_of, undecided
from autoprec.trial.intervals import FEWEST, median_interval
from autoprec.trial.protocol import REFERENCE, DuelSpec, Probe, TrainSpec, TrialResult
from autoprec.tuning.libraries.choice import fastest, run_by
from autoprec.tuning.timing.in_turns import contenders
from tests.trial.conftest import uniform

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    x = torch.randn(64, 64)
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A duel ends by its process's own seconds: those on the clock say how busy this machine is."""
    monkeypatch.setattr("autoprec.trial.inside.duel._BUSY", 1000.0)


def duel(host: Any, folder: Path, steps: int, launch: str = "auto", ends_after: int | None = None) -> TrialResult:
    path = folder / "train.py"
    path.write_text(SCRIPT)
    probes = (Probe("empty", Policy().to_dict()), Probe("emulated", uniform("fp8")))
    spec = DuelSpec(
        probes=probes, backend="emulated", within_s=2.0, precision=0.02, timeout_s=60.0, ends_after=ends_after
    )
    with host(str(path), str(steps), launch=launch) as runner:
        result: TrialResult = runner.run(spec)
    return result


@pytest.mark.parametrize(
    ("speeds", "still_open"),
    [
        ({"slower": (0.6, 0.9)}, []),  # by how much is not known well, and changes no answer
        ({"slower": (0.6, 0.9), "faster": (1.1, 1.6)}, ["faster"]),
        ({"as fast": (0.9, 1.1)}, ["as fast"]),
        ({"less fast": (1.05, 1.2), "faster": (1.3, 1.6)}, ["faster"]),
        ({"faster": (1.30, 1.31)}, []),
    ],
)
def test_who_is_surely_slower_than_the_script_or_another_is_timed_no_more(
    speeds: dict[str, tuple[float, float]], still_open: list[str]
) -> None:
    grid = [k / 11 for k in (0, 7, 3, 9, 1, 11, 5, 8, 2, 10, 4, 6)]
    rounds = [
        {REFERENCE: 100.0} | {name: 100.0 / (low + at * (high - low)) for name, (low, high) in speeds.items()}
        for at in grid
    ]
    assert undecided(rounds, [REFERENCE, *speeds], 0.02) == still_open
    few = undecided(rounds[: FEWEST - 1], [REFERENCE, *speeds], 0.02)
    assert few == list(speeds)


@pytest.mark.parametrize("launch", ["auto", "process"])
def test_what_is_slower_is_surely_slower_and_an_empty_policy_is_neither(host: Any, tmp_path: Path, launch: str) -> None:
    result = duel(host, tmp_path, 100_000, launch)
    assert result.ok, result.reason
    rounds = result.answer.rounds
    _, _, slow = median_interval(ratios_of(rounds, "emulated"))
    middle, low, high = median_interval(ratios_of(rounds, "empty"))
    assert slow < 0.9
    assert low <= middle <= high
    assert slow < low < 1.33  # other tests run beside: blocks of equal work differ by 17 % there
    assert high > 0.75


def named(backend: str, recipe: str = "fp8_rowwise") -> Probe:
    policy = Policy(recipes={recipe: BUILTIN_RECIPES[recipe]}, default=recipe).to_dict()
    return Probe(backend, run_by(policy, {"backend": backend, "device": "cpu"}))


def test_a_policy_is_timed_by_each_backend_that_can_run_it_here(host: Any, tmp_path: Path) -> None:
    """On this CPU all is emulated, by this package and by torchao: what is tested is who ran it, not how fast."""
    pytest.importorskip("torchao.float8")
    (tmp_path / "train.py").write_text(SCRIPT)
    probes = (named("native"), named("torchao"), named("transformer_engine"), Probe("empty", Policy().to_dict()))
    spec = DuelSpec(probes=probes, within_s=60.0, precision=10.0, timeout_s=120.0, by_backend=True)
    with host(str(tmp_path / "train.py"), "100000") as runner:
        result = runner.run(spec)
    assert result.ok, result.reason
    found = result.answer
    assert found.refused.keys() == {"transformer_engine"}
    assert "was found with backend 'transformer_engine', which cannot run here" in found.refused["transformer_engine"]
    assert all(ms.keys() == {REFERENCE, "native", "torchao", "empty"} for ms in found.rounds)
    row = fastest(found.rounds, ["native", "torchao", "transformer_engine"], "cpu")
    assert row["backend"] in ("native", "torchao")
    middle = median_interval([ms["native"] / ms["torchao"] for ms in found.rounds])
    assert (row["backend"] == "torchao") is (middle[1] > 1.0)


@pytest.mark.parametrize("launch", ["auto", "process"])
@pytest.mark.parametrize(("optimizer", "refused"), [("AdamW", False), ("RMSprop", True)])
def test_a_fused_update_is_timed_and_taken_off_again(
    host: Any, tmp_path: Path, launch: str, optimizer: str, refused: bool
) -> None:
    """Of forty small matrices the update takes longer than the rest of the step, by a kernel for each operation."""
    script = SCRIPT.replace("SGD(", f"{optimizer}(").replace("nn.GELU()", "*[nn.Linear(256, 256) for _ in range(20)]")
    (tmp_path / "train.py").write_text(script)
    fused = Policy(optimizer=OptimizerPolicy(update="fused")).to_dict()
    probes = (Probe("fused", fused), Probe("empty", Policy().to_dict()))
    with host(str(tmp_path / "train.py"), "100000", launch=launch) as runner:
        result = runner.run(DuelSpec(probes=probes, within_s=2.0, precision=0.02, timeout_s=60.0))
        alone = runner.run(TrainSpec(steps=2, warmup=1, policy=fused))
    assert result.ok, result.reason + result.tail
    assert ("RMSprop has no fused step" in result.answer.refused.get("fused", "")) is refused
    if refused:
        assert alone.status == "unsupported"
        return
    rounds = result.answer.rounds
    assert median_interval(ratios_of(list(rounds), "fused"))[1] > 1.0
    assert median_interval(ratios_of(list(rounds), "empty"))[1] < 1.1
    assert alone.audit["operators"]["optimizer.update"]["executed"] == "fused"


MUON = """
class Muon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            x = p.grad.to(DTYPE) / p.grad.norm()
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
            p.sub_(x, alpha=0.001)
"""


@pytest.mark.parametrize("launch", ["auto", "process"])
def test_products_of_a_step_are_timed_in_another_dtype_and_taken_back(host: Any, tmp_path: Path, launch: str) -> None:
    """The script multiplies in the dtype that this CPU is slower in."""
    slow, fast = ("bfloat16", "fp32") if cpu_bf16_units() == () else ("float32", "bf16")
    script = SCRIPT.replace("torch.manual_seed", MUON.replace("DTYPE", f"torch.{slow}") + "torch.manual_seed", 1)
    script = script.replace(
        "(64, 256), nn.GELU(), nn.Linear(256, 64)", "(64, 512), nn.Linear(512, 512), nn.Linear(512, 64)"
    )
    script = script.replace(
        "torch.optim.SGD(model.parameters(), lr=0.01)",
        "Muon([model[1].weight], {}); rest = torch.optim.SGD(model[2].parameters(), lr=0.01)",
    ).replace("    optimizer.step()", "    optimizer.step(); rest.step()")
    (tmp_path / "train.py").write_text(script)
    other = Policy(optimizer=OptimizerPolicy(products=fast)).to_dict()  # type: ignore[arg-type]
    probes = (Probe("other", other), Probe("empty", Policy().to_dict()))
    with host(str(tmp_path / "train.py"), "100000", launch=launch) as runner:
        result = runner.run(DuelSpec(probes=probes, within_s=2.0, precision=0.02, timeout_s=60.0))
        alone = runner.run(TrainSpec(steps=2, warmup=1, policy=other))
    assert result.ok, result.reason + result.tail
    rounds = list(result.answer.rounds)
    assert median_interval(ratios_of(rounds, "other"))[1] > 1.3
    assert median_interval(ratios_of(rounds, "empty"))[1] < 1.1
    assert alone.audit["operators"]["optimizer.products"]["executed"] == fast
    assert alone.audit["ok"]


def test_a_script_that_ends_gives_the_rounds_it_had(host: Any, tmp_path: Path) -> None:
    result = duel(host, tmp_path, 40)
    assert result.ok
    assert result.answer.steps == 40


@pytest.mark.parametrize("steps", [40, 60])
def test_a_process_that_knows_when_the_script_ends_has_its_rounds_by_then(
    host: Any, tmp_path: Path, steps: int
) -> None:
    count = contenders(steps)
    assert count is not None
    assert count >= 2
    result = duel(host, tmp_path, steps, "process", ends_after=steps)
    assert result.ok
    assert len(result.answer.rounds) >= FEWEST // 2
    assert result.answer.steps == steps


@pytest.mark.parametrize("ends_after", [20, 60, 200, 5000, None])
def test_blocks_are_as_short_as_the_script_has_steps_for(ends_after: int | None) -> None:
    made: Any = SimpleNamespace(_spec=DuelSpec(ends_after=ends_after), _lanes=dict.fromkeys("abc"))
    room = Duel._room(made, 9)
    if ends_after is None:
        assert room == 32
    else:
        used = 9 + 2 + (room + 1) * (3 * FEWEST // 2 + 1)
        assert used <= ends_after < used + 3 * FEWEST // 2 + 1


COMPILED = """
import sys, torch
from torch import nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 64)
    def forward(self, x):
        return x + torch.tanh(self.up(x))
class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
model = Stack()
call = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    x = torch.randn(64, 64)
    loss = (call(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("by_block", [False, True])
def test_a_duels_own_seconds_begin_when_all_that_compiles_has_settled(
    host: Any, tmp_path: Path, by_block: bool
) -> None:
    """Compiling takes seconds, a duel a fraction of one: it still has the rounds that an interval takes."""
    path = tmp_path / "train.py"
    path.write_text(COMPILED)
    policies = {"bf16": uniform("bf16"), "autocast": Policy(activations="bf16").to_dict(), "fp8": uniform("fp8")}
    probes = tuple(Probe(*named) for named in policies.items())
    within = {"within_s": 1.0, "precision": 0.0, "timeout_s": 60.0}
    spec = DuelSpec(probes=probes, backend="emulated", by_block=by_block, **within)
    with host(str(path), "100000") as runner:
        result = runner.run(spec)
        plain = runner.run(TrainSpec(steps=4, warmup=2, by_block=by_block))
    assert result.ok, result.reason + result.tail
    found = result.answer
    assert found.settled_s > 0.0
    assert not found.refused
    assert len(found.rounds) >= FEWEST
    assert set(found.rounds[0]) == {"", *policies}
    assert plain.blocks == (3 if by_block else 0)
