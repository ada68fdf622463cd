"""``autoprec demo``: measured on this machine; what it prints works."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from autoprec.cli.scripts import demo as module
from autoprec.cli.scripts.demo import demo, example, next_steps, program
from autoprec.trial.command import ScriptCommand


def run(monkeypatch: pytest.MonkeyPatch, gib: int = 0, verdict: str = "adopt") -> tuple[Any, list[Any]]:
    asked: list[Any] = []

    def perform(options: Any) -> tuple[Any, Any, dict[str, Path]]:
        asked.append(options)
        return None, SimpleNamespace(policy=options.output, verdict=verdict), {}

    monkeypatch.setattr("torch.cuda.is_available", lambda: gib > 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=gib << 30))
    monkeypatch.setattr("autoprec.cli.scripts.search.perform", perform)
    monkeypatch.setattr("autoprec.cli.scripts.search.print_result", lambda *_: None)
    return CliRunner().invoke(demo, [], catch_exceptions=False), asked


@pytest.mark.parametrize(("gib", "large"), [(0, False), (24, False), (80, True)])
def test_a_gpu_trains_the_size_that_is_rehearsed_for_it(gib: int, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found, (asked,) = run(monkeypatch, gib)
    assert found.exit_code == 0
    assert "rehearsal" not in found.stdout
    assert (asked.target, asked.cost_scale, asked.output) == ("auto", "", "demo-policy.yaml")
    assert asked.command[1:] == (module.AS_REHEARSED if large else ())
    assert shlex.join(asked.command) in found.stdout, "what is shown next is about the same model"
    scale = dict(part.split("=") for part in module.REHEARSAL.split()[-1].split(","))
    sizes = dict(zip(module.AS_REHEARSED[::2], map(int, module.AS_REHEARSED[1::2]), strict=True))
    assert sizes["--width"] == 384 * int(scale["width"])
    assert sizes["--depth"] == 3 * int(scale["depth"])
    assert sizes["--batch"] * sizes["--context"] == 8 * 64 * int(scale["tokens"])


def test_a_machine_that_gains_nothing_is_told_how_to_rehearse(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = run(monkeypatch, verdict="stay")
    words = shlex.split(found.stdout.splitlines()[-1].split("     ")[0])
    words = words[words.index("search") :]
    assert words[:4] == ["search", *module.REHEARSAL.split()[:3]]
    assert ScriptCommand.parse([words[-1]])  # the path that is shown is there


def test_the_script_is_there_and_shown_as_short_as_possible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert example().is_file()
    monkeypatch.chdir(example().parents[1])
    assert str(example()) == "examples/train_gpt.py"


def test_an_installed_package_brings_the_script_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "autoprec"
    (package / "examples").mkdir(parents=True)
    (package / "examples" / "train_gpt.py").touch()
    monkeypatch.setattr(module, "__file__", str(package / "cli" / "scripts" / "demo.py"))
    assert example() == package / "examples" / "train_gpt.py"


def test_every_next_step_is_a_command_line_that_autoprec_accepts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import click

    from autoprec.cli import cli

    monkeypatch.setattr("shutil.which", lambda _name: "/usr/bin/autoprec")
    script = tmp_path / "my folder" / "train_gpt.py"
    for line in next_steps((str(script),), "demo-policy.yaml").splitlines()[1:]:
        words = shlex.split(line.split("     ")[0])
        command = cli.get_command(click.Context(cli), words[1])
        assert command is not None
        context = command.make_context(words[1], words[2:], parent=click.Context(cli, **cli.context_settings))
        if "script" in context.params and words[1] != "search":
            assert context.params["script"][0] == str(script)


def test_the_web_interface_is_recommended_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, said in ((None, True), ("3.17", False)):
        monkeypatch.setattr(module, "installed_version", lambda _name, found=version: found)
        first = next_steps(("train.py",), "policy.yaml").splitlines()[1]
        assert ("pip install 'autoprec[ui]'" in first) is said


def test_the_next_steps_name_a_program_that_the_shell_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    monkeypatch.setattr("sys.executable", ".venv/bin/python")
    assert program() == ".venv/bin/python -m autoprec", "make demo activates no environment"
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert program() == "autoprec"
