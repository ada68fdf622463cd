"""``autoprec export`` and ``autoprec import`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autoprec.cli.policies.export import export, known_layers, layer_names
from autoprec.cli.policies.import_ import import_
from autoprec.errors import FileError, UnsupportedError
from autoprec.policy import load_policy, save_policy
from tests.conformance.exporters import POLICIES


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return save_policy(POLICIES["rowwise but the ends"], tmp_path / "policy.yaml")


def test_files_are_written_and_named_on_stdout(policy: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(export, [str(policy), "--to", "torchao", "-o", str(tmp_path / "out")])
    assert done.exception is None
    written = tmp_path / "out" / "precision_torchao.py"
    assert done.stdout.split() == [str(written)]
    compile(written.read_text(encoding="utf-8"), "x", "exec")


def test_a_lossy_export_writes_nothing_until_allowed(policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [str(policy), "--to", "axolotl", "-o", str(out)]
    done = CliRunner().invoke(export, arguments)
    assert isinstance(done.exception, UnsupportedError)
    assert not out.exists()
    done = CliRunner().invoke(export, [*arguments, "--allow-lossy"])
    assert done.exception is None
    assert "lost: layers" in done.stderr
    assert (out / "axolotl_precision.yaml").exists()


def test_existing_files_are_kept(policy: Path, tmp_path: Path) -> None:
    arguments = [str(policy), "--to", "python", "-o", str(tmp_path)]
    assert CliRunner().invoke(export, arguments).exception is None
    assert isinstance(CliRunner().invoke(export, arguments).exception, FileError)
    assert CliRunner().invoke(export, [*arguments, "--force"]).exception is None


def test_layer_names_from_inspect_and_from_a_list(tmp_path: Path) -> None:
    rows = [{"name": "a.b", "tunable": True}, {"name": "norm", "tunable": False}]
    (tmp_path / "graph.json").write_text(json.dumps({"layers": rows}), encoding="utf-8")
    (tmp_path / "names.txt").write_text("a.b\n\nhead\n", encoding="utf-8")
    assert layer_names(tmp_path / "graph.json") == ("a.b",)
    assert layer_names(tmp_path / "names.txt") == ("a.b", "head")
    operators = [{"name": "x" * 1000}] * 5000  # what a big model prints is larger than any policy
    document = {"layers": [{"name": "a", "kind": "conv"}], "operators": operators}
    (tmp_path / "big.json").write_text(json.dumps(document), encoding="utf-8")
    assert known_layers(tmp_path / "big.json") == {"a": "conv"}
    (tmp_path / "bad.json").write_text("{}", encoding="utf-8")
    for name in ("bad.json", "missing.txt"):
        with pytest.raises(FileError):
            layer_names(tmp_path / name)


def test_a_list_of_names_without_an_end_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "names").open("wb") as stream:
        stream.truncate(3 << 30)
    for layers in (tmp_path / "names", Path("/dev/zero")):
        with pytest.raises(FileError, match="larger than"):
            layer_names(layers)


def test_import_writes_a_policy_and_its_notes(tmp_path: Path) -> None:
    source = tmp_path / "config.yaml"
    source.write_text("mixed_precision: fp8\nfp8_config: {backend: TE, interval: 4}\n", encoding="utf-8")
    out = tmp_path / "policy.yaml"
    done = CliRunner().invoke(import_, [str(source), "-o", str(out)])
    assert done.exception is None
    assert "interval 4" in done.stderr
    assert load_policy(out).default == "fp8_delayed"
    assert isinstance(CliRunner().invoke(import_, [str(source), "-o", str(out)]).exception, FileError)


def test_import_as_a_search_space(tmp_path: Path) -> None:
    from autoprec.policy.space import load_space

    source = tmp_path / "today.yaml"
    source.write_text("fp8_config: {backend: TE}\n", encoding="utf-8")
    out = tmp_path / "space.yaml"
    assert CliRunner().invoke(import_, [str(source), "--as-space", "-o", str(out)]).exception is None
    assert load_space(str(out)).presets[0].name == "today"
