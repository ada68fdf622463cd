"""What is a fault, and in which words."""

from typing import Any

import pytest

from autoprec.graph.census import Observation
from autoprec.tuning.lint.judged import CODES, assess
from autoprec.tuning.lint.rules import RULES, Finding

LOST = {"unchanged": 0.96, "at_peak": 0.96, "arrives": 0.05, "half_ulp": 1e-4, "update": 1e-5, "rate": 1e-5}
LOST |= {"elements": 19210, "tensors": 4, "optimizer": "AdamW", "to": "bf16", "compensated": "", "rising": False}
LOSS = {"error": 0.01, "gradient": 0.001, "classes": 50257, "to": "bf16", "autocast": False}
DECAY = LOST | {"unchanged": 0.0, "arrives": 1.0, "factor": 0.9999, "kept": 1.0}
ROUTER = {"changed": 0.2, "ties": 0.1, "tokens": 512, "experts": 8, "chosen": 2, "to": "bf16", "autocast": False}


@pytest.mark.parametrize(
    ("code", "figures", "severity"),
    [
        ("updates-lost", LOST, "error"),
        ("updates-lost", LOST | {"arrives": 0.98}, "warning"),  # rounded at random: the update arrives on average
        ("updates-lost", LOST | {"unchanged": 0.3, "arrives": 0.9}, "warning"),
        ("updates-lost", LOST | {"unchanged": 0.1, "arrives": 0.9}, ""),
        ("updates-lost", LOST | {"compensated": "kahan"}, ""),
        ("updates-lost", LOST | {"arrives": None}, ""),
        ("updates-lost", LOST | {"rising": True, "at_peak": 0.1}, ""),
        ("updates-lost", LOST | {"rising": True, "at_peak": 0.9}, "error"),
        ("decay-lost", DECAY, "error"),
        ("decay-lost", DECAY | {"kept": 0.6}, ""),
        ("decay-lost", DECAY | {"unchanged": 0.9, "arrives": 0.1}, ""),  # the whole update is lost, and said to be
        ("decay-lost", DECAY | {"compensated": "kahan"}, ""),
        ("decay-lost", DECAY | {"arrives": None}, ""),
        ("rate-below-half-ulp", LOST | {"to": "fp32", "unchanged": 0.99}, "error"),
        ("rate-below-half-ulp", LOST | {"to": "fp32", "unchanged": 0.01}, ""),
        ("rate-below-half-ulp", LOST | {"to": "fp32", "rising": True}, ""),
        ("noise-16bit", {"infinite": 1e-3, "tail": 0.0, "to": "bf16"}, "error"),
        ("noise-16bit", {"infinite": 0.0, "tail": 0.9, "to": "bf16"}, "warning"),
        ("noise-16bit", {"infinite": 0.0, "tail": 0.0, "moved": 0.4, "to": "bf16"}, "error"),
        ("noise-16bit", {"infinite": 0.0, "tail": 0.0, "moved": 0.02, "to": "bf16"}, "warning"),
        ("scaler-fixed", {"scale": 2.0**24, "skipped": 4}, "error"),
        ("scaler-fixed", {"scale": 2.0**24, "skipped": 0}, "warning"),
        ("accumulator-16bit", {"error": 0.03, "adds": 64, "to": "bf16"}, "error"),
        ("accumulator-16bit", {"error": 0.005, "adds": 8, "to": "bf16"}, "warning"),
        ("accumulator-16bit", {"error": 0.002, "adds": 3, "to": "bf16"}, ""),
        ("loss-16bit", LOSS, "error"),
        ("loss-16bit", LOSS | {"autocast": True}, "warning"),
        ("loss-16bit", LOSS | {"error": 0.002}, "warning"),
        ("loss-16bit", LOSS | {"error": 1e-5, "gradient": 1e-5}, ""),
        ("loss-16bit", LOSS | {"error": 1e-5, "gradient": 0.003, "autocast": True}, "warning"),
        ("loss-16bit", LOSS | {"error": 1e-5, "gradient": 0.003, "to": "rounded fp32"}, ""),
        ("loss-16bit", LOSS | {"error": 1e-5, "gradient": 0.03, "to": "rounded fp32"}, "error"),
        ("router-16bit", ROUTER, "error"),
        ("router-16bit", ROUTER | {"changed": 0.001}, "warning"),
        ("router-16bit", ROUTER | {"changed": 0.0}, ""),
        ("kept-module-cast", {"tensors": 2, "to": "bf16", "asked": "_keep_in_fp32_modules", "first": "wo"}, "note"),
        ("kept-module-cast", {"tensors": 2, "to": "fp16", "asked": "_keep_in_fp32_modules", "first": "wo"}, "error"),
        (
            "kept-module-cast",
            {"tensors": 2, "to": "bf16", "asked": "_keep_in_fp32_modules_strict", "first": "wo"},
            "error",
        ),
        ("recurrent-fp32", {"kind": "GRU", "share": 0.5, "to": "bf16", "products": "bf16"}, "note"),
        ("wide-part", {"count": 3, "share": 0.0, "to": "complex64"}, "note"),
        ("wide-part", {"count": 3, "share": 0.4, "to": "fp64"}, "note"),
        ("nothing-known", {}, ""),
    ],
)
def test_the_effect_decides_how_bad_it_is(code: str, figures: dict[str, Any], severity: str) -> None:
    seen = Observation(code, "train.py:3", "aten::_log_softmax", "head", ("bf16",), figures)
    found, words = assess(seen)
    assert found == severity
    if severity:
        finding = Finding(code, seen.where, (), {"what": "x"} | words, found, seen)
        assert "{" not in finding.message.replace("{weights", "").replace("{exp_avg", "")
        row = finding.to_json()
        assert (row["line"], row["operator"], row["figures"]) == (3, "aten::_log_softmax", figures)


