"""``autoprec lint``: one step without weights, the policy's text, and the script's source."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from autoprec.cli.policies import lint
from autoprec.cli.policies.lint import _policies, _split, _where_meant
from tests.cli.helpers import Outcome, autoprec
from tests.stub_transformers import LLAMA_8B, install

SCRIPT = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc_in = nn.Linear(64, 96)
        self.lm_head = nn.Linear(96, 32)

    def forward(self, x):
        return self.lm_head(torch.relu(self.fc_in(x)))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    loss = model(torch.randn(32, 64)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
POLICY = """schema: autoprec.policy/1
recipes: {bf16: {format: bf16}}
layers:
  - {match: fc_in, recipe: bf16}
  - {match: missing, recipe: bf16}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "policy.yaml").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_policy_comes_first_and_the_script_after_a_dash() -> None:
    assert _split(("policy.yaml", "--", "train.py", "--lr", "1")) == ("policy.yaml", ("train.py", "--lr", "1"))
    assert _split(("--", "train.py")) == ("", ("train.py",))
    assert _split(("--", "torchrun", "train.py")) == ("", ("--", "torchrun", "train.py"))
    assert _split(("p.yaml", "--", "torchrun", "t.py", "c.json")) == ("p.yaml", ("--", "torchrun", "t.py", "c.json"))
    assert _split(("policy.yaml", "--", "-m", "package.train")) == ("policy.yaml", ("-m", "package.train"))
    assert _split(("--", "config.json")) == ("", ("config.json",))
    assert _split(("policy.yaml",)) == ("policy.yaml", ())


ROOT = Path(__file__).resolve().parents[3]
SHIPPED = [
    *sorted((ROOT / "search_spaces").glob("*.yaml")),
    ROOT / "autoprec" / "precision" / "targets.yaml",
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_file_that_is_shipped_is_valid(path: Path) -> None:
    found = autoprec("lint", path)
    assert found.code == 0, found.err
    assert found.out.startswith(f"{path}: valid ")


def test_a_valid_file_is_described(project: Path) -> None:
    found = autoprec("lint", "policy.yaml")
    assert (found.code, found.out) == (0, "policy.yaml: valid policy, 2 rules, 1 recipe\nnothing found\n")
    assert "no script was named" in found.err
    (project / "policy.json").write_text(json.dumps({"schema": "autoprec.policy/1", "phases": []}))
    assert autoprec("lint", "--json", "policy.json").json()["what"] == "policy, 0 rules, 0 recipes"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema: autoprec.policy/1\ndefault: bf16\n", "recipe 'bf16' is not defined under recipes"),
        ("schema: autoprec.policy/1\nlayers: [1\n", "bad.yaml"),
        ("schema: autoprec.space/1\nname: x\nchoices: [{match: '*', choices: [int9]}]\n", "int9"),
        ("schema: autoprec.targets/1\ntargets: {h100: {}}\n", "h100"),
        ("schema: other/1\n", "autoprec.policy/1, autoprec.space/1, autoprec.targets/1"),
        ("default: keep\n", "schema is"),
    ],
)
def test_a_file_that_is_not_valid_says_where_and_how_to_fix_it(project: Path, text: str, said: str) -> None:
    (project / "bad.yaml").write_text(text)
    found = autoprec("lint", "bad.yaml")
    assert (found.code, said in found.err, "bad.yaml" in found.err) == (2, True, True), found.err


@pytest.mark.usefixtures("warm")
def test_one_step_tells_what_a_change_broke_and_a_baseline_keeps_it_quiet(project: Path) -> None:
    (project / "train.py").write_text(SCRIPT.replace("fc_in", "up"))
    found: Outcome = autoprec("lint", "--target", "h100", "--json", "policy.yaml", "--", "train.py")
    assert found.code == 1
    rows = {(row["code"], row["file"], row["line"]) for row in found.json()["findings"]}
    assert ("rule-unmatched", "policy.yaml", 5) in rows
    assert ("rule-unmatched", "policy.yaml", 4) in rows
    assert found.json()["gains"].keys() == {"h100"}
    assert found.json()["unseen"] == ["the script's own precision was not judged: `autoprec lint train.py` does that"]
    (project / "known.json").write_text(found.out)
    again = autoprec("lint", "--baseline", "known.json", "--format", "sarif", "policy.yaml", "--", "train.py")
    assert again.code == 0, again.err
    assert again.json()["runs"][0]["results"] == []


def test_a_policy_after_the_script_is_the_script_s_argument(project: Path) -> None:
    (project / "zero.yaml").write_text("zero_stage: 1\n")
    assert _policies(("train.py", "policy.yaml", "zero.yaml", "nowhere.yaml")) == ["policy.yaml"]


