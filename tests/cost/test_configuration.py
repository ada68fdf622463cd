"""A configuration is built by transformers and recorded: a stand-in for our side, the package itself where it is."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autoprec.cost import CostModel
from autoprec.cost.configuration import config_report
from autoprec.errors import FileError, MissingDependencyError, UsageError
from autoprec.precision.hardware import TARGETS
from autoprec.support.optional import is_available
from tests.stub_transformers import LLAMA_8B, install

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 96,
}


def written(folder: Path, document: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(document))
    return str(path)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def parameters(**changes: Any) -> int:
    c = SMALL | changes
    h, kv, inner = c["hidden_size"], c["num_key_value_heads"] * 16, c["intermediate_size"]
    each = inner if isinstance(inner, list) else [inner] * c["num_hidden_layers"]
    blocks = sum(2 * h * h + 2 * h * kv + 3 * h * size + 2 * h for size in each)
    return blocks + h + c["vocab_size"] * h * (1 if c.get("tie_word_embeddings") else 2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"returns_tuple": True},
        {"num_hidden_layers": 2},
        {"intermediate_size": [128, 128, 256, 128, 256, 128]},
        {"intermediate_size": [128, 160, 192, 224, 256, 288]},
    ],
)
def test_parameters_and_layers_are_those_of_the_model_that_is_built(
    tmp_path: Path, stub: None, changes: dict[str, Any]
) -> None:
    report = config_report(written(tmp_path, SMALL | changes), batch=2, seq=16)
    count = parameters(**changes)
    assert report.model["parameters"] == count
    assert (report.memory["parameters"], report.memory["optimizer"]) == (4 * count, 8 * count)
    blocks = (SMALL | changes)["num_hidden_layers"]
    tied = bool(changes.get("tie_word_embeddings")) and not report.layer("lm_head").tunable
    assert len(report.tunable) == 7 * blocks + (0 if tied else 1)
    inner = (SMALL | changes)["intermediate_size"]
    for number in range(blocks):
        size = inner[number] if isinstance(inner, list) else inner
        fprop = report.layer(f"model.layers.{number}.mlp.up_proj").gemms[0]
        assert (fprop.m, fprop.k, fprop.n) == (32, 64, size)
    assert report.source == "fake"
    assert any("from the configuration" in note for note in report.notes)


@pytest.mark.parametrize(
    "text",
    [
        "[0.0, Infinity]",
        "[-Infinity, NaN]",
        '[0.0, {"__float__": "Infinity"}]',
        '[0.0, {"__float__": Infinity}]',
        '{"time_step": {"limit": {"__float__": "-Infinity"}}}',
    ],
)
def test_a_number_without_a_bound_is_one(
    tmp_path: Path, stub: None, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Configurations of state-space models hold a limit that is infinite, as Python or as transformers writes it."""
    known: Any = sys.modules["transformers"].AutoConfig  # type: ignore[attr-defined]
    seen: dict[str, Any] = {}
    build = known.for_model

    def for_model(family: str, **sizes: Any) -> Any:
        seen.update(sizes)
        return build(family, **{name: one for name, one in sizes.items() if name != "time_step_limit"})

    monkeypatch.setattr(known, "for_model", for_model)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL)[:-1] + f', "time_step_limit": {text}}}')
    assert config_report(path, batch=2, seq=16).tunable
    limit = seen["time_step_limit"]
    flat = [limit["time_step"]["limit"]] if isinstance(limit, dict) else limit
    assert all(isinstance(one, float) for one in flat)
    assert not all(map(math.isfinite, flat))


def test_a_model_of_8b_is_recorded_in_seconds_and_estimated(tmp_path: Path, stub: None) -> None:
    began = time.process_time()
    report = config_report(written(tmp_path, LLAMA_8B), batch=1, seq=8192)
    assert time.process_time() - began < 20  # 2 s where nothing else runs
    assert report.model["parameters"] == pytest.approx(8.03e9, rel=0.001)
    assert report.total_flops > 6 * 7.5e9 * 8192
    found = CostModel(report, TARGETS["h100"]).estimate({})
    assert 6 * 8.03e9 * 8192 / (found.time_ms / 1e3) / 989e12 == pytest.approx(0.55, abs=0.15)


