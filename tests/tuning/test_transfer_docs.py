"""The page on transfers, command by command: each is run, in its order, in one folder."""

import runpy
import shlex
from pathlib import Path

import pytest
import torch

from autoprec.graph.recorder import record_step
from autoprec.policy import load_policy, resolve, save_policy
from autoprec.support.files import write_json
from tests.cli.helpers import autoprec
from tests.documents import ROOT, snippets
from tests.tuning.transfer.test_proxy import policy

PAGE = "docs/long_run.md"
COMMANDS = [line for s in snippets("sh") if s.page == PAGE for line in s.text.splitlines() if line]
#: The example at a size that trains in a test: the proxy, and the user's own script.
SMALL = f"""
import runpy, sys
sys.argv[1:] = ["--width", "32", "--depth", "2", "--batch", "2", "--steps", "60", *sys.argv[1:]]
runpy.run_path({str(ROOT / "examples" / "llama_proxy.py")!r}, run_name="__main__")
"""
PARTS = {
    "titan_layers.txt": ("output", "layers.{}.attention.wq", "layers.{}.attention.wo", "layers.{}.feed_forward.w1"),
    "megatron_layers.txt": (
        "output_layer",
        "decoder.layers.{}.self_attention.linear_qkv",
        "decoder.layers.{}.self_attention.linear_proj",
        "decoder.layers.{}.mlp.linear_fc1",
        "decoder.layers.{}.mlp.linear_fc2",
    ),
}


def searched(folder: Path) -> None:
    """Leave what the page's search leaves: a policy, and a study of the example's model."""
    found = policy(("*.mlp.*", "fp8_rowwise"), ("lm_head", "bf16"))
    save_policy(found, folder / "policy.yaml")
    model = runpy.run_path(str(ROOT / "examples" / "llama_proxy.py"))["Llama"](32, 2, 4, 2)
    tokens = torch.zeros(2, 64, dtype=torch.long)
    report = record_step(model, lambda: model(tokens, tokens).backward())
    study = folder / "autoprec-runs" / "llama_proxy"
    study.mkdir(parents=True)
    write_json(study / "graph.json", report.to_json())
    (study / "study.db").touch()
    save_policy(found, study / "policy.yaml")


def run(line: str) -> None:
    """Run one command line as a shell would; what it prints goes where ``>`` says."""
    command, _, printed = line.partition(" > ")
    done = autoprec(*shlex.split(command)[1:])
    assert done.code == 0, f"{line}\n{done.err}"
    if printed:
        Path(printed).write_text(done.out)


def test_the_page_searches_transfers_checks_and_exports() -> None:
    assert {line.split()[1] for line in COMMANDS} == {"search", "transfer", "check", "inspect", "export"}
    assert all(line.split()[0] == "autoprec" for line in COMMANDS)


@pytest.mark.usefixtures("warm")
def test_every_command_of_the_page_runs_after_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    searched(tmp_path)
    (tmp_path / "examples").mkdir()
    for script in ("examples/llama_proxy.py", "train_big.py"):
        Path(script).write_text(SMALL)
    named = {path: [n.format(i) for n in names for i in range(80 if "{}" in n else 1)] for path, names in PARTS.items()}
    for path, names in named.items():
        Path(path).write_text("\n".join(names))
    for line in COMMANDS:
        if not line.startswith("autoprec search "):  # minutes; what it leaves is there already
            run(line)
    for path, names in named.items():
        moved = load_policy(path.replace("_layers.txt", ".yaml"))
        assert set(resolve(moved, names)) == set(names)  # strict: every rule matches a layer of that stack
        assert moved.evidence["target"] == "h100"
    assert Path("titan/precision_torchtitan.py").exists()
    assert Path("megatron/te_precision_config.yaml").exists()
