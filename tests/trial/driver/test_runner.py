"""Every kind of script runs unmodified: losses equal the script's own log, trials pair, the scan answers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import socket
import sqlite3
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import NothingAcceptableError, ScriptError
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.results import load_result
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.inside import first_step
from autoprec.trial.messages import connect, listen, send_message
from autoprec.trial.protocol import Probe, RecordSpec, ScanSpec, TrainSpec, TrialResult, TrialSpec
from tests.trial.conftest import SCRIPTS, uniform
from tests.warm import run_forked

STEPS = 5
KINDS: dict[str, tuple[str, ...]] = {
    "plain": ("plain.py",),
    "closure": ("closure.py",),
    "gan": ("gan.py",),
    "ema": ("ema.py",),
    "no_optimizer": ("no_optimizer.py",),
    "copies": ("copies.py",),
    "accumulation": ("accumulation.py",),
    "gradscaler": ("gradscaler.py",),
    "autocast": ("autocast.py",),
    "checkpointing": ("checkpointing.py",),
    "compiled": ("compiled.py",),
    "loader": ("loader.py",),
    "iterable": ("loader.py", "--iterable"),
    "session": ("session.py",),
    "registered": ("registered.py",),
    "autograd_grad": ("autograd_grad.py",),
    "functional": ("functional.py",),
    "throwaway": ("throwaway.py",),
    "writer": ("writer.py",),
    "reloads": ("reloads.py",),
    "unseen": ("unseen.py",),
    "hf_trainer": ("hf_trainer.py",),
    "accelerated": ("accelerated.py",),
    "lightning": ("lightning_fit.py",),
}
NEEDS = {"hf_trainer": "transformers", "accelerated": "accelerate", "lightning": "lightning"}


TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2")
WITHOUT_UPDATE = ("gradscaler",)


def logged(path: Path) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", path.read_text())]


@pytest.mark.usefixtures("compiler")
def test_a_trial_may_compile_what_the_script_does_not(host: Any) -> None:
    policy = uniform("bf16") | {"execution": "compile"}
    with host("plain.py") as runner:
        info = runner.start()
        plain = runner.run(TrainSpec(steps=3, warmup=1, policy=uniform("bf16")))
        compiled = runner.run(TrainSpec(steps=3, warmup=1, policy=policy))
    assert not info.compiled
    assert compiled.status == "ok", compiled.reason + compiled.tail
    assert compiled.audit is not None
    assert compiled.audit["operators"]["execution"]["executed"] == "compile"
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind: str, host: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if kind == "compiled":
        request.getfixturevalue("compiler")
    if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
        pytest.skip(f"{NEEDS[kind]} is not installed")
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "existing.txt").write_text("precious\n")
    with host(*KINDS[kind]) as runner:
        info = runner.start()
        first = runner.run(TrainSpec(steps=STEPS - 1, warmup=2))  # memory is measured in the second step
        bf16 = runner.run(TrainSpec(steps=STEPS, warmup=1, policy=uniform("bf16")))
        probes = (Probe("none", {"schema": "autoprec.policy/1"}), Probe("bf16", uniform("bf16")))
        scan = runner.run(ScanSpec(warmup=1, probes=probes))
    assert info.launch == "fork"
    assert info.compiled == (kind == "compiled")
    assert first.status == "ok", first.reason + first.tail
    assert len(first.losses) == STEPS + 1
    assert bf16.status == "ok", bf16.reason + bf16.tail
    assert bf16.losses != first.losses or kind == "autocast"
    assert first.memory_bytes > 0
    assert all(ms >= 0 for ms in first.step_ms)
    assert first.samples > 0 or kind == "unseen"
    assert scan.status == "ok", scan.reason + scan.tail
    # a GAN's scan starts after the discriminator's part of the step; after skipped steps it starts later
    if kind not in ("gan", "gradscaler"):
        assert scan.answer.reference_loss == pytest.approx(first.losses[1], rel=1e-6)  # paired with the trial
    rows = {row.id: row for row in scan.answer.probes}
    if kind not in WITHOUT_UPDATE:
        assert rows["none"].gradient_error == 0.0
        assert 0 < rows["bf16"].gradient_error < 0.1 or kind == "autocast"
        assert scan.answer.gradient_noise > 0.05
    assert [p.name for p in (tmp_path / "user").iterdir()] == ["existing.txt"]
    assert (tmp_path / "user" / "existing.txt").read_text() == "precious\n"


@pytest.mark.slow
def test_losses_equal_the_scripts_own_log_and_a_plain_run(host: Any, tmp_path: Path) -> None:
    """A real interpreter, once: injection, a module, a second seed and the zygote mode, both forked from the first."""
    plain = run_forked([SCRIPTS / "plain.py", "--steps", "6"], tmp_path)
    own = [float(x) for x in re.findall(r"loss ([\d.]+)", plain.stdout)]
    (tmp_path / "user").mkdir()
    shutil.copy(SCRIPTS / "plain.py", tmp_path / "user" / "my_train.py")
    module = ("-m", "my_train")
    with (
        host(*module, real=True) as runner,
        host(*module, real=True, seed_offset=1) as third,
        host(*module, real=True, launch="zygote") as second,
    ):
        info = runner.start()
        forked = runner.run(TrainSpec(steps=5, warmup=1))
        other = third.run(TrainSpec(steps=5, warmup=1))
        assert second.start().launch == "zygote"
        zygote = second.run(TrainSpec(steps=5, warmup=1))
        for each in (runner, third):  # the zygote that the third was forked from is a child of the first
            began = time.monotonic()
            each.close()
            assert time.monotonic() - began < 15
    assert info.launch == "fork"
    assert [round(x, 6) for x in forked.losses] == own
    assert zygote.losses == forked.losses
    assert zygote.start_s < 20
    assert other.ok
    assert other.losses != forked.losses
    assert forked.start_s < 5.0  # 0.05 s on a quiet machine, where a new process takes 5 s


FRESH = """
import os, sqlite3, torch

