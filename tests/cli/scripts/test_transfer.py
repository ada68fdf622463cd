"""``autoprec transfer``: from a study of a small GPT to scripts, configurations, saved steps and lists of names."""

import json
from pathlib import Path

import pytest

from autoprec.policy import load_policy
from tests.cli.helpers import Outcome, autoprec
from tests.tuning.transfer.test_plan import llama
from tests.tuning.transfer.test_proxy import policy, study

RULES = (("h.0.*", "bf16"), ("*.mlp.*", "fp8_rowwise"))


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The policy file of a study, in the current folder."""
    monkeypatch.chdir(tmp_path)
    return study(tmp_path / "autoprec-runs" / "small", policy(*RULES)) / "policy.yaml"


def test_a_policy_for_a_decoder_from_its_config(found: Path) -> None:
    outcome = autoprec("transfer", found, "--to", "llama3-8b", "--seq", "4096", "-o", "big.yaml")
    assert outcome.code == 0, outcome.err
    written = load_policy("big.yaml")
    assert written.evidence["transferred_from"]["study"] == "small"
    assert written.evidence["target"] == "h100"
    assert "MLP input (gate, up)" in outcome.out
    assert "modelled, uncalibrated" in outcome.out
    assert "GiB; one device has" in outcome.out
    again = autoprec("transfer", found, "--to", "llama3-8b", "-o", "big.yaml")
    assert (again.code, "this file exists" in again.err) == (2, True)


def test_json_says_where_every_rule_went(found: Path) -> None:
    outcome = autoprec("transfer", found, "--to", "llama3-8b", "--seq", "4096", "--json")
    document = outcome.json()
    assert [row["rule"] for row in document["rules"]] == ["h.0.*", "*.mlp.*", "(default)"]
    assert document["rules"][1]["as_asked"] == document["rules"][1]["layers"] == 93
    assert document["source"] == "modelled"
    assert document["gradient_error"]["predicted"] <= 1.0001 * document["gradient_error"]["budget"]
    assert document["speedup"] > 1.0


def test_a_spot_check_of_the_big_model_corrects_what_is_predicted(found: Path, tmp_path: Path) -> None:
    command = ("transfer", found, "--to", "llama3-8b", "--seq", "4096", "--json")
    first = autoprec(*command, "-o", "first.yaml").json()["gradient_error"]
    rows = [{"name": name, "of_law": 4.0} for name in first["segments"]]
    (tmp_path / "spot.json").write_text(json.dumps({"ok": True, "sensitivity": {"rows": rows, "noise": 0.3}}))
    second = autoprec(*command, "-o", "second.yaml", "--spot", "spot.json").json()["gradient_error"]
    assert second["noise"] == 0.3
    assert second["segments"] != first["segments"]
    assert second["predicted"] <= 1.0001 * second["budget"]
    origin = load_policy("second.yaml").evidence["transferred_from"]
    assert set(origin["corrected_by"].values()) == {2.0}
    (tmp_path / "none.json").write_text("{}")
    assert "has no spot check" in refused(*command, "-o", "third.yaml", "--spot", "none.json").err


def test_a_list_of_names_and_a_saved_step(found: Path, tmp_path: Path) -> None:
    layers = llama(layers=8).layers
    (tmp_path / "names.txt").write_text("\n".join(layer.name for layer in layers))
    outcome = autoprec("transfer", found, "-o", "a.yaml", "--to", "names.txt")
    assert (outcome.code, "a list of names has no shapes" in outcome.out) == (0, True)
    (tmp_path / "step.json").write_text(json.dumps(llama(layers=8).to_json()))
    outcome = autoprec("transfer", found, "--to", "step.json", "-o", "b.yaml", "--json")
    assert outcome.json()["step"]["time_ms"] > 0
    assert load_policy("a.yaml").layers == load_policy("b.yaml").layers


TRAIN = """
import sys
import torch
from torch import nn
width, depth = int(sys.argv[1]), int(sys.argv[2])
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.ModuleDict(), nn.ModuleDict()
        self.attn["c_attn"], self.attn["c_proj"] = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp["c_fc"], self.mlp["c_proj"] = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        x = x + self.attn["c_proj"](self.attn["c_attn"](x)[..., :width])
        return x + self.mlp["c_proj"](torch.relu(self.mlp["c_fc"](x)))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.h = nn.Embedding(96, width), nn.ModuleList(Block() for _ in range(depth))
        self.lm_head = nn.Linear(width, 96)
    def forward(self, ids):
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.lm_head(x)
model = Net().to("cpu")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    ids = torch.randint(96, (4, 512))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    print(loss.item())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.usefixtures("warm")
def test_a_script_is_recorded_without_its_weights(found: Path, tmp_path: Path) -> None:
    (tmp_path / "big.py").write_text(TRAIN)
    outcome = autoprec("transfer", found, "--json", "-o", "big.yaml", "--to", "big.py", "16384", "6")
    assert outcome.code == 0, outcome.err
    written = load_policy("big.yaml")
    assert written.model is not None
    assert written.model.parameters > 19e9  # 77 GB in float32
    assert outcome.json()["growth"] == {"width": 256.0, "depth": 1.5, "tokens": 8.0}


def refused(*args: str | Path) -> Outcome:
    outcome = autoprec("transfer", *args)
    assert outcome.code != 0
    return outcome


def test_what_is_missing_is_said(found: Path, tmp_path: Path) -> None:
    assert "the big model is missing" in refused(found).err
    assert "llama3-8b takes no arguments" in refused(found, "--to", "llama3-8b", "x.txt").err
    lonely = tmp_path / "elsewhere" / "policy.yaml"
    lonely.parent.mkdir()
    lonely.write_text("schema: autoprec.policy/1\n")
    assert "--from autoprec-runs/NAME" in refused(lonely, "--to", "llama3-8b").err
    assert "unknown target" in refused(found, "--to", "llama3-8b", "--target", "h1000").err
    assert "unknown role" in refused(found, "--to", "llama3-8b", "--role", "*=mlp").err


def test_another_kind_of_model_is_refused_and_nothing_is_written(found: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("\n".join(f"z.{i}.alpha" for i in range(3)))
    outcome = refused(found, "-o", "big.yaml", "--to", "names.txt")
    assert (outcome.code, "have no counterpart" in outcome.err) == (1, True)
    assert not (tmp_path / "big.yaml").exists()
