from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.cost import CostModel, CostScale
from autoprec.cost.memory import MemoryEstimate, step_memory
from autoprec.cost.saved import Setting
from autoprec.graph.recorder import StepRecorder
from autoprec.graph.report import GraphReport
from autoprec.policy.sections import OptimizerPolicy
from autoprec.precision.hardware import TARGETS
from benchmarks.cost.decoder import DecoderConfig, decoder_report

PLAIN = OptimizerPolicy()
ONE = CostScale()


def parts(report: GraphReport, *how: Any, **more: Any) -> MemoryEstimate:
    found = step_memory(report, Setting(), *how, **more)
    assert found is not None
    return found.at_peak()


def test_parts_add_up_to_the_counts(tiny: GraphReport) -> None:
    found = parts(tiny, PLAIN, ONE, float(tiny.model["parameters"]))
    assert found is not None
    assert found.parameters == tiny.memory["parameters"]
    assert found.optimizer == tiny.memory["optimizer"]
    assert found.total == pytest.approx(sum(tiny.memory.values()))
    plain = found.to_json()
    assert plain.pop("total") == pytest.approx(sum(plain.values()))


def test_cheaper_states_shrink_what_they_store(tiny: GraphReport) -> None:
    size = float(tiny.model["parameters"])
    lean = OptimizerPolicy(exp_avg="e4m3", exp_avg_sq="fp16_scaled", gradients="bf16")
    found = parts(tiny, lean, ONE, size)
    assert found is not None
    assert found.optimizer == pytest.approx(size * 3.03125, rel=1e-3)  # 1.03 + 2 bytes in place of 8
    assert found.gradients == pytest.approx(size * 2)


def test_a_scaled_model_needs_what_the_real_one_needs() -> None:
    small = decoder_report(DecoderConfig(128, 2, 4, 512, 1024, gated=False), batch=2, seq=64)
    big = decoder_report(DecoderConfig(512, 8, 16, 2048, 1024, gated=False), batch=8, seq=64)
    scale = CostScale(width=4, depth=4, tokens=4)
    found = CostModel(small, TARGETS["h100"], scale=scale).estimate({}).memory_bytes
    assert found == pytest.approx(CostModel(big, TARGETS["h100"]).estimate({}).memory_bytes, rel=0.25)


class Attention(nn.Module):
    """A block whose attention is written out, or left to torch's fused kernel."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.fused, self.norm, self.qkv = fused, nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.dropout(torch.softmax(q @ k.transpose(-1, -2), dim=-1), 0.1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class Words(nn.Module):
    """A language model of 512 words."""

    def __init__(self, width: int, depth: int, fused: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, width), nn.Linear(width, 512)
        self.blocks = nn.ModuleList(Attention(width, fused) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return torch.log_softmax(self.head(x).float(), -1)


def recorded(fused: bool, width: int = 32, depth: int = 2, batch: int = 2, seq: int = 64) -> GraphReport:
    torch.manual_seed(0)
    model = Words(width, depth, fused)
    with StepRecorder(model) as recorder:
        model(torch.randint(0, 512, (batch, seq))).square().mean().backward()
    return recorder.report()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("sizes", "scale"),
    [
        ({"batch": 8}, CostScale(tokens=4)),
        ({"seq": 256}, CostScale(tokens=4, seq=4)),
        ({"width": 128}, CostScale(width=4)),
        ({"depth": 8}, CostScale(depth=4)),
    ],
)
def test_what_is_saved_grows_as_in_the_model_that_is_really_that_large(
    fused: bool, sizes: dict[str, int], scale: CostScale
) -> None:
    found = CostModel(recorded(fused), TARGETS["h100"], scale=scale).memory({})
    assert found is not None
    assert found.saved == pytest.approx(recorded(fused, **sizes).memory["saved_for_backward"], rel=0.03)


def test_the_largest_batch_is_the_one_whose_step_just_fits() -> None:
    model = CostModel(recorded(True), TARGETS["h100"])
    for limit in (1e6, 4e6, 5e7):
        most = model.most_samples({}, limit)
        assert most is not None
        needs = []
        for samples in (most, most + 1):
            step = CostModel(recorded(True, batch=max(1, samples)), TARGETS["h100"]).memory({})
            assert step is not None
            needs.append(step.total)
        assert not most or needs[0] <= limit * 1.001
        assert needs[1] > limit * 0.999
    assert CostModel(replace(recorded(True), batch={}), TARGETS["h100"]).most_samples({}, 1e9) is None


def test_of_a_written_down_step_the_largest_batch_is_the_one_that_fits() -> None:
    sizes = DecoderConfig(256, 4, 4, 512, 1024)
    model = CostModel(decoder_report(sizes, batch=2, seq=64), TARGETS["h100"])
    most = model.most_samples({}, 2e9)
    assert most is not None
    fits, more = (
        CostModel(decoder_report(sizes, batch=b, seq=64), TARGETS["h100"]).memory({}) for b in (most, most + 1)
    )
    assert fits is not None
    assert more is not None
    assert fits.total <= 2e9 < more.total


def test_shards_divide_the_state(tiny: GraphReport) -> None:
    one, eight = (parts(tiny, PLAIN, ONE, float(tiny.model["parameters"]), shards=shards) for shards in (1, 8))
    assert eight.optimizer == pytest.approx(one.optimizer / 8)
    assert eight.saved == one.saved
    assert one.gathered == 0 < eight.gathered


def test_a_report_without_counts_has_no_memory(tiny: GraphReport) -> None:
    bare = replace(tiny, memory={})
    assert CostModel(bare, TARGETS["h100"]).memory({}) is None
    assert CostModel(bare, TARGETS["h100"]).estimate({}).memory_bytes == 0