torch.manual_seed(0)
os.makedirs("out/run")  # fails where it is already
databases = [sqlite3.connect(name) for name in ("earlier.db", "runs.db")]
for database in databases:
    database.execute("create table if not exists losses (value)")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(10):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for database in databases:
        database.execute("insert into losses values (?)", (loss.item(),))
        database.commit()
"""


def test_no_seed_sees_what_another_wrote_and_a_database_can_be_written(host: Any, tmp_path: Path) -> None:
    """One database is the user's, from before; the other is the script's own."""
    user = tmp_path / "user"
    user.mkdir()
    (user / "fresh_train.py").write_text(FRESH)
    with contextlib.closing(sqlite3.connect(user / "earlier.db")) as database:
        database.execute("create table losses (value)")
    before = {path.name: path.read_bytes() for path in user.iterdir()}
    script = str(user / "fresh_train.py")
    with host(script) as first, host(script, seed_offset=1) as second:
        results = [runner.run(TrainSpec(steps=3, warmup=0)) for runner in (first, second)]
    assert [result.status for result in results] == ["ok", "ok"], [result.reason for result in results]
    assert {path.name: path.read_bytes() for path in user.iterdir()} == before


@pytest.mark.slow
def test_imports_are_done_once_for_console_scripts(tmp_path: Path) -> None:
    """The second process is forked from the zygote that the first left behind."""
    user = tmp_path / "user"
    user.mkdir()
    program = user / "train-net"
    program.write_text(f"#!{sys.executable}\n" + (SCRIPTS / "plain.py").read_text())
    program.chmod(0o700)
    command = ScriptCommand.parse(["--", str(program)], cwd=user)
    with TrialRunner(command, run_dir=tmp_path / "run", launch="zygote") as runner:
        assert runner.start().launch == "zygote"
        first, second = (runner.run(TrainSpec(steps=3, warmup=0)) for _ in range(2))
    assert first.ok, first.reason + first.tail
    assert first.losses == second.losses


@pytest.mark.parametrize("turns", [False, True])
def test_trials_run_at_the_same_time(host: Any, turns: bool) -> None:
    with host("plain.py") as runner:
        runner.start()
        results = {}

        def work(name: str, spec: TrialSpec) -> None:
            results[name] = runner.run(spec)

        threads = [
            threading.Thread(target=work, args=(name, TrainSpec(steps=3, perturb=p, turns=turns)))
            for name, p in (("a", ""), ("b", ""), ("c", "bf16"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results["a"].losses == results["b"].losses
    assert results["c"].ok
    assert results["c"].losses != results["a"].losses


def test_record_anneal_seed_and_mismatch(host: Any) -> None:
    with host("plain.py") as runner:
        graph = runner.run(RecordSpec())
        plain = runner.run(TrainSpec(steps=4, warmup=0))
        again = runner.run(TrainSpec(steps=4, warmup=0))
        pruned = runner.run(TrainSpec(steps=40, warmup=0, reference_losses=(0.1,) * 40, stop_gap=0.0))
        annealed = runner.run(TrainSpec(steps=4, warmup=0, anneal=True))
        seeded = [runner.run(TrainSpec(steps=2, warmup=0, seed=7)).losses for _ in range(2)]
        wrong = runner.run(TrainSpec(steps=2, policy=uniform("bf16", "transformer.h.*")))
        audited = runner.run(TrainSpec(steps=3, warmup=0, policy=uniform("bf16"), record_graph=True))
    assert graph.answer.tunable_flops_share > 0.9
    assert plain.losses == again.losses  # same weights, data and random streams
    assert pruned.status == "pruned"
    assert len(pruned.losses) == 10
    assert annealed.losses[:2] == plain.losses[:2]  # the first step's rate is the script's own
    assert annealed.losses[2:] != plain.losses[2:]
    assert seeded[0] == seeded[1]
    assert seeded[0] != plain.losses[:2]
    assert audited.audit is not None
    assert audited.audit["ok"]
    assert len(audited.losses) == 3
    assert audited.answer.operators
    assert wrong.status == "mismatch"
    assert "transformer.h.*" in wrong.reason


def test_replay_gives_what_forking_gives(host: Any) -> None:
    probes = (Probe("none", None), Probe("fp8", uniform("fp8")), Probe("head", uniform("bf16", "head")))
    spec = ScanSpec(warmup=1, probes=probes)
    with host("accumulation.py") as forking, host("accumulation.py", launch="process") as plain:
        expected, got = forking.run(replace(spec, side_by_side=2)), plain.run(spec)
        without_noise = [runner.run(replace(spec, noise_batches=1)).answer for runner in (forking, plain)]
        told: list[int] = []
        late = forking.run(replace(spec, within_s=0.0), told.append)
    assert got.status == "ok", got.reason + got.tail
    assert got.answer.probes == expected.answer.probes
    assert got.answer.hardly_moved == expected.answer.hardly_moved == ()
    assert got.answer.gradient_noise == pytest.approx(expected.answer.gradient_noise)
    assert [(one.noise_batches, one.gradient_noise) for one in without_noise] == [(1, None)] * 2
    assert all(one.probes == expected.answer.probes for one in without_noise)
    with host("gan.py", launch="process") as plain:  # a fork's scan begins elsewhere in a GAN's step
        assert plain.run(spec).ok
    assert 0 < len(late.answer.probes) < len(probes)
    assert late.answer.gradient_noise > 0
    assert told == sorted(told)


@pytest.mark.parametrize("script", ["session.py", "functional.py"])
def test_a_step_that_cannot_be_replayed_has_no_gradient_errors_instead_of_wrong_ones(script: str, host: Any) -> None:
    """One reports its step after the update, the other trains tensors that stand for the model's parameters."""
    spec = ScanSpec(warmup=1, probes=(Probe("bf16", uniform("bf16")),))
    with host(script, launch="process") as runner:
        result = runner.run(spec)
    assert not result.ok
    assert result.answer is None
    assert "played again as it is, has other gradients" in result.reason


