"""A few passes on the big model: what is asked, what they say, and what a correction takes back."""

import math
from typing import Any

import pytest

from autoprec.graph.report import GraphReport
from autoprec.policy import Policy, resolve
from autoprec.tuning.transfer.spot import WHOLE, corrected, judged, segments, spot_probes
from tests.tuning.models import gpt
from tests.tuning.transfer.test_proxy import policy

DOWN, UP = "h.*.mlp.c_proj|fp8_rowwise", "h.*.mlp.c_fc|fp8_rowwise"


def transferred(**predicted: float) -> Policy:
    found = policy(("*.mlp.*", "fp8_rowwise"), ("lm_head", "keep"))
    origin = {"predicted": {"gradient_error": 0.05}, "segments": {UP: 0.03, DOWN: 0.04} | predicted}
    return found.model_copy(update={"evidence": {"transferred_from": origin}})


def payload(whole: float, **errors: float) -> dict[str, Any]:
    rows = [{"id": WHOLE, "gradient_error": whole if math.isfinite(whole) else None, "nonfinite": whole == math.inf}]
    rows += [{"id": name, "gradient_error": errors.get(name, 0.03)} for name in (DOWN, UP)]
    return {"probes": rows, "gradient_noise": 0.5}


def asked(passes: int = 3) -> tuple[Policy, GraphReport, Any]:
    found, report = transferred(), gpt()
    return found, report, spot_probes(found, report, passes)[1]


def test_segments_are_the_same_layers_of_every_block_the_most_telling_first() -> None:
    found = segments(transferred(), gpt())
    assert [s.name for s in found][:2] == [DOWN, UP]
    assert len(found[0].layers) == 4
    assert not any("lm_head" in layer for s in found for layer in s.layers)  # kept as written


def test_the_whole_policy_is_asked_first_and_each_segment_alone() -> None:
    probes, kept = spot_probes(transferred(), gpt(), 3)
    assert [probe.id for probe in probes] == [WHOLE, DOWN, UP]
    assert len(kept) == 2
    alone = Policy.model_validate(probes[1].policy)
    plans = resolve(alone, [layer.name for layer in gpt().layers])
    assert {name for name, plan in plans.items() if not plan.keeps} == {f"h.{i}.mlp.c_proj" for i in range(4)}
    assert alone.activations == "keep"


@pytest.mark.parametrize(
    ("whole", "within", "as_predicted"),
    [(0.05, True, True), (0.02, True, False), (0.2, False, False), (math.inf, False, False)],
)
def test_what_the_passes_say(whole: float, within: bool, as_predicted: bool) -> None:
    found, _, kept = asked()
    check = judged([payload(whole)], found, kept, 0.12)
    assert (check.within, check.as_predicted) == (within, as_predicted)
    assert check.limit == pytest.approx(0.06)
    assert check.to_json()["rows"][0]["name"] == WHOLE


@pytest.mark.parametrize("whole", [0.1, math.inf])
def test_a_correction_takes_back_the_worst_segment_and_no_more(whole: float) -> None:
    found, report, kept = asked()
    check = judged([payload(whole, **{DOWN: 0.095, UP: 0.03})], found, kept, 0.12)
    mended, removed = corrected(found, report, check)
    plans = resolve(mended, [layer.name for layer in report.layers])
    assert removed == (DOWN,)
    assert {name for name, plan in plans.items() if plan.scaled} == {f"h.{i}.mlp.c_fc" for i in range(4)}
    assert mended.evidence["spot_check"]["back_to_16_bit"] == [DOWN]


def test_a_policy_that_nobody_predicted_is_still_held_to_the_limit() -> None:
    found, report = policy(("*.mlp.*", "fp8_rowwise"), ("lm_head", "keep")), gpt()
    kept = spot_probes(found, report, 3)[1]
    check = judged(
        [{"probes": payload(0.1)["probes"], "gradient_noise": None}],
        found,
        [s for s in kept if s.name in (UP, DOWN)],
        0.12,
    )
    assert check.as_predicted
    assert check.within
    assert check.limit == math.inf


def test_a_second_check_corrects_the_law_and_not_the_first_correction() -> None:
    found, _, kept = asked()
    origin = found.evidence["transferred_from"] | {"corrected_by": {UP: 2.0}}
    again = judged([payload(0.05)], found.model_copy(update={"evidence": {"transferred_from": origin}}), kept, 0.12)
    ratios = {row.name: row.ratio for row in again.rows}
    assert again.correction.ratios == {UP: pytest.approx(2.0 * ratios[UP]), DOWN: pytest.approx(ratios[DOWN])}
    assert again.correction.noise == 0.5


def test_moments_count_by_their_root_mean_square_and_one_that_overflows_is_beyond() -> None:
    found, _, kept = asked()
    both = judged([payload(0.03), payload(0.05)], found, kept, 0.12)
    assert both.whole.measured == pytest.approx(math.sqrt((0.03**2 + 0.05**2) / 2))
    assert both.noise == pytest.approx(0.5)
    assert not judged([payload(0.03), payload(math.inf)], found, kept, 0.12).within
