"""The charts show what the summary holds, on axes that leave its points apart."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from autoprec.reports.charts import gap_chart, loss_chart, pareto_chart
from autoprec.reports.summary import summarise
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run, metrics_of
from tests.reports.conftest import rehearsal


def test_the_pareto_axis_is_that_of_the_policies_with_the_16bit_run_as_a_line() -> None:
    result, records = rehearsal()
    chart = pareto_chart(summarise(result, records))
    assert chart is not None
    assert chart.x.high < 1000, "the script's 9544 ms would press every dot into a corner"
    svg = chart.text()
    places = [float(x) for x in re.findall(r'<circle class="dot[^"]*" cx="([\d.]+)"', svg)]
    assert max(places) - min(places) > 0.6 * chart.width
    line = re.search(r'<line class="base" x1="([\d.]+)" y1="[\d.]+" x2="([\d.]+)"', svg)
    assert line is not None
    assert float(line[1]) == float(line[2]) == chart.at(874.0, 0)[0]
    assert "16-bit: all bf16" in svg
    assert "the script as written takes 9544.0 ms, beyond the axis" in svg


def test_presets_are_told_apart_by_colour_and_name() -> None:
    result, records = rehearsal()
    chart = gap_chart(summarise(result, records))
    assert chart is not None
    legend = chart.text().partition("<figcaption>")[2]
    names = re.findall(r'<i class="curve preset (p\d)"></i>([^<]+)<', legend)
    assert len({colour for colour, _ in names}) == len(names) >= 2
    assert {"all bf16", "all fp8_delayed"} <= {name for _, name in names}


def test_a_script_that_was_run_alone_is_not_plotted_against_itself(result: SearchResult) -> None:
    alone = summarise(replace(result, best=dict(result.reference), presets=(), front=()), [])
    assert pareto_chart(alone) is None
    assert loss_chart(alone) is None
    assert gap_chart(alone) is None


def test_the_gap_is_relative_to_the_reference_with_what_noise_does_as_a_band(
    result: SearchResult, records: list[Run]
) -> None:
    summary = summarise(result, records)
    chart = gap_chart(summary)
    assert chart is not None
    assert chart.y.low <= 0 <= chart.y.high
    assert chart.text().count('<polygon class="band"') == 1
    # preset 3's losses are those of the reference times 1.003
    edge = chart.at(0, 0.3)[1]
    drawn = re.search(r'<polyline class="curve preset p1" points="([^"]+)"', chart.text())
    assert drawn is not None
    assert {float(point.split(",")[1]) for point in drawn[1].split()} == {edge}


def test_a_loss_that_is_not_finite_leaves_a_gap_and_the_axis_alone(result: SearchResult, records: list[Run]) -> None:
    summary = summarise(result, records)
    broken = [replace(c, losses=(*c.losses[:4], math.inf, *c.losses[5:])) for c in summary.curves]
    chart = loss_chart(replace(summary, curves=tuple(broken)))
    assert chart is not None
    assert chart.y.high < 10
    assert chart.text().count('class="curve best"') == 2 + 1, "two pieces and the legend"


def test_divergences_of_different_magnitude_get_a_logarithmic_axis() -> None:
    result, records = rehearsal()
    summary = summarise(result, records)
    wide = tuple(
        p.with_metrics(metrics_of({"divergence": p["divergence"] * (1000 if p.name == summary.best else 1)}))
        for p in summary.points
    )
    assert (chart := pareto_chart(replace(summary, points=wide))) is not None
    assert chart.y.log
    equal = tuple(p.with_metrics(metrics_of({"divergence": 1e-4})) for p in summary.points)
    assert (chart := pareto_chart(replace(summary, points=equal))) is not None
    assert not chart.y.log