@pytest.mark.slow
def test_torchrun_is_followed_into_its_ranks(host: Any) -> None:
    """Real processes. torchrun by its path was forked for another seed, and its ranks waited for each other."""
    with host(*TORCHRUN, "ddp.py", real=True) as runner, host(*TORCHRUN, "ddp.py", real=True, seed_offset=1) as other:
        info, trial = runner.start(), other.run(TrainSpec(steps=1, warmup=0, timeout_s=60.0))
    assert (info.launch, info.world_size, trial.status) == ("process", 2, "ok"), trial.reason + trial.tail


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, ...]]:
    """The losses that each rank tells, as they are read."""
    told: list[tuple[float, ...]] = []

    def load(path: Path) -> TrialResult | None:
        found = load_result(path)
        told.append(found.losses if found else ())
        return found

    monkeypatch.setattr("autoprec.trial.driver.results.load_result", load)
    return told


def _trains_in_two_ranks(runner: TrialRunner, told: list[tuple[float, ...]], *, differ: bool) -> None:
    info = runner.start()
    trial = runner.run(TrainSpec(steps=3, warmup=0, policy=uniform("bf16")))
    assert (info.launch, info.world_size) == ("process", 2)
    assert trial.status == "ok", trial.reason + trial.tail
    first, second = told[-2:]
    assert len(first) == len(second) == 3
    assert (first != second) is differ
    assert trial.losses == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("script", ["fsdp.py", "tp.py"])
