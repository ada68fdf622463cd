from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest

from autoprec.graph.report import GraphReport
from autoprec.policy.schema import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES
from benchmarks.cost.decoder import PRESETS, DecoderConfig, decoder_report

FP8 = ("bf16", "fp8_tensorwise", "fp8_delayed", "fp8_rowwise")


Uniform = Callable[..., Mapping[str, Mapping[str, LayerPlan]]]


def _uniform(report: GraphReport, names: Iterable[str] = FP8) -> Mapping[str, Mapping[str, LayerPlan]]:
    return {name: {layer.name: LayerPlan.uniform(BUILTIN_RECIPES[name]) for layer in report.tunable} for name in names}


@pytest.fixture(scope="session")
def uniform() -> Uniform:
    """A function: report, recipe names -> choice -> layer -> plan."""
    return _uniform


@pytest.fixture(scope="session")
def tiny() -> GraphReport:
    """A GPT as small as the examples: width 256, 4 blocks, 2048 tokens."""
    return decoder_report(DecoderConfig(256, 4, 4, 1024, 256, gated=False), batch=16, seq=128)


@pytest.fixture(scope="session")
def large() -> GraphReport:
    """Llama3-8B, one sequence of 8192 tokens."""
    return decoder_report(PRESETS["llama3-8b"], batch=1, seq=8192)


@pytest.fixture
def cpu_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with AMX: bf16 multiplies four times faster than fp32, and nothing is measured."""
    from autoprec.cost import model

    rates = {"fp32": 100e9, "bf16": 400e9, "int8": 600e9}
    monkeypatch.setattr("autoprec.precision.hardware.cpu_bf16_units", lambda: ("AMX_BF16",))
    monkeypatch.setattr(model, "cpu_rates", lambda: (rates, "modelled, test rates"))
