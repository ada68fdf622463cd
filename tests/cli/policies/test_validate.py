"""``autoprec validate``."""

from pathlib import Path

import pytest

from tests.cli.helpers import autoprec

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = [*sorted((ROOT / "search_spaces").glob("*.yaml")), ROOT / "autoprec" / "precision" / "targets.yaml"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_file_that_is_shipped_is_valid(path: Path) -> None:
    found = autoprec("validate", path)
    assert found.code == 0, found.err
    assert found.out.startswith(f"{path}: valid ")
    assert found.err == ""


def test_a_valid_policy_is_described(policy_file: Path) -> None:
    assert autoprec("validate", policy_file).out == f"{policy_file}: valid policy, 2 rules, 2 recipes\n"


def test_all_files_are_looked_at_and_one_bad_one_is_enough(policy_file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("schema: autoprec.policy/1\ndefault: bf16\n", encoding="utf-8")
    found = autoprec("validate", bad, policy_file, tmp_path / "none.yaml")
    assert found.code == 2
    assert f"{policy_file}: valid" in found.out
    assert f"{bad}: not valid: default: recipe 'bf16' is not defined under recipes" in found.err
    assert "none.yaml: not valid: no such file" in found.err


def test_a_file_of_another_kind_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("schema: other/1\n", encoding="utf-8")
    found = autoprec("validate", tmp_path / "x.yaml")
    assert found.code == 2
    assert "autoprec.policy/1, autoprec.space/1, autoprec.targets/1" in found.err


def test_json(policy_file: Path, tmp_path: Path) -> None:
    found = autoprec("validate", policy_file, tmp_path / "none.yaml", "--json")
    assert found.code == 2
    document = found.json()
    assert document["ok"] is False
    assert [row["ok"] for row in document["files"]] == [True, False]
    assert document["files"][1]["fix"] == "check the path"