def test_several_ranks(script: str, host: Any, told: list[tuple[float, ...]]) -> None:
    """FSDP2 and tensor parallelism in forked ranks; each tells its losses. The second trains on the same data twice."""
    with host(*TORCHRUN, script) as runner:
        _trains_in_two_ranks(runner, told, differ=script == "fsdp.py")


@pytest.mark.slow
def test_ranks_that_the_script_starts_meet_at_a_fixed_port_and_leave_together(
    host: Any, told: list[tuple[float, ...]]
) -> None:
    """DDP in processes of the script's own; the port is taken, as by another trial; one rank's loss is lost later."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with host("spawned.py", str(taken.getsockname()[1]), "nan") as runner:
            _trains_in_two_ranks(runner, told, differ=False)
            began = time.monotonic()
            lost = runner.run(TrainSpec(steps=12, warmup=0))
    assert lost.status == "diverged", lost.reason + lost.tail
    assert time.monotonic() - began < 120, "the other rank waited in a collective"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import torch\nraise ValueError('broken')", "broken"),
        ("import os, torch\nos.system('mkdir /nobody')\nraise SystemExit(3)", "exit code 3"),
        ("print('nothing to see')", "without a training step"),
        (
            "import torch\nm = torch.nn.Linear(2, 2)\no = torch.optim.SGD(m.parameters())\nm(torch.ones(1, 2))",
            "no backward",
        ),
    ],
)
def test_scripts_that_cannot_be_tried(body: str, message: str, host: Any, tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text(body)
    with host(str(script)) as runner, pytest.raises(ScriptError, match=message) as caught:
        runner.start()
    assert caught.value.exit_code == 4


def test_nothing_to_tune_is_not_the_scripts_failure(host: Any, tmp_path: Path) -> None:
    script = tmp_path / "scale.py"
    script.write_text(
        "import torch\nclass M(torch.nn.Module):\n  def __init__(s):\n    super().__init__()\n"
        "    s.p = torch.nn.Parameter(torch.ones(2))\n  def forward(s, x):\n    return s.p * x\n"
        "m = M()\no = torch.optim.SGD(m.parameters())\nm(torch.ones(2)).sum().backward()"
    )
    with host(str(script)) as runner, pytest.raises(NothingAcceptableError, match="no trainable GEMM") as caught:
        runner.start()
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("script", "launch"), [("sampled.py", "fork"), ("sampled.py", "process"), ("shared.py", "auto")]
)
def test_every_trial_starts_from_the_same_state(script: str, launch: str, host: Any) -> None:
    with host(script, launch=launch) as runner:
        info = runner.start()
        losses = [runner.run(TrainSpec(steps=6, warmup=0)).losses for _ in range(2)]
        perturbed = runner.run(TrainSpec(steps=6, warmup=0, perturb="bf16")).losses
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    assert perturbed == pytest.approx(losses[0], rel=0.05)
    if script == "shared.py":
        assert info.launch in ("process", "zygote")
        assert any("shared for writing" in note for note in info.notes)


@pytest.mark.parametrize(
    ("tokens", "says", "fix"),
    [
        (("functional.py", "--transform"), "torch.func.grad", "torch.autograd.grad"),
        (("tensors_only.py",), "no torch.nn.Module", "put the weights into a Module"),
    ],
)
def test_a_loop_that_cannot_be_followed_is_told_soon(
    tokens: tuple[str, ...], says: str, fix: str, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both scripts would go on for hours. A step that no module owns is a search over all that lives: five will do."""
    assert first_step._MOST_UNOWNED <= 100
    monkeypatch.setattr(first_step, "_MOST_UNOWNED", 5)
    with host(*tokens, setup_timeout_s=60) as runner, pytest.raises(ScriptError, match=says) as caught:
        runner.start()
    assert fix in str(caught.value.fix)