def test_every_code_is_a_rule() -> None:
    assert set(CODES) <= RULES.keys()


def test_figures_are_told_as_people_read_them() -> None:
    seen = Observation("updates-lost", figures=LOST)
    message = Finding("updates-lost", data=assess(seen)[1], seen=seen).message
    assert message.startswith(
        "96 % of the 19,210 bf16 weights that AdamW updates stay as they are: at a learning rate of 1e-05"
    )
    assert message.endswith("5 % of the update arrives")
    words = assess(Observation("updates-lost", figures=LOST | {"rate": 0.0, "optimizer": "the script"}))[1]
    finding = Finding("updates-lost", data=words)
    assert "that the script updates stay as they are: an update is about " in finding.message
    assert "policy" not in finding.fix  # which changes optimizers alone
    decay = Finding("decay-lost", data=assess(Observation("decay-lost", figures=DECAY))[1]).message
    assert decay.endswith("19,210 bf16 weights: a product with 0.9999 leaves 100% of them as they are")


@pytest.mark.parametrize(
    ("unchanged", "to", "said"),
    [
        (0.4, "bf16", "are kept in bf16; 40 % of them stay as they are where they should have moved"),
        (1.0, "fp16", "are kept in fp16; 100% of them stay as they are where they should have moved"),
        (0.0, "bf16", "are kept in bf16, which rounds each of their moves; a count stands still at 256"),
        (0.0, "fp16", "are kept in fp16, which rounds each of their moves; a count stands still at 2,048"),
        (0.001, "bf16", "are kept in bf16, which rounds each of their moves; a count stands still at 256"),
    ],
)
def test_running_statistics_that_still_move_are_not_said_to_stay(unchanged: float, to: str, said: str) -> None:
    seen = Observation("statistics-16bit", figures={"unchanged": unchanged, "to": to, "table": "bn.running_mean"})
    message = Finding(seen.code, data=assess(seen)[1], seen=seen).message
    assert message == f"running statistics (bn.running_mean) {said}"


@pytest.mark.parametrize(
    ("code", "what", "begins"),
    [
        ("norm-16bit", "rms norm", "an RMSNorm written out by hand runs in bf16"),
        ("norm-16bit", "layer norm", "a LayerNorm written out by hand runs in bf16"),
        ("norm-16bit", "l2 norm", "an L2 norm written out by hand runs in bf16"),
        ("softmax-16bit", "softmax", "a softmax written out by hand runs in bf16"),
        ("softmax-16bit", "logsumexp", "a logsumexp written out by hand runs in bf16"),
    ],
)
def test_what_is_written_by_hand_has_its_article(code: str, what: str, begins: str) -> None:
    seen = Observation(code, figures={"what": what, "to": "bf16", "error": 0.1})
    assert Finding(code, data=assess(seen)[1], seen=seen).message.startswith(begins)


@pytest.mark.parametrize(
    ("error", "text"),
    [(0.0399, "3.99 %"), (1.26, "126%"), (9.99, "999%"), (10.0, "more than 1,000 %"), (606.87, "more than 1,000 %")],
)
def test_an_error_of_many_times_the_value_is_said_as_such(error: float, text: str) -> None:
    seen = Observation(
        "reduction-16bit", "t.py:3", "aten::sub", "", ("bf16",), {"error": error, "to": "bf16", "trained": True}
    )
    assert f"its result is {text} off" in Finding(seen.code, data=assess(seen)[1], seen=seen).message
