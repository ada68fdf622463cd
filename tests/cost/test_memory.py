from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.cost import CostModel, CostScale
from autoprec.cost.memory import activation_growth, memory_estimate
from autoprec.cost.transformer import DecoderConfig, decoder_report
from autoprec.graph.report import GraphReport
from autoprec.hardware import TARGETS
from autoprec.policy.schema import OptimizerPolicy

PLAIN = OptimizerPolicy()
ONE = CostScale()


def test_parts_add_up_to_the_counts(tiny: GraphReport) -> None:
    found = memory_estimate(tiny, ONE, float(tiny.model["parameters"]), {}, "keep", PLAIN)
    assert found is not None
    assert found.parameters == tiny.memory["parameters"]
    assert found.optimizer == tiny.memory["optimizer"]
    assert found.total == pytest.approx(sum(tiny.memory.values()))
    plain = found.to_json()
    assert plain.pop("total") == pytest.approx(sum(plain.values()))


def test_cheaper_states_shrink_what_they_store(tiny: GraphReport) -> None:
    size = float(tiny.model["parameters"])
    lean = OptimizerPolicy(exp_avg="e4m3", exp_avg_sq="fp16_scaled", gradients="bf16")
    found = memory_estimate(tiny, ONE, size, {}, "keep", lean)
    assert found is not None
    assert found.optimizer == pytest.approx(size * 3, rel=0.01)  # 1 + 2 bytes in place of 8
    assert found.gradients == pytest.approx(size * 2)


def test_a_scaled_model_needs_what_the_real_one_needs() -> None:
    small = decoder_report(DecoderConfig(128, 2, 4, 512, 1024, gated=False), batch=2, seq=64)
    big = decoder_report(DecoderConfig(512, 8, 16, 2048, 1024, gated=False), batch=8, seq=64)
    scale = CostScale(width=4, depth=4, tokens=4)
    found = CostModel(small, TARGETS["h100"], scale=scale).estimate({}).memory_bytes
    assert found == pytest.approx(CostModel(big, TARGETS["h100"]).estimate({}).memory_bytes, rel=0.25)
    assert activation_growth(small, ONE) == pytest.approx(1.0)


def test_shards_divide_the_state(tiny: GraphReport) -> None:
    one, eight = (
        memory_estimate(tiny, ONE, float(tiny.model["parameters"]), {}, "keep", PLAIN, shards) for shards in (1, 8)
    )
    assert one is not None
    assert eight is not None
    assert eight.optimizer == pytest.approx(one.optimizer / 8)
    assert eight.saved == one.saved


def test_a_report_without_counts_has_no_memory(tiny: GraphReport) -> None:
    bare = replace(tiny, memory={})
    assert CostModel(bare, TARGETS["h100"]).memory({}) is None
    assert CostModel(bare, TARGETS["h100"]).estimate({}).memory_bytes == 0