@pytest.mark.parametrize("launch", ["auto", "process"])
def test_a_throw_away_model_is_passed_over_and_named(launch: str, host: Any) -> None:
    with host("throwaway.py", launch=launch) as runner:
        info = runner.start()
        result = runner.run(TrainSpec(steps=8, warmup=0))
    assert info.model["class"] == "Net"
    assert any("Linear was trained for 3 steps only" in note for note in info.notes)
    assert result.status == "ok", result.reason + result.tail
    assert len(result.losses) == 8


def test_too_short(host: Any) -> None:
    with host("plain.py", "--steps", "3") as runner:
        result = runner.run(TrainSpec(steps=10))
    assert result.status == "too_short"
    assert "3 of 13" in result.reason
    assert len(result.losses) == 3
    assert "loss" in result.tail


def test_closing_while_a_trial_runs_ends_it(tmp_path: Path, host: Any) -> None:
    with host("plain.py", "--steps", "1000000") as runner:
        runner.start()
        results = []
        thread = threading.Thread(target=lambda: results.append(runner.run(TrainSpec(steps=10**6))))
        thread.start()
        import time

        time.sleep(0.3)
        runner.close()
        thread.join(10)
    assert results
    assert results[0].status in ("crashed", "oom")


def test_driver_side_needs_no_torch() -> None:
    import subprocess

    code = "import sys, autoprec.trial.driver.runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[3]).returncode == 0


def test_a_runner_never_started_closes(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text("")
    TrialRunner(ScriptCommand.parse([str(script)], cwd=tmp_path), run_dir=tmp_path).close()


def test_what_a_script_says_right_before_its_end_is_heard(tmp_path: Path) -> None:
    """It connects, speaks and ends between two looks of the driver."""

    class Ending:
        pid, tail = os.getpid(), ""

        def poll(self) -> int:
            with connect(tmp_path / "control") as said:
                send_message(said, op="ended", seen={})
            return 0

        def settle(self) -> None: ...

    runner = TrialRunner(ScriptCommand.parse([str(SCRIPTS / "plain.py")], cwd=tmp_path), run_dir=tmp_path)
    with contextlib.closing(listen(tmp_path / "control", 4)) as listener:
        listener.settimeout(0.05)
        control, messages = runner._accept(listener, Ending())  # type: ignore[arg-type]
        assert next(messages)["op"] == "ended"
        control.close()
    runner.close()


#: What AutoPrec warns of inside a step, and what the script's own libraries do.
WARNS = """
import warnings
import torch
from autoprec.errors import AutoPrecWarning
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.randn(8, 16)).sum().backward()  # the trial begins in here
    warnings.warn("fused FP8 casts do not run here", AutoPrecWarning)
    warnings.warn("something of the script's own")
    optimizer.step()
"""


def test_what_autoprec_warned_of_in_a_trial_that_ends_well_is_in_its_audit(host: Any, tmp_path: Path) -> None:
    script = tmp_path / "warns.py"
    script.write_text(WARNS)
    with host(str(script)) as runner:
        result = runner.run(TrainSpec(steps=2, warmup=0, policy=uniform("bf16")))
    assert result.ok, result.tail
    assert result.audit is not None
    assert [note for note in result.audit["notes"] if "here" in note or "own" in note] == [
        "fused FP8 casts do not run here"
    ]
