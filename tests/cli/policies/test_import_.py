"""``autoprec import``: another stack's configuration becomes a policy file, and nothing is overwritten unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.policy import load_policy
from tests.cli.helpers import autoprec

ACCELERATE = "mixed_precision: bf16\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "accelerate.yaml"
    path.write_text(ACCELERATE, encoding="utf-8")
    return path


def test_a_configuration_becomes_a_policy_that_loads(config: Path, tmp_path: Path) -> None:
    found = autoprec("import", config, "-o", tmp_path / "p.yaml")
    assert found.code == 0, found.err
    assert load_policy(tmp_path / "p.yaml").activations == "bf16"


def test_a_policy_that_is_there_is_not_overwritten(config: Path, tmp_path: Path) -> None:
    target = tmp_path / "p.yaml"
    target.write_text("mine", encoding="utf-8")
    found = autoprec("import", config, "-o", target)
    assert found.code == 2
    assert "--force" in found.err
    assert target.read_text() == "mine"
    assert autoprec("import", config, "--force", "-o", target).code == 0


def test_what_is_not_a_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\n", encoding="utf-8")
    assert autoprec("import", path).code == 2
    assert autoprec("import", tmp_path / "none.yaml").code == 2
