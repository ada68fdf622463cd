from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.cost import CostModel
from autoprec.graph.recorder import StepRecorder
from autoprec.graph.report import GraphReport
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import TARGETS
from autoprec.precision.recipes import BUILTIN_RECIPES
from benchmarks.cost.decoder import PRESETS, DecoderConfig, decoder_report


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama3-8b", 8.03e9), ("llama3-70b", 70.55e9), ("llama3-405b", 405.8e9), ("gpt2", 124e6)]
)
def test_parameters_are_those_of_the_real_model(name: str, parameters: float) -> None:
    report = decoder_report(PRESETS[name], batch=1, seq=64)
    assert report.model["parameters"] == pytest.approx(parameters, rel=0.01)


def test_flops_are_six_per_parameter_and_token_plus_attention() -> None:
    report = decoder_report(PRESETS["llama3-8b"], batch=1, seq=4096)
    gemms = sum(layer.total_flops for layer in report.layers)
    embedded = 128256 * 4096
    assert gemms == pytest.approx(6 * (8.03e9 - embedded) * 4096, rel=0.01)
    assert report.total_flops > gemms


def test_recomputation_repeats_forward_gemms() -> None:
    plain, half, full = (
        decoder_report(PRESETS["gpt2"], batch=1, seq=64, recompute=mode) for mode in ("", "selective", "full")
    )
    counts = [sum(layer.total_flops for layer in report.layers) for report in (plain, half, full)]
    assert counts == sorted(counts)
    assert counts[2] < counts[0] * 4 / 3
    saved = [report.memory["saved_for_backward"] for report in (full, half, plain)]
    assert saved == sorted(saved)
    assert full.memory["backward"] >= half.memory["backward"] >= plain.memory["backward"]


class Block(nn.Module):
    """What a configuration without a gate describes: LayerNorms, causal attention, an MLP with GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = (part(y).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return result


class Decoder(nn.Module):
    def __init__(self, width: int, blocks: int, words: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.layers:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids.flatten())


@pytest.mark.parametrize("recipe", [None, "fp8_tensorwise", "mxfp8"])
def test_a_configuration_saves_what_the_model_saves(recipe: str | None) -> None:
    model = Decoder(64, 3, 256).bfloat16()
    with StepRecorder(model) as recorder:
        model(torch.randint(0, 256, (2, 128))).backward()
    totals = []
    for report in (recorder.report(), decoder_report(DecoderConfig(64, 3, 4, 256, 256, gated=False), batch=2, seq=128)):
        plan = LayerPlan() if recipe is None else LayerPlan.uniform(BUILTIN_RECIPES[recipe])
        plans = {layer.name: plan for layer in report.layers}
        found = CostModel(report, TARGETS["b200"], compiled=False).memory(plans)
        assert found is not None
        totals.append((found.saved, found.weight_casts))
    assert totals[1][0] == pytest.approx(totals[0][0], rel=0.03)
    assert totals[1][1] == pytest.approx(totals[0][1])


def test_nvfp4_pays_for_the_products_that_selective_checkpointing_keeps_of_others() -> None:
    plain, half, full = (
        CostModel(decoder_report(PRESETS["llama3-8b"], batch=1, seq=4096, recompute=mode), TARGETS["b200"])
        for mode in ("", "selective", "full")
    )
    for name in ("mxfp8", "nvfp4"):
        plan = LayerPlan.uniform(BUILTIN_RECIPES[name])
        gate = [model.layer_cost("model.layers.0.mlp.gate_proj", plan).gemm for model in (plain, half, full)]
        assert gate[1] == pytest.approx(gate[2] if name == "nvfp4" else gate[0])
        assert gate[2] > 1.2 * gate[0]
        down = [model.layer_cost("model.layers.0.mlp.down_proj", plan).gemm for model in (plain, half)]
        assert down[0] == pytest.approx(down[1])


def test_checkpointed_blocks_save_no_codes_and_nvfp4_runs_wholly_again() -> None:
    saved = {}
    for mode in ("", "selective", "full"):
        report = decoder_report(PRESETS["llama3-8b"], batch=1, seq=4096, recompute=mode)
        model = CostModel(report, TARGETS["b200"])
        for name in ("bf16", "mxfp8", "nvfp4"):
            plan = LayerPlan.uniform(BUILTIN_RECIPES[name])
            found = model.memory({layer.name: plan for layer in report.layers if layer.name != "lm_head"})
            assert found is not None
            assert (found.weight_casts > 0) == (not mode and name != "bf16")
            saved[mode, name] = found.saved
    assert saved["", "nvfp4"] < saved["", "mxfp8"] < 0.9 * saved["", "bf16"]
    assert saved["selective", "nvfp4"] < 0.5 * saved["selective", "bf16"] == 0.5 * saved["selective", "mxfp8"]
    assert len({saved["full", name] for name in ("bf16", "mxfp8", "nvfp4")}) == 1


def test_a_report_from_a_configuration_is_a_report() -> None:
    report = decoder_report(DecoderConfig(64, 2, 4, 256, 100), batch=2, seq=8)
    assert GraphReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert report.source == "analytic"
    assert {"model.layers.0.qkv", "lm_head"} <= set(report.groups)


def test_attention_is_no_tunable_flop() -> None:
    short, long = (decoder_report(PRESETS["gpt2"], batch=1, seq=seq).tunable_flops_share for seq in (128, 8192))
    assert 0.5 < long < short < 1.0
