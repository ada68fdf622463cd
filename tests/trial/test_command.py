"""Understanding what a person typed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autoprec.errors import UsageError
from autoprec.trial.command import ScriptCommand


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "sub").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("tokens", "kind", "argv", "label"),
    [
        (["train.py", "--lr", "1"], "script", [sys.executable, "train.py", "--lr", "1"], "train.py"),
        (["--", "train.py"], "script", [sys.executable, "train.py"], "train.py"),
        (["python", "train.py", "x"], "script", [sys.executable, "train.py", "x"], "train.py"),
        (["-m", "pkg.mod", "-v"], "module", [sys.executable, "-m", "pkg.mod", "-v"], "pkg.mod"),
        (["python", "-m", "pkg.mod"], "module", [sys.executable, "-m", "pkg.mod"], "pkg.mod"),
    ],
)
def test_parse(tokens: list[str], kind: str, argv: list[str], label: str, folder: Path) -> None:
    command = ScriptCommand.parse(tokens, cwd=folder)
    assert (command.kind, command.argv(), command.label) == (kind, argv, label)
    assert command.single


def test_a_launcher_is_found_beside_this_python(folder: Path) -> None:
    command = ScriptCommand.parse(["--", "torchrun", "--nproc-per-node", "2", "train.py"], cwd=folder)
    assert command.kind == "launcher"
    assert not command.single
    assert Path(command.argv()[0]).name == "torchrun"
    assert command.label == "torchrun train.py"
    by_path = ScriptCommand.parse(["--", command.argv()[0], "--nproc-per-node", "2", "train.py"], cwd=folder)
    assert by_path == command


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([], "no training script"),
        (["--"], "no training script"),
        (["-m"], "module name"),
        (["tarin.py"], "did you mean 'train.py'"),
        (["sub"], "directory"),
        (["--", "no-such-launcher", "train.py"], "launcher"),
    ],
)
def test_what_cannot_be_understood(tokens: list[str], says: str, folder: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ScriptCommand.parse(tokens, cwd=folder)
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "text", "single"),
    [
        ("litgpt", "#!/opt/venv/bin/python3\nimport litgpt\n", True),
        ("long", "#!/bin/sh\n'''exec' /a/very/long/path/bin/python3 \"$0\" \"$@\"\n", True),
        ("torchrun", "#!/opt/venv/bin/python3\n", False),
        ("run.sh", "#!/bin/bash\npython3 train.py\npython3 test.py\n", False),
        ("binary", "\x7fELF", False),
    ],
)
def test_a_console_script_is_one_process_and_a_launcher_is_not(
    name: str, text: str, single: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert ScriptCommand("launcher", str(tmp_path / name), (), tmp_path).single is single


def test_a_module_is_one_process_unless_it_launches() -> None:
    assert ScriptCommand("module", "package.train", (), Path.cwd()).single
    assert not ScriptCommand("module", "torch.distributed.run", (), Path.cwd()).single
    assert not ScriptCommand("launcher", "/no/such/program", (), Path.cwd()).single


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ("train.py --num-processes 4", 1),
        ("-- torchrun train.py", 1),
        ("-- torchrun --nproc-per-node=2 train.py", 2),
        ("-- torchrun --nproc_per_node gpu train.py", 0),
        ("-- accelerate launch train.py", 0),
        ("-- accelerate launch --multi_gpu train.py", 0),
        ("-- accelerate launch --config_file four.yaml train.py", 0),
        ("-- accelerate launch --num_processes 2 train.py", 2),
        ("-- deepspeed train.py --deepspeed zero.json", 0),
        ("-- deepspeed --include localhost:0,2 train.py", 0),
        ("-- deepspeed --num_gpus 2 train.py", 2),
        ("-m torch.distributed.run train.py", 1),
        ("-m accelerate.commands.launch train.py", 0),
    ],
)
def test_processes_of_this_machine_0_for_all_gpus(
    words: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("autoprec.trial.command._find_program", lambda name: f"/bin/{name}")
    assert ScriptCommand.parse(words.split(), cwd=tmp_path).processes == processes
