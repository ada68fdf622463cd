"""``autoprec show published:``, and a published policy in the place of a file."""

import json
from pathlib import Path

import pytest

from autoprec.cli.policies.published import bound
from autoprec.policy import parse_policy, resolve
from autoprec.policy.library import published_names
from benchmarks.cost.decoder import DecoderConfig, decoder_report
from tests.cli.helpers import autoprec


@pytest.fixture
def step(tmp_path: Path) -> Path:
    path = tmp_path / "step.json"
    report = decoder_report(DecoderConfig(256, 12, 4, 512, 1024), batch=1, seq=64)
    path.write_text(json.dumps(report.to_json()), encoding="utf-8")
    return path


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(64, 32)\n"
        "    def forward(self, x):\n"
        "        return x + self.down_proj(self.up_proj(x).relu())\n"
        "model = nn.Sequential()\n"
        "model.layers, model.lm_head = nn.Sequential(*[Block() for _ in range(3)]), nn.Linear(32, 32)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.randn(16, 32)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n",
        encoding="utf-8",
    )
    return path


def test_all_are_listed_with_evidence() -> None:
    found = autoprec("show", "published:")
    assert found.code == 0
    assert all(name in found.out for name in published_names())
    assert "MMLU-Pro 62.58" in found.out
    documents = json.loads(autoprec("show", "published:", "--json").out)
    assert [document["name"] for document in documents] == published_names()


def test_one_is_shown_with_rules_source_and_what_is_not_published() -> None:
    lines = autoprec("show", "published:nvfp4-12b").out.splitlines()
    assert lines[1] == "2025-09, arXiv 2509.25149, section 4; for 62 blocks"
    assert "  the last 8 blocks: bf16" in lines
    assert lines.index("evidence") < lines.index("not published")
    assert json.loads(autoprec("show", "published:nvfp4-12b", "--json").out)["blocks"] == 62


def test_an_unknown_one_names_the_nearest() -> None:
    found = autoprec("show", "published:nvfp4-12")
    assert found.code == 2
    assert "did you mean 'nvfp4-12b'?" in found.err


def test_with_a_step_it_is_shown_layer_by_layer_and_written_as_a_policy(step: Path) -> None:
    found = autoprec("show", "published:torchtitan-nvfp4-8b", step)
    assert "model.layers.11.mlp.up_proj" in found.out
    assert "published:torchtitan-nvfp4-8b: router: no layer of this model has this role" in found.err
    text = autoprec("show", "published:torchtitan-nvfp4-8b", step, "--lean").out
    policy = parse_policy(text)
    plans = resolve(policy, ["model.layers.9.mlp.up_proj", "model.layers.10.mlp.up_proj"], strict=False)
    assert [plan.describe() for plan in plans.values()] == ["nvfp4", "bf16"]
    assert autoprec("show", "published:nvfp4-12b:scaled", step, "--json").code == 0


def test_a_file_is_loaded_without_a_step(policy_file: Path) -> None:
    def step() -> None:
        raise AssertionError("no step is needed")

    assert bound(policy_file, step).layers  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("command", [("run",), ("check", "--steps", "1")])
def test_a_script_runs_under_a_published_policy(command: tuple[str, ...], script: Path) -> None:
    found = autoprec(*command, "--policy", "published:torchtitan-nvfp4-8b", script)
    assert found.code == 0, found.err
    assert "published:torchtitan-nvfp4-8b: router: no layer of this model has this role" in found.err
    refused = autoprec(*command, "--policy", "published:nvfp4-12b", script)
    assert refused.code == 1
    assert "nvfp4-12b:scaled keeps the same share of this model" in refused.err


def test_an_unknown_one_is_refused_before_the_script_is_started(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("open('started', 'w')\n", encoding="utf-8")
    found = autoprec("run", "--policy", "published:deepseek-v9", script)
    assert found.code == 2
    assert "did you mean 'deepseek-v" in found.err
    assert not (tmp_path / "started").exists()