def test_checkpointing_recomputes_and_saves_less(tmp_path: Path, stub: None) -> None:
    path = written(tmp_path, SMALL)
    plain, half, full = (config_report(path, batch=1, seq=32, recompute=how) for how in ("", "selective", "full"))
    again = [sum(g.flops for x in r.layers for g in x.gemms if g.role == "recompute") for r in (plain, half, full)]
    assert 0 == again[0] < again[1] < again[2]
    saved = [r.memory["saved_for_backward"] for r in (plain, full)]
    assert saved[0] > 2 * saved[1]


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"hidden_size": 8}, "has no model_type"),
        ({"model_type": "nowhere_7"}, "of the family 'nowhere_7', which transformers 5.0.0 does not build"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "of BertForMaskedLM, not of a decoder"),
        (SMALL | {"is_encoder_decoder": True}, "'llama', not of a decoder"),
        (SMALL | {"num_attention_heads": -1}, "not one that transformers builds: heads must be positive"),
        (SMALL | {"broken": "it needs a GPU"}, "transformers cannot build it: it needs a GPU"),
        (SMALL | {"num_key_value_heads": 3}, "runs no training step on shapes alone"),
        (SMALL | {"num_hidden_layers": 100_000_000}, "num_hidden_layers is 100,000,000"),
    ],
)
def test_what_is_not_built_is_refused_by_name_with_its_reason(
    tmp_path: Path, stub: None, document: dict[str, Any], says: str
) -> None:
    with pytest.raises(FileError) as refused:
        config_report(written(tmp_path, document), batch=1, seq=8)
    assert says in refused.value.what
    assert refused.value.fix


def test_a_family_that_does_not_checkpoint_says_so(tmp_path: Path, stub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.stub_transformers.Llama.supports_gradient_checkpointing", False)
    with pytest.raises(UsageError, match="does not checkpoint"):
        config_report(written(tmp_path, SMALL), batch=1, seq=8, recompute="full")


def test_a_block_that_needs_what_another_left_is_run_with_all_others(
    tmp_path: Path, stub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of an earlier block, as Gemma3n shares them: that block has to run."""
    from tests import stub_transformers as stand_in

    kept: dict[int, Any] = {}
    plain = stand_in.Attention.forward

    def forward(self: Any, x: Any) -> Any:
        kept[self.layer_idx] = x
        return plain(self, x) + (0.0 * kept[4] if self.layer_idx == 5 else 0.0)

    monkeypatch.setattr(stand_in.Attention, "forward", forward)
    init = stand_in.Block.__init__

    def made(self: Any, c: Any, number: int) -> None:
        init(self, c, number)
        self.shares = number == 5

    monkeypatch.setattr(stand_in.Block, "__init__", made)
    report = config_report(written(tmp_path, SMALL), batch=1, seq=8)
    assert report.model["parameters"] == parameters()
    assert len({row.module for row in report.operators if row.module.endswith("q_proj")}) == 6


def test_without_the_package_its_name_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match="transformers"):
        config_report(written(tmp_path, SMALL), batch=1, seq=8)


def test_a_package_that_is_too_old_is_refused(tmp_path: Path, stub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(MissingDependencyError, match=r"4\.57\.1 is too old .*: 5\.0 or newer"):
        config_report(written(tmp_path, SMALL), batch=1, seq=8)


@pytest.mark.skipif(not is_available("transformers"), reason="transformers is not installed")
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3", {"head_dim": 16}),
        ("gpt2", {}),
        ("mixtral", {"num_local_experts": 4}),
        ("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"]}),
    ],
)
def test_families_of_transformers_have_their_own_parameters(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    import torch
    import transformers

    sizes: dict[str, Any] = SMALL | {"moe_intermediate_size": 64, "num_experts_per_tok": 2} | more
    del sizes["model_type"]
    config = transformers.AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    report = config_report(written(tmp_path, {"model_type": family, **sizes}), batch=1, seq=32)
    assert report.model["parameters"] == sum(p.numel() for p in model.parameters())
    weights = {name for name, _ in model.named_parameters()}
    assert {layer.weight for layer in report.layers} <= weights | {"lm_head.weight"}
