"""A secret given to a script, in whatever way, is stored nowhere; and no ordinary argument is taken for one."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoprec.support import redact
from autoprec.support.redact import HIDDEN, redact_arguments, redact_text, remember
from autoprec.tracking.listener import TrackingListener
from autoprec.trial.command import ScriptCommand
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import SearchOptions
from tests.faults.planted import COMMAND_LINES, WAYS, leaks, planted
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph

PLANTED = list(zip(*planted(), strict=True))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No test hides what another one has seen."""
    redact._known.clear()
    yield
    redact._known.clear()


def test_there_are_sixty_ways() -> None:
    assert len({tuple(way) for way in WAYS}) == len(WAYS) >= 60


@pytest.mark.parametrize(("words", "secret"), PLANTED, ids=[" ".join(way) for way in WAYS])
def test_a_secret_is_hidden_in_arguments_and_in_the_text_of_a_command(words: list[str], secret: str) -> None:
    shown = redact_arguments(words)
    assert secret not in " ".join(shown)
    assert HIDDEN in " ".join(shown)
    one = words[:2]  # in a text nobody knows that an option takes two
    assert secret not in redact_text(shlex.join(["python", "train.py", *one, "--lr", "1"]))


@pytest.mark.parametrize(("words", "secret"), PLANTED, ids=[" ".join(way) for way in WAYS])
def test_what_was_seen_in_a_command_is_hidden_in_whatever_a_script_prints(words: list[str], secret: str) -> None:
    remember(words, {})
    printed = f"{words}\n{argparse.Namespace(hint=words[-1])}\nconnecting as {words[-1]} failed"
    assert secret not in redact_text(printed)


def test_secrets_of_the_environment_are_hidden_and_words_are_not() -> None:
    remember(
        ["--password", "training", "--token", "short"], {"HF_TOKEN": "aaaa1111bbbb", "GPG_KEY": "/usr/share/keys1"}
    )
    assert redact_text("training: aaaa1111bbbb short /usr/share/keys1") == f"training: {HIDDEN} short /usr/share/keys1"


def test_no_ordinary_argument_of_300_real_command_lines_is_hidden() -> None:
    lines = [line for line in COMMAND_LINES.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 300
    eaten = [line for line in lines if redact_arguments(shlex.split(line)) != shlex.split(line)]
    assert eaten + [line for line in lines if redact_text(line) != line] == []


def test_a_search_stores_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Study, tracking, results and reports of one search whose script is given every secret in every way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TrackingListener, "_tell", lambda *_: None)  # MLflow is sent what is in the study
    Path("train.py").touch()
    ways, secrets = planted()
    words = ("train.py", *(word for way in ways for word in way))
    options = SearchOptions(
        command=words, study="secret", trials=2, steps=8, seeds=2, space="hopper-fp8", force=True,
    )  # fmt: skip
    script = SimulatedScript(graph=simulated_graph(2, width=4096, tokens=16384), device="NVIDIA H100 80GB HBM3")
    tracking = TrackingListener("autoprec-runs")
    search = Search(
        options, ScriptCommand.parse(words), Listeners(tracking), lambda seed, _: SimulatedRunner(script, seed)
    )
    result = search.run()
    tracking.attach(result, search.study_dir)
    Path("result.json").write_text(str(result.to_json()) + str(options.resume_command(stored=True)))
    assert (tmp_path / "autoprec-runs" / "secret" / "tracking" / "study.json").stat().st_size > 1000
    assert leaks(tmp_path, secrets) == {}
    assert options.resume_command().endswith(shlex.join(words))  # the terminal's owner can go on
