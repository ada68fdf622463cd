"""``autoprec inspect`` on a real script: table, JSON, saved step; bad input is refused with the reason."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autoprec.cli.scripts.inspect import inspect
from autoprec.errors import FileError, ScriptError, UsageError
from autoprec.graph.report import GraphReport
from tests.stub_transformers import LLAMA_8B, install

pytestmark = pytest.mark.usefixtures("warm")

TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 5))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(5, (8,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory, warm):
    """One recorded script for all tests: (output of --json, saved step)."""
    folder = tmp_path_factory.mktemp("inspect")
    script = folder / "train.py"
    script.write_text(TRAIN)
    step = folder / "step.json"
    result = CliRunner().invoke(inspect, ["--json", str(script)])
    assert result.exit_code == 0, result.output
    step.write_text(result.stdout)
    return json.loads(result.stdout), step


def test_where_the_time_goes_adds_up_to_the_step(saved):
    times = saved[0]["times"]
    assert sum(row["ms"] for row in times["classes"]) == pytest.approx(times["step_ms"])
    assert {"gemm", "norm", "optimizer", "between operators"} <= {row["name"] for row in times["classes"]}


def test_what_a_policy_saves_is_said_class_by_class(saved, tmp_path):
    script, policy = saved[1].parent / "train.py", tmp_path / "policy.yaml"
    policy.write_text("schema: autoprec.policy/1\nrecipes: {bf16: {format: bf16}}\ndefault: bf16\n")
    result = CliRunner().invoke(inspect, ["--policy", str(policy), str(script)])
    assert result.exit_code == 0, result.output
    heading, _, *rows = [line for line in result.stdout.splitlines() if line.strip()]
    assert "under the policy: " in heading
    assert "saves" in heading
    saved_ms = {cells[0]: cells for cells in (row.split("  ") for row in rows)}
    assert any(name.strip() == "gemm" for name in saved_ms)
    with pytest.raises(UsageError, match="--policy needs a script"):
        inspect.main(["--policy", str(policy), str(saved[1])], standalone_mode=False)


def test_a_policy_that_does_not_fit_leaves_the_scripts_own_times(saved, tmp_path):
    script, policy = saved[1].parent / "train.py", tmp_path / "policy.yaml"
    policy.write_text(
        "schema: autoprec.policy/1\nlayers: [{match: nothing, recipe: bf16}]\nrecipes: {bf16: {format: bf16}}\n"
    )
    result = CliRunner().invoke(inspect, ["--json", "--policy", str(policy), str(script)])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert "times" in document
    assert "times_under_policy" not in document
    assert any("under the policy was not measured" in note for note in document["notes"])


def test_json_has_the_documented_keys(saved):
    document = saved[0]
    assert {"model", "operators", "layers", "coverage"} <= set(document)
    assert document["model"]["class"] == "Sequential"
    keys = {"name", "module", "op", "phase", "class", "precision", "reason", "shapes", "flops", "bytes"}
    assert all(keys <= set(row) for row in document["operators"])
    assert {row["phase"] for row in document["operators"]} <= {
        "forward",
        "backward",
        "recompute",
        "update",
        "optimizer",
    }
    assert [row["name"] for row in document["layers"]] == ["0", "3"]
    assert document["coverage"]["tunable_flops_share"] == 1.0
    assert document["memory"]["optimizer"] == 2 * document["memory"]["parameters"] + 4 * 6  # and a step count each
    assert not list(Path(saved[1]).parent.glob("autoprec-runs"))


def test_a_saved_step_is_shown_again(saved):
    document, step = saved
    assert json.loads(step.read_text()) == document
    assert GraphReport.from_json(document) == GraphReport.from_json(json.loads(step.read_text()))
    result = CliRunner().invoke(inspect, [str(step)])
    assert result.exit_code == 0
    assert "8x16x32" in result.stdout
    assert "100.0% of the step's" in result.stdout


def test_of_a_model_of_many_layers_as_many_are_printed_as_can_be_read(saved, tmp_path):
    document = json.loads(saved[1].read_text())
    (tmp_path / "wide.json").write_text(json.dumps(document | {"layers": document["layers"][:1] * 1500}))
    result = CliRunner().invoke(inspect, [str(tmp_path / "wide.json")])
    assert result.exit_code == 0
    assert result.stdout.count(document["layers"][0]["type"]) == 1000
    assert "500 more" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["config.json", "train.py"], UsageError),
        (["no-such-file.json"], FileError),
        (["no_such_train.py"], UsageError),
    ],
)
def test_bad_input(arguments, error):
    result = CliRunner().invoke(inspect, arguments)
    assert isinstance(result.exception, error)


def test_a_script_that_fails_says_so(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('the data is gone')\n")
    result = CliRunner().invoke(inspect, [str(script)])
    assert isinstance(result.exception, ScriptError)
    assert "the data is gone" in str(result.exception)


def test_a_configuration_is_inspected_without_a_script(tmp_path, monkeypatch):
    install(monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    result = CliRunner().invoke(inspect, ["--json", str(tmp_path / "config.json")])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["source"] == "fake"
    assert len(json.loads(result.stdout)["layers"]) == 7 * 32 + 1
