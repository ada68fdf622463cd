"""``autoprec transfer``: from a study of a small GPT to scripts, saved steps and lists of names."""

import json
from pathlib import Path

import pytest

from autoprec.cli.scripts.transfer import _words
from autoprec.policy import load_policy
from tests.cli.helpers import Outcome, autoprec
from tests.tuning.transfer.test_plan import llama
from tests.tuning.transfer.test_proxy import policy, study

RULES = (("h.0.*", "bf16"), ("*.mlp.*", "fp8_rowwise"))


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The policy file of a study, in the current folder, beside a saved step of a big model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.json").write_text(json.dumps(llama().to_json()))
    return study(tmp_path / "autoprec-runs" / "small", policy(*RULES)) / "policy.yaml"


def test_a_policy_for_a_saved_step(found: Path) -> None:
    outcome = autoprec("transfer", found, "-o", "big.yaml", "--", "step.json")
    assert outcome.code == 0, outcome.err
    written = load_policy("big.yaml")
    assert written.evidence["transferred_from"]["study"] == "small"
    assert written.evidence["target"] == "h100"
    assert "MLP input (gate, up)" in outcome.out
    assert "modelled, calibrated on NVIDIA H100" in outcome.out
    assert "autoprec check --policy big.yaml --sensitivity 8 SCRIPT" in outcome.out
    again = autoprec("transfer", found, "-o", "big.yaml", "step.json")
    assert (again.code, "this file exists" in again.err) == (2, True)


def test_json_says_where_every_rule_went(found: Path) -> None:
    document = autoprec("transfer", "--json", found, "--", "step.json").json()
    assert [row["rule"] for row in document["rules"]] == ["h.0.*", "*.mlp.*", "(default)"]
    assert document["rules"][1]["as_asked"] == document["rules"][1]["layers"] == 45
    assert (document["source"], document["lost"], document["spot"]) == ("modelled", [], [])
    assert document["speedup"] > 1.0


def test_what_lint_says_of_it_on_the_big_model_is_said(found: Path, tmp_path: Path) -> None:
    everything = policy(("*", "fp8_rowwise"))
    study(tmp_path / "autoprec-runs" / "all", everything)
    document = autoprec("transfer", "--json", tmp_path / "autoprec-runs/all/policy.yaml", "--", "step.json").json()
    assert "head-low-precision" in {row["code"] for row in document["findings"]}
    assert {
        row["code"] for row in autoprec("transfer", "--json", "--force", found, "step.json").json()["findings"]
    } == set()


def test_a_list_of_names_and_a_saved_step(found: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("\n".join(layer.name for layer in llama().layers))
    outcome = autoprec("transfer", found, "-o", "a.yaml", "--", "names.txt")
    assert (outcome.code, "a list of names has no shapes" in outcome.out) == (0, True)
    outcome = autoprec("transfer", "-o", "b.yaml", "--json", found, "--", "step.json")
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
for step in range(9):
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
    outcome = autoprec("transfer", found, "--json", "-o", "big.yaml", "--", "big.py", "16384", "6")
    assert outcome.code == 0, outcome.err
    written = load_policy("big.yaml")
    assert written.model is not None
    assert written.model.parameters > 19e9  # 77 GB in float32
    assert all("below break-even" in row["reason"] for row in outcome.json()["lost"])  # 2048 tokens are too few


@pytest.mark.usefixtures("warm")
def test_passes_on_the_model_itself_say_that_it_holds_or_take_layers_back(
    found: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "big.py").write_text(TRAIN)
    monkeypatch.setattr("autoprec.tuning.transfer.plan._SAME", -1e9)  # what does not pay at this size is kept
    asked = ("transfer", "--spot", "3", "--json", "--force", "-o", "big.yaml", found, "--", "big.py", "64", "4")
    monkeypatch.setattr("autoprec.cli.scripts.spot.LIMIT", 10.0)
    done = autoprec(*asked)
    assert done.code == 0, done.err
    (check,) = done.json()["spot"]
    assert (check["rows"][0]["name"], check["within"], len(check["rows"])) == ("whole policy", True, 3)
    assert 0 < check["rows"][0]["error"] < check["limit"]
    assert load_policy("big.yaml").evidence["spot_check"]["limit"] == pytest.approx(check["limit"], rel=1e-3)
    monkeypatch.setattr("autoprec.cli.scripts.spot.LIMIT", 0.6 * 10.0 * check["rows"][0]["error"] / check["limit"])
    done = autoprec(*asked)
    first, second = done.json()["spot"]
    assert not first["within"]
    assert second["rows"][0]["error"] < first["rows"][0]["error"]
    written = load_policy("big.yaml")
    assert written.evidence["spot_check"]["back_to_16_bit"]
    assert done.code == (0 if second["within"] else 1)


def refused(*args: str | Path) -> Outcome:
    outcome = autoprec("transfer", *args)
    assert outcome.code != 0
    return outcome


def test_what_is_missing_is_said(found: Path, tmp_path: Path) -> None:
    assert "the big model is missing" in refused(found).err
    assert "step.json takes no arguments" in refused(found, "--", "step.json", "x.txt").err
    lonely = tmp_path / "elsewhere" / "policy.yaml"
    lonely.parent.mkdir()
    lonely.write_text("schema: autoprec.policy/1\n")
    assert "--from autoprec-runs/NAME" in refused(lonely, "--", "step.json").err
    assert "unknown target" in refused(found, "--target", "h1000", "--", "step.json").err
    assert "unknown role" in refused(found, "--role", "*=mlp", "--", "step.json").err
    assert "only describes one" in refused(found, "--spot", "3", "--", "step.json").err


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (("big.py", "--lr", "1"), ("big.py", "--lr", "1")),
        (("-m", "package.train"), ("-m", "package.train")),
        (("torchrun", "big.py"), ("--", "torchrun", "big.py")),
        (("names.txt",), ("names.txt",)),
        (("step.json",), ("step.json",)),
    ],
)
def test_a_launcher_keeps_its_dashes(script: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert _words(script, 0) == words


def test_another_kind_of_model_is_refused_and_nothing_is_written(found: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("\n".join(f"z.{i}.alpha" for i in range(3)))
    outcome = refused(found, "-o", "big.yaml", "--", "names.txt")
    assert (outcome.code, "have no counterpart" in outcome.err) == (1, True)
    assert not (tmp_path / "big.yaml").exists()
