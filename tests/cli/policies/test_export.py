"""``autoprec export`` on the command line, to other stacks and from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autoprec.cli.policies.export import export, known_layers
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
    arguments = [str(policy), "--to", "megatron", "-o", str(out)]
    done = CliRunner().invoke(export, arguments)
    assert isinstance(done.exception, UnsupportedError)
    assert not out.exists()
    done = CliRunner().invoke(export, [*arguments, "--allow-lossy"])
    assert done.exception is None
    assert "lost: layers" in done.stderr
    assert (out / "megatron_flags.txt").exists()


def test_existing_files_are_kept(policy: Path, tmp_path: Path) -> None:
    arguments = [str(policy), "--to", "python", "-o", str(tmp_path)]
    assert CliRunner().invoke(export, arguments).exception is None
    assert isinstance(CliRunner().invoke(export, arguments).exception, FileError)
    assert CliRunner().invoke(export, [*arguments, "--force"]).exception is None


def test_layer_names_from_inspect_and_from_a_list(tmp_path: Path) -> None:
    rows = [{"name": "a.b", "tunable": True}, {"name": "norm", "tunable": False}]
    (tmp_path / "graph.json").write_text(json.dumps({"layers": rows}), encoding="utf-8")
    (tmp_path / "names.txt").write_text("a.b\n\nhead\n", encoding="utf-8")
    assert tuple(known_layers(tmp_path / "graph.json")) == ("a.b",)
    assert tuple(known_layers(tmp_path / "names.txt")) == ("a.b", "head")
    operators = [{"name": "x" * 1000}] * 5000  # what a big model prints is larger than any policy
    document = {"layers": [{"name": "a", "kind": "conv"}], "operators": operators}
    (tmp_path / "big.json").write_text(json.dumps(document), encoding="utf-8")
    assert known_layers(tmp_path / "big.json") == {"a": "conv"}
    (tmp_path / "bad.json").write_text("{}", encoding="utf-8")
    for name in ("bad.json", "missing.txt"):
        with pytest.raises(FileError):
            known_layers(tmp_path / name)


def test_a_list_of_names_without_an_end_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "names").open("wb") as stream:
        stream.truncate(3 << 30)
    for layers in (tmp_path / "names", Path("/dev/zero")):
        with pytest.raises(FileError, match="larger than"):
            known_layers(layers)


@pytest.mark.parametrize(
    ("document", "note"),
    [("mixed_precision: bf16\n", ""), ("mixed_precision: fp8\nfp8_config: {backend: TE, interval: 4}\n", "interval 4")],
)
def test_another_stacks_file_becomes_a_policy_and_its_notes(document: str, note: str, tmp_path: Path) -> None:
    source = tmp_path / "config.yaml"
    source.write_text(document, encoding="utf-8")
    arguments = [str(source), "--to", "policy", "-o", str(tmp_path)]
    done = CliRunner().invoke(export, arguments)
    assert done.exception is None
    assert note in done.stderr
    found = load_policy(tmp_path / "policy.yaml")
    assert (found.default, found.activations) == ("fp8_delayed" if note else "keep", "bf16")
    assert isinstance(CliRunner().invoke(export, arguments).exception, FileError)
    assert CliRunner().invoke(export, [*arguments, "--force"]).exception is None


def test_what_is_not_a_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: 1\n", encoding="utf-8")
    for name in ("x.yaml", "none.yaml"):
        done = CliRunner().invoke(export, [str(tmp_path / name), "--to", "policy"])
        assert isinstance(done.exception, FileError)
