"""What is a fault, and in which words."""

from typing import Any

import pytest

from autoprec.graph.census import Observation
from autoprec.tuning.lint.judged import CODES, assess
from autoprec.tuning.lint.rules import RULES, Finding

LOST = {"unchanged": 0.96, "at_peak": 0.96, "arrives": 0.05, "half_ulp": 1e-4, "update": 1e-5, "rate": 1e-5}
LOST |= {"elements": 19210, "tensors": 4, "optimizer": "AdamW", "to": "bf16", "compensated": "", "rising": False}
LOSS = {"error": 0.01, "gradient": 0.001, "classes": 50257, "to": "bf16", "autocast": False}
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
        ("rate-below-half-ulp", LOST | {"to": "fp32", "unchanged": 0.99}, "error"),
        ("rate-below-half-ulp", LOST | {"to": "fp32", "unchanged": 0.01}, ""),
        ("rate-below-half-ulp", LOST | {"to": "fp32", "rising": True}, ""),
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
        ("recurrent-fp32", {"kind": "GRU", "share": 0.5, "to": "bf16"}, "note"),
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
