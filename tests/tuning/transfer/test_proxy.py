"""What a study left behind of the model that its policy was found on."""

import math
from pathlib import Path

import numpy as np
import pytest

from autoprec.errors import FileError
from autoprec.policy import Policy, policy_from_dict, save_policy
from autoprec.support.files import with_checksum, write_json
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.transfer.proxy import Proxy, find_study, load_proxy
from tests.tuning.models import gpt

CHOICES = ("bf16", "fp8_rowwise", "mxfp8")


def policy(*rules: tuple[str, str], default: str = "bf16") -> Policy:
    recipes = {
        "bf16": {"format": "bf16"},
        "fp8_rowwise": {"format": "fp8", "scaling": {"granularity": "row", "power_of_2": True}},
        "mxfp8": {"format": "mxfp8"},
    }
    layers = [{"match": glob, "recipe": recipe} for glob, recipe in rules]
    document = {"schema": "autoprec.policy/1", "recipes": recipes, "layers": layers, "default": default}
    return policy_from_dict(document | {"activations": "bf16", "evidence": {"target": "h100", "gradient_error": 0.02}})


def table(blocks: int = 4, *, error: float = 0.01, noise: float = 0.5) -> SensitivityTable:
    groups = tuple(layer.name for layer in gpt(blocks).layers)
    row = [0.0001**2, error**2, (2 * error) ** 2]
    return SensitivityTable(groups, CHOICES, np.array([row] * len(groups)), noise=noise)


def study(folder: Path, found: Policy, *, with_table: bool = True) -> Path:
    folder.mkdir(parents=True)
    write_json(folder / "graph.json", gpt().to_json())
    if with_table:
        write_json(folder / "sensitivity.json", with_checksum(table().to_json()))
    (folder / "study.db").touch()
    save_policy(found, folder / "policy.yaml")
    return folder


def test_rules_are_resolved_over_the_proxy_and_rows_belong_to_layers() -> None:
    found = Proxy.of(policy(("*.mlp.*", "fp8_rowwise")), gpt(), table())
    assert found.choices["h.0.mlp.c_fc"] == "fp8_rowwise"
    assert found.rules["lm_head"] == -1
    assert found.error2(table(), "h.0.mlp.c_fc", "fp8_rowwise") == pytest.approx(1e-4)
    assert found.error2(table(), "h.0.mlp.c_fc", "nvfp4") == math.inf


def test_the_error_of_the_policy_on_its_own_model() -> None:
    found = policy(("*.mlp.*", "fp8_rowwise"))
    assert Proxy.of(found, gpt(), table()).predicted(found) == pytest.approx(math.sqrt(8) * 0.01, rel=1e-3)
    assert math.isnan(Proxy.of(found, gpt()).predicted(found))


def test_a_study_is_found_beside_its_policy_and_by_what_it_answered(tmp_path: Path) -> None:
    found = policy(("*.mlp.*", "fp8_rowwise"))
    folder = study(tmp_path / "autoprec-runs" / "small", found)
    study(tmp_path / "autoprec-runs" / "other", policy(("*", "mxfp8")))
    path = save_policy(found, tmp_path / "policy.yaml")
    assert find_study(found, folder / "policy.yaml", ()) == folder
    assert find_study(found, path, (tmp_path / "autoprec-runs",)) == folder
    assert find_study(policy(("*.attn.*", "mxfp8")), path, (tmp_path / "autoprec-runs",)) is None


def test_a_study_without_a_table_still_tells_the_layers(tmp_path: Path) -> None:
    found = policy()
    assert load_proxy(found, study(tmp_path / "s", found, with_table=False)).table is None
    loaded = load_proxy(found, study(tmp_path / "t", found))
    assert loaded.table is not None
    assert loaded.rows["lm_head"] == 16
    assert len(Proxy.of(found, gpt(2)).choices) == 9


def test_a_damaged_table_says_so(tmp_path: Path) -> None:
    found = policy()
    folder = study(tmp_path / "s", found)
    write_json(folder / "sensitivity.json", with_checksum({"groups": []}))
    with pytest.raises(FileError, match="search again"):
        load_proxy(found, folder)
