"""Parallel coordinates: a line a policy across the decisions that mattered and what came of them."""

from __future__ import annotations

import re
from dataclasses import replace

from autoprec.report.parallel import parallel_chart
from autoprec.report.summary import Summary, summarise
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from tests.report.conftest import rehearsal

GROUPS = ("h.*.mlp", "h.*.attn", "embedding_of_a_very_long_name", "head", "first")


def study(shares: dict[str, float]) -> Summary:
    """A rehearsal whose runs differ in five groups; ``shares`` are what each moved."""
    result, records = rehearsal()
    runs: list[Run] = []
    for number, run in enumerate(records):
        params = {f"layer:{group}": ("bf16", "<fp8>")[(number + at) % 2] for at, group in enumerate(GROUPS)}
        runs.append(replace(run, params=params if run.policy else {}))
    rows = [{"name": f"layer:{name}", "time_share": share, "error_share": 0.0} for name, share in shares.items()]
    explanation = {**result.explanation, "importance": rows}
    return summarise(replace(result, explanation=explanation), runs)


def test_a_line_a_policy_over_the_decisions_that_moved_most() -> None:
    summary = study({"head": 0.6, "h.*.attn": 0.3})
    svg = parallel_chart(summary)
    assert len(re.findall("<polyline", svg)) == len([run for run in summary.points if run.params]) >= 3
    titles = re.findall(r'class="axis"[^>]*>([^<]+)<', svg)
    assert titles[:2] == ["head", "h.*.attn"]
    assert titles[-2:] == ["step, ms", "divergence, %"]
    assert len(titles) == 6
    assert "&lt;fp8&gt;" in svg
    assert "<fp8>" not in svg
    assert all(len(text) <= 17 for text in titles)


def test_nothing_to_compare_is_no_chart(result: SearchResult, records: list[Run]) -> None:
    assert parallel_chart(study({})) == ""
    assert parallel_chart(summarise(result, records[:1])) == ""
