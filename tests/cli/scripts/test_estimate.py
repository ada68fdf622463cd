from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autoprec.cli.phases import Phases
from autoprec.cli.recording import record_step
from autoprec.cli.scripts.estimate import estimate
from autoprec.cost.configuration import config_report
from autoprec.errors import FileError, NothingAcceptableError, UnknownNameError, UsageError
from autoprec.graph.report import GraphReport
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.setup import Setup
from benchmarks.cost.decoder import DecoderConfig, decoder_report
from tests.stub_transformers import LLAMA_8B, install


@functools.cache
def report_of(text: str, folder: Path, **how: Any) -> GraphReport:
    """Return the step of a configuration, recorded once for all tests: a second of an 8B model each."""
    path = folder / "config.json"
    path.write_text(text)
    return config_report(path, **how)


@pytest.fixture(autouse=True)
def each_configuration_is_recorded_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()

    def recorded(path: Path | str, **how: Any) -> GraphReport:
        return report_of(Path(path).read_text(), folder, **how) if Path(path).is_file() else config_report(path, **how)

    monkeypatch.setattr("autoprec.cost.configuration.config_report", recorded)


def run(*args: str) -> Any:
    return CliRunner().invoke(estimate, list(args), catch_exceptions=False)


@pytest.fixture
def graph(tmp_path: Path) -> str:
    report = decoder_report(DecoderConfig(256, 4, 4, 1024, 256, gated=False), batch=16, seq=128)
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(report.to_json()))
    return str(path)


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The configuration of Llama3-8B, which a stand-in for transformers builds."""
    install(monkeypatch)
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(LLAMA_8B))
    return str(path)


@pytest.fixture
def shallow(llama: str) -> str:
    """A quarter of its blocks, where what is asked does not depend on how many there are."""
    Path(llama).write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": 8}))
    return llama


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two layers of a model of 400 billion parameters."""
    heads = {"num_attention_heads": 128, "num_key_value_heads": 8}
    install(monkeypatch)
    document = {"model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 2, **heads}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document | {"intermediate_size": 53248, "vocab_size": 128256}))
    return str(path)


def test_a_tiny_model_stays(graph: str) -> None:
    found = run("--target", "h100", graph)
    assert found.exit_code == 0
    assert "verdict   stay" in found.output
    assert "too small" in found.output
    assert "calibrated on NVIDIA H100" in found.output


def test_without_a_script_auto_is_the_gpu_of_this_machine_where_there_is_one(
    graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(run("--json", graph).stdout)["target"] == "cpu"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert json.loads(run("--json", graph).stdout)["target"] == "h100"
    assert json.loads(run("--json", "--target", "cpu", graph).stdout)["target"] == "cpu"


def test_the_same_model_scaled_up_is_searched(graph: str) -> None:
    found = run("--target", "h100", "--cost-scale", "width=16,depth=4,tokens=32", "--json", graph)
    document = json.loads(found.stdout)
    assert document["source"] == "modelled"
    assert document["verdict"]["kind"] == "search"
    assert document["verdict"]["bound_speedup"] > 1.3
    rows = {row["name"]: row for row in document["verdict"]["rows"]}
    assert rows["lm_head"]["best"] == "bf16"
    assert document["step"]["time_ms"] == pytest.approx(sum(document["step"]["breakdown"].values()))


def test_where_there_is_no_script_no_part_of_the_document_speaks_of_one(tmp_path: Path, llama: str) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("schema: autoprec.space/1\nname: rows\nchoices: [{match: '*', choices: [keep, fp8_rowwise]}]\n")
    args = ("--seq", "128", "--space", str(space), "--json", llama)
    document = json.loads(run("--target", "h100", *args).stdout)
    assert "over the model in pure bf16 on" in document["verdict"]["reason"]


TRAIN = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net[2](net[1](net[0](torch.randn(32, 64)))).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.usefixtures("warm")
def test_it_says_of_a_script_what_a_search_of_it_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is called by its parts only, autocast around the forward would never run: nobody offers it."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    found = json.loads(run("--target", "h100", "--json", "train.py").stdout)
    with Phases() as phases:
        report, host = record_step(("train.py",), phases)
    setup = Setup.of(SearchOptions(command=("train.py",), target="h100"), host, report)
    assert setup.space.activations == ("keep",)
    assert found["verdict"] == json.loads(json.dumps(setup.verdict().to_json()))
    assert found["space"] == setup.space.name
    assert found["as_compiled"]


def test_memory_is_shown_and_held_against_the_device(graph: str, wide: str, llama: str) -> None:
    small = run("--target", "h100", graph).output
    assert "one device has 74.5 GiB" in small
    large = run("--target", "h100", "--seq", "4096", wide)
    assert (
        "MORE than the 64.1 GiB that one device of 74.5 GiB has less a margin: shard, checkpoint, or cut the batch"
        in large.output
    )
    assert "batch     no micro-batch fits in 64.1 GiB, not even of one sample: shard or checkpoint" in large.output
    found = json.loads(run("--target", "h100", "--json", graph).stdout)["memory"]
    assert f"of one device: bf16 {found['largest'][0]['micro_batch']:,} (" in small
    assert found["largest"][0]["choice"] == "bf16"
    assert all(row["samples"] > 0 < row["samples_per_s"] for row in found["largest"])
    assert " tokens/s)" in small
    assert "e+" not in small.split("batch ")[1]
    record = json.loads(Path(graph).read_text())
    record["batch"]["tokens"] = record["batch"]["samples"]
    Path(graph).write_text(json.dumps(record))
    assert " samples/s)" in run("--target", "h100", graph).output, "a sample of one token is not a sequence"
    document = json.loads(run("--target", "h100", "--json", "--config", llama).stdout)["memory"]
    assert not document["fits"]
    assert document["baseline"]["parameters"] == pytest.approx(4 * 8.03e9, rel=0.01)
    assert document["best_uniform"]["saved"] < document["baseline"]["saved"]


def test_the_choice_that_wins_at_the_memory_limit_is_named(shallow: str) -> None:
    """Eight choices and no ratio, in 3.818e+04 tokens/s, left that to the reader."""
    args = ("--target", "b200", "--shards", "8")
    rows = {row["choice"]: row for row in json.loads(run(*args, "--json", shallow).stdout)["memory"]["largest"]}
    first, best = rows["bf16"], max(rows.values(), key=lambda row: row["tokens_per_s"])
    gain = best["tokens_per_s"] / first["tokens_per_s"]
    said = f"{best['choice']} {best['micro_batch']} ({best['tokens_per_s']:,.0f} tokens/s, {gain:.2f}x)"
    line = next(line for line in run(*args, shallow).output.splitlines() if line.startswith("batch"))
    assert said in line
    assert line.endswith(f"; {best['choice']} is the fastest there")


def test_recomputation_and_shards_are_numbers_of_a_configuration(llama: str) -> None:
    Path(llama).write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": 4, "vocab_size": 4096}))

    def memory(*args: str) -> dict[str, int]:
        size = ("--batch", "4", "--seq", "4096")
        return json.loads(run("--target", "b200", "--json", *size, *args, llama).stdout)["memory"]["baseline"]

    plain, half, full = (memory("--recompute", mode) for mode in ("none", "selective", "full"))
    assert plain["saved"] > 2 * half["saved"] > 4 * full["saved"]
    shared = memory("--shards", "8")
    assert shared["optimizer"] == pytest.approx(plain["optimizer"] / 8)
    assert shared["gathered"] > 0


def test_a_recorded_step_says_what_fp8_does_to_memory(tmp_path: Path) -> None:
    report = decoder_report(DecoderConfig(4096, 2, 32, 16384, 32000), batch=1, seq=8192).to_json()
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({**report, "source": "recorded"}))
    found = run("--target", "h100", str(path))
    assert " GiB with fp8_delayed; one device has 74.5 GiB" in found.output
    report["memory"] = {}
    path.write_text(json.dumps(report))
    assert "memory    not modelled" in run("--target", "h100", str(path)).output


def test_the_choices_and_the_space_are_named(graph: str) -> None:
    found = run("--target", "b200", graph).output
    assert (
        "choices   bf16, mxfp8, fp8_tensorwise, fp8_delayed, mxfp8/wgrad=bf16, fp8_delayed/wgrad=bf16, "
        "bf16_fp32_output, tf32 (space blackwell-mx)" in found
    )


def test_a_users_own_hopper_is_offered_fp8(tmp_path: Path, shallow: str) -> None:
    path = tmp_path / "card.yaml"
    path.write_text(
        """schema: autoprec.targets/1
targets:
  MyCard: {title: My card, vendor: nvidia, architecture: hopper, capability: "9.0", units: 100, memory: 40,
           bandwidth: 1500, peaks: {bf16: 400, fp8: 800}, links: {}, source: me, date: "2026-02"}
"""
    )
    document = json.loads(run("--target", str(path), "--json", shallow).stdout)
    assert (document["target"], document["space"]) == ("MyCard", "hopper-fp8")
    assert document["verdict"]["bound_speedup"] > 1.2


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        (["config.json", "train.py"], UsageError, "takes no arguments"),
        ([], UsageError, "which script"),
        (["--config", "config.json", "train.py"], UsageError, "--config stands in the place of a script"),
        (["--config", "config.yaml"], UsageError, "is not a .json file"),
        (["--target", "h10", "config.json"], UnknownNameError, "did you mean 'h100'"),
        (["--recompute", "full", "train.py"], UsageError, "--recompute and --shards have no effect on a script"),
        (["--target", "h100", "--seq", "128", "train.py"], UsageError, "--seq, .* have no effect on a script"),
        (["--target", "h100", "missing.json"], FileError, "no such file"),
        (["--target", "h100", "--cost-scale", "widht=2", "config.json"], UsageError, "unknown cost scale"),
        (["--cost-scale", "width=2", "config.json"], UsageError, "without --target would model this CPU"),
    ],
)
def test_bad_input_is_refused(args: list[str], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        run(*args)


def test_a_model_without_tunable_layers_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    report = decoder_report(DecoderConfig(64, 1, 4, 256, 64), batch=1, seq=8).to_json()
    report["layers"] = []
    path.write_text(json.dumps(report))
    with pytest.raises(NothingAcceptableError, match="no trainable GEMM"):
        run("--target", "h100", str(path))


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_real_script_is_recorded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    document = json.loads(run("--target", "h100", "--json", str(script)).stdout)
    assert document["verdict"]["bound_over_script"] < 1.1
    assert {row["name"] for row in document["verdict"]["rows"]} == {"0", "2"}
    assert document["as_compiled"]
    text = run("--target", "h100", str(script)).stdout
    assert "as if compiled, which the script is not" in text
    assert "as if compiled" not in run(str(script)).stdout


@pytest.mark.parametrize("text", ["[]", '{"layers": [], "operators": [[1, 2]]}'])
def test_a_file_that_is_not_a_recorded_step_is_the_users_to_mend(tmp_path: Path, text: str) -> None:
    path = tmp_path / "list.json"
    path.write_text(text)
    with pytest.raises(FileError, match=r"is not a recorded step|holds a list"):
        run("--target", "h100", str(path))


def test_a_step_under_a_policy_is_told_and_one_that_the_target_cannot_run_is_refused_by_name(llama: str) -> None:
    asked = ("--policy", "published:torchtitan-nvfp4-8b")
    found = json.loads(run("--target", "b200", *asked, "--json", llama).stdout)
    told = found["policy"]
    assert told["name"] == "published:torchtitan-nvfp4-8b"
    assert told["speedup"] == pytest.approx(found["step"]["time_ms"] / told["step_ms"])
    assert told["speedup"] > 1.1
    assert f"{told['speedup']:.2f}x over bf16" in run("--target", "b200", *asked, llama).output
    other = run("--target", "h100", *asked, llama).output
    assert "does not run on the target: 189 layers: NVFP4 needs compute capability 10.0" in other
