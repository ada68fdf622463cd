"""What a spot check says of every other prediction."""

import math

import pytest

from autoprec.errors import FileError
from autoprec.tuning.transfer.correction import Correction, segment_name, split_segment

UP, DOWN = "h.*.mlp.up", "h.*.mlp.down"


def printed(*rows: tuple[str, float | None], noise: float | None = 0.5) -> dict[str, object]:
    return {"ok": True, "sensitivity": {"rows": [{"name": n, "of_law": r} for n, r in rows], "noise": noise}}


def test_own_ratio_then_that_of_the_same_layers_then_the_mean_of_all() -> None:
    found = Correction({f"{UP}|fp8_rowwise": 2.0, f"{UP}|nvfp4_plain": 0.5, f"{DOWN}|mxfp8": 8.0})
    assert found.factor(UP, "nvfp4_plain") == pytest.approx(math.sqrt(0.5))
    assert found.factor(DOWN, "nvfp4_plain") == pytest.approx(math.sqrt(8.0))
    assert found.factor(UP, "bf16") == pytest.approx(1.0)
    assert found.factor("h.*.attn.qkv", "bf16") == pytest.approx(math.sqrt(2.0))
    assert Correction().factor(UP, "bf16") == 1.0


def test_it_is_read_from_what_the_check_prints() -> None:
    rows = (("whole policy", 1.1), (f"{UP}|fp8_rowwise", 1.5), (f"{DOWN}|fp8_rowwise", None))
    found = Correction.from_json(printed(*rows), where="spot.json")
    assert (found.ratios, found.noise) == ({f"{UP}|fp8_rowwise": 1.5}, 0.5)
    assert math.isnan(Correction.from_json(printed(*rows, noise=None), where="spot.json").noise)


@pytest.mark.parametrize(
    ("document", "says"),
    [({"ok": True}, "has no spot check"), (printed(("whole policy", None)), "carries no predictions")],
)
def test_what_cannot_correct_is_refused(document: dict[str, object], says: str) -> None:
    with pytest.raises(FileError, match=says):
        Correction.from_json(document, where="spot.json")


def test_names_of_segments_come_apart_again() -> None:
    assert split_segment(segment_name(UP, "fp8_rowwise/wgrad=bf16")) == (UP, "fp8_rowwise/wgrad=bf16")
