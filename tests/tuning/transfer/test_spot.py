"""A few passes on the big model: what is asked, what they say, and what a correction takes back."""

import math

import pytest

from autoprec.policy import Policy, resolve
from autoprec.trial.protocol import GradientErrors, ProbeResult
from autoprec.tuning.transfer.spot import WHOLE, SpotCheck, corrected, judged, segments, spot_probes
from tests.tuning.models import gpt
from tests.tuning.transfer.test_proxy import policy

DOWN, UP = "h.*.mlp.c_proj|fp8_rowwise", "h.*.mlp.c_fc|fp8_rowwise"


def asked() -> Policy:
    return policy(("*.mlp.*", "fp8_rowwise"), ("lm_head", "keep"))


def answer(whole: float, noise: float | None = 0.5, **errors: float) -> GradientErrors:
    first = ProbeResult(WHOLE, whole if math.isfinite(whole) else None, nonfinite=whole == math.inf)
    return GradientErrors((first, *(ProbeResult(name, error) for name, error in errors.items())), noise)


def scaled(found: Policy) -> set[str]:
    return {name for name, plan in resolve(found, [x.name for x in gpt().layers]).items() if plan.scaled}


def test_segments_are_the_same_layers_of_every_block_the_largest_first() -> None:
    found = segments(asked(), gpt())
    assert {s.name for s in found[:2]} == {DOWN, UP}
    assert [s.flops for s in found] == sorted((s.flops for s in found), reverse=True)
    assert len(found[0].layers) == 4
    assert not any("lm_head" in layer for s in found for layer in s.layers)  # kept as written


def test_the_whole_policy_is_asked_first_and_each_segment_alone() -> None:
    probes = spot_probes(asked(), gpt(), 3)
    assert [probe.id for probe in probes] == [WHOLE, UP, DOWN]
    alone = Policy.model_validate(probes[2].policy)
    plans = resolve(alone, [layer.name for layer in gpt().layers])
    assert {name for name, plan in plans.items() if not plan.keeps} == {f"h.{i}.mlp.c_proj" for i in range(4)}
    assert alone.activations == "keep"


def test_a_gradient_that_is_meant_to_be_smaller_is_not_taken_for_an_error() -> None:
    found = asked().model_copy(update={"embedding_gradient": 0.1})
    assert spot_probes(found, gpt(), 3) == spot_probes(asked(), gpt(), 3)


def test_what_runs_in_8_bits_is_asked_before_what_runs_in_16() -> None:
    found = policy(("*.attn.c_proj", "fp8_rowwise"), ("*", "bf16"))  # the smallest layers
    assert [probe.id for probe in spot_probes(found, gpt(), 2)] == [WHOLE, "h.*.attn.c_proj|fp8_rowwise"]


@pytest.mark.parametrize(
    ("whole", "within"), [(0.05, True), (0.0599, True), (0.0601, False), (0.2, False), (math.inf, False)]
)
def test_what_the_passes_say(whole: float, within: bool) -> None:
    check = judged([answer(whole, **{DOWN: 0.03})], 0.12)
    assert check.within is within
    assert check.limit == pytest.approx(0.06)
    assert check.to_json()["rows"][1] == {"name": DOWN, "error": pytest.approx(0.03)}


@pytest.mark.parametrize("noise", [None, 0.0, math.nan])
def test_without_a_noise_there_is_no_limit_and_a_gradient_must_still_be_finite(noise: float | None) -> None:
    assert judged([answer(0.1, noise)], 0.12).within
    assert not judged([answer(math.inf, noise)], 0.12).within
    assert judged([answer(0.1, noise)], 0.12).evidence() == {"gradient_error": 0.1}


@pytest.mark.parametrize(
    ("whole", "errors", "removed"),
    [
        (0.1, {DOWN: 0.095, UP: 0.03}, (DOWN,)),
        (math.inf, {DOWN: 0.095, UP: 0.03}, (DOWN,)),
        (0.1, {DOWN: 0.03, UP: 0.095}, (UP,)),
        (0.2, {DOWN: 0.15, UP: 0.13}, (DOWN, UP)),
        (math.inf, {DOWN: math.inf, UP: 0.03}, (DOWN,)),
        (0.1, {UP: 0.03}, (DOWN,)),  # what was not run has the rest of the whole
        (math.inf, {UP: 0.03}, (DOWN,)),
        (0.05, {DOWN: 0.04, UP: 0.03}, ()),
    ],
)
def test_a_correction_takes_back_the_worst_segment_and_no_more(
    whole: float, errors: dict[str, float], removed: tuple[str, ...]
) -> None:
    found = asked()
    mended, gone = corrected(found, gpt(), judged([answer(whole, **errors)], 0.12))
    assert gone == removed
    kept = {name for name in scaled(found) if not any(name.endswith(one.split("|")[0][4:]) for one in gone)}
    assert scaled(mended) == kept
    assert mended.evidence["spot_check"]["back_to_16_bit"] == list(removed)


def test_the_phases_of_a_corrected_policy_stay() -> None:
    phases = [{"from": 0.5, "layers": [{"match": "h.1.mlp.*", "recipe": "fp8_rowwise"}]}]
    found = Policy.model_validate({**asked().model_dump(by_alias=True), "phases": phases})
    check = judged([answer(0.1, **{DOWN: 0.095, UP: 0.03})], 0.12)
    mended, _ = corrected(found, gpt(), check)
    assert [phase.start for phase in mended.phases] == [0.5]
    assert scaled(mended.stages[1]) == scaled(found.stages[1])
    assert scaled(mended.stages[0]) < scaled(found.stages[0])


def test_moments_count_by_their_root_mean_square_and_one_that_overflows_is_beyond() -> None:
    both: SpotCheck = judged([answer(0.03), answer(0.05)], 0.12)
    assert both.error == pytest.approx(math.sqrt((0.03**2 + 0.05**2) / 2))
    assert both.noise == pytest.approx(0.5)
    assert not judged([answer(0.03), answer(math.inf)], 0.12).within
