"""A small study on this machine, and one for a GPU as it really goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoprec.graph.report import GemmCall, GraphReport, Layer
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run, metrics_of
from tests.tracking.conftest import make_records, make_result


@pytest.fixture
def records() -> list[Run]:
    return make_records()


@pytest.fixture
def result(records: list[Run]) -> SearchResult:
    rows = ({"group": "h.*.attn", "choice": "bf16", "gradient_error": 0.01, "measured": True},)
    rows += ({"group": "h.*.mlp", "choice": "bf16", "gradient_error": 0.2, "measured": False},)
    return replace(make_result(records), sensitivity=rows, notes=("a <b>note</b>",))


@pytest.fixture
def graph() -> GraphReport:
    gemms = tuple(GemmCall(role, 8, 16, 32) for role in ("fprop", "dgrad", "wgrad"))
    flops = {gemm.role: gemm.flops for gemm in gemms}
    layers = tuple(
        Layer(name, "Linear", "linear", f"{name}.weight", "g", gemms, 512, True, "", (), flops)
        for name in ("h.0.attn", "h.0.mlp")
    )
    return GraphReport({"class": "GPT"}, layers, (), {}, 1, 1.0)


def rehearsal() -> tuple[SearchResult, list[Run]]:
    """A search for a GPU as it really goes: a slow script in FP32, the 16-bit run ten times as fast, and finalists."""
    bf16 = {"recipes": {"bf16": {"format": "bf16"}}, "default": "bf16", "activations": "bf16"}
    fp8 = {"recipes": {"fp8": {"format": "fp8"}}, "default": "fp8", "activations": "bf16"}
    rows = [
        ("reference", "script as written", {}, 9544.0, 0.0, 0),
        ("preset", "all bf16", bf16, 874.0, 9e-5, 0),
        ("preset", "all fp8_rowwise", fp8, 668.0, 5e-4, 0),
        ("preset", "all fp8_delayed", fp8, 572.0, 7e-4, 0),
        ("finalist", "all fp8_rowwise", fp8, 668.0, 4e-4, 1),
        ("finalist", "all fp8_rowwise", fp8, 668.0, 6e-4, 2),
        ("finalist", "all bf16", bf16, 874.0, 1e-4, 1),
    ]
    records = []
    for number, (kind, name, policy, time, gap, seed) in enumerate(rows):
        metrics = {"step_time_ms": time, "divergence": gap, "speedup": 9544.0 / time, "gradient_error": 0.05}
        document = {"schema": "autoprec.policy/1", **policy} if policy else {}
        losses = tuple(4.0 - 0.1 * step + gap for step in range(10))
        figures = metrics_of(metrics, "modelled")
        records.append(Run(number, kind, name, {}, document, "ok", metrics=figures, losses=losses, seed=seed))

    def row(number: int) -> dict[str, Any]:
        over = {"speedup_over_16bit": 874.0 / records[number]["step_time_ms"]}
        return {
            **records[number].figures,
            **over,
            "name": records[number].name,
            "sources": dict(records[number].sources),
        }

    base = make_result(make_records())
    return replace(
        base,
        target="h100",
        best={**row(2), "divergence": 5e-4, "interval": 1e-4},
        reference=row(0),
        baseline="all bf16",
        presets=(row(1), row(2), row(3)),
        front=(row(3), row(2)),
        trials={"complete": 3, "failed": 0},
        budget={"max_divergence": 0.0025, "max_gradient_error": 0.12, "gradient_noise": 0.5},
    ), records


@pytest.fixture
def stay(result: SearchResult) -> SearchResult:
    """A verdict before any trial, with no metrics of a best policy."""
    return replace(result, verdict="stay", best={}, presets=(), front=(), reason="too small", policy="", sensitivity=())


@pytest.fixture
def modelled_stay(result: SearchResult) -> SearchResult:
    """A verdict before any trial as a search gives it: its best is the reference."""
    return replace(result, verdict="stay", best=dict(result.reference), presets=(), front=(), trials={"complete": 0})


@pytest.fixture
def broken(result: SearchResult, records: list[Run]) -> tuple[SearchResult, list[Run]]:
    """A result and records with figures that are not finite, or missing."""
    nan = float("nan")
    found = replace(result, best={**result.best, "divergence": nan, "memory_bytes": None})
    return found, [replace(r, losses=(nan, *r.losses[1:])) for r in records]