@pytest.mark.usefixtures("warm")
def test_what_cannot_be_recorded_is_said_and_the_rest_is_judged(project: Path) -> None:
    (project / "train.py").write_text("import torch\nmodel = None\nmodel.half()\n")
    found = autoprec("lint", "policy.yaml", "--json", "--", "train.py")
    assert found.code == 2  # an option after the policy is the script's
    found = autoprec("lint", "--json", "policy.yaml", "--", "train.py")
    assert (found.code, [row["code"] for row in found.json()["findings"]]) == (0, ["weights-cast"])
    assert "no step was recorded" in found.json()["unseen"][0]
    strict = autoprec("lint", "--strict", "policy.yaml", "--", "train.py")
    assert strict.code == 1
    assert "silenced under `silenced:` in the policy" in strict.err


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "body",
    [
        "w = torch.ones(3, 3, requires_grad=True)\n(x @ w).sum().backward()\n",
        "w = [torch.ones(3, 3, requires_grad=True)]\nfor _ in range(3): (x @ w[0]).sum().backward()\n",
        "torch.nn.Linear(3, 3)\n",
        "raise ValueError('no data')\n",
    ],
)
def test_a_script_whose_step_was_not_seen_is_not_told_that_nothing_was_found(project: Path, body: str) -> None:
    """It read "nothing found" of a script whose weights belong to no module, as of one that was judged."""
    (project / "own.py").write_text(f"import torch\nx = torch.ones(2, 3)\n{body}")
    said = autoprec("lint", "--", "own.py")
    assert said.code == 0, said.err
    assert said.out.splitlines()[-1] == "nothing found by reading alone: no step of the script was looked at"
    assert "no step was recorded" in said.err


LOOSE = """
import torch
w = {"a": torch.ones(64, 8, dtype=torch.bfloat16, requires_grad=True)}
for _ in range(5):
    loss = (torch.randn(16, 64).bfloat16() @ w["a"]).float().square().mean()
    loss.backward()
    with torch.no_grad():
        w["a"] -= 1e-6 * w["a"].grad
        w["a"].grad = None
"""


def test_weights_of_no_module_are_judged(project: Path) -> None:
    (project / "own.py").write_text(LOOSE)
    said = autoprec("lint", "--", "own.py")
    assert said.code == 1, said.err
    assert said.out.startswith("own.py:8: error: ")
    assert "[updates-lost]" in said.out


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("train.py",), "train.py"),
        (("train.py", "--lr", "1"), "train.py --lr 1"),
        (("-m", "pkg.train"), "-m pkg.train"),
        (("--", "torchrun", "train.py"), "-- torchrun train.py"),
        (("train.py", "--name", "a b"), "train.py --name 'a b'"),
    ],
)
def test_without_a_policy_nothing_is_said_of_a_section_of_it(words: tuple[str, ...], command: str) -> None:
    said = _where_meant(words, has_policy=False)
    assert "silenced" not in said
    assert f"autoprec lint --json {command} > known.json, then --baseline known.json" in said
    assert "`silenced:` in the policy" in _where_meant(words, has_policy=True)


def test_a_configuration_needs_no_script(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    (project / "config.json").write_text(json.dumps(LLAMA_8B | {"time_step_limit": [0.0, math.inf]}))  # not strict JSON
    (project / "policy.yaml").write_text(POLICY.replace("missing", "lm_head").replace("fc_in", "'*.up_proj'"))
    found = autoprec("lint", "--target", "b200", "--format", "github", "policy.yaml", "--", "config.json")
    assert (found.code, found.out) == (0, "")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--baseline", "train.py", "policy.yaml"), 2, "is not a baseline"),
        (("--target", "h1000", "policy.yaml"), 2, "h100"),
        (("missing.yaml",), 2, "missing.yaml"),
        ((), 2, "neither a policy nor a script"),
        (("policy.yaml", "--strict", "--", "train.py"), 2, "--strict comes after the policy"),
        (("--config", "gpt2", "policy.yaml"), 2, "No such option"),
        (("policy.yaml", "gpt2", "train.py"), 2, "no such script"),
        ((str(ROOT / "search_spaces" / "cpu.yaml"), "--", "train.py"), 2, "this is a search space"),
    ],
)
def test_bad_input_is_one_sentence(project: Path, words: tuple[str, ...], code: int, said: str) -> None:
    found = autoprec("lint", *words)
    assert (found.code, said in found.err) == (code, True), found.err


def test_a_policy_of_a_later_schema_says_upgrade(project: Path) -> None:
    (project / "policy.yaml").write_text("schema: autoprec.policy/2\n")
    found = autoprec("lint", "policy.yaml", "--", "train.py")
    assert (found.code, "upgrade" in found.err) == (2, True)
    assert json.dumps(found.out) == '""'


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("weights", ["fake", ""])
def test_with_a_policy_the_scripts_own_precision_is_not_called_sound(
    project: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    """Under FSDP2 weights hold values all the same: one line said "not judged", the next "sound"."""
    recorded = lint.step_of

    def with_values(*args: Any, **named: Any) -> Any:
        return recorded(*args, **named | {"weights": weights})

    monkeypatch.setattr(lint, "step_of", with_values)
    (project / "train.py").write_text(SCRIPT)
    (project / "plain.yaml").write_text("schema: autoprec.policy/1\nrecipes: {bf16: {format: bf16}}\ndefault: bf16\n")
    found: Outcome = autoprec("lint", "plain.yaml", "--", "train.py")
    assert "nothing found" in found.out
    assert "was not judged" in found.err + found.out
    assert "sound" not in found.err + found.out
