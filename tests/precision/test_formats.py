"""Number formats agree with PyTorch's own, and with what their bits can hold."""

import pytest
import torch

from autoprec.precision.formats import FORMATS, NumberFormat

FLOATS = [f for f in FORMATS.values() if f.torch_name and f.torch_name != "int8"]


@pytest.mark.parametrize("found", FLOATS, ids=lambda f: f.name)
def test_limits_are_those_of_the_torch_type(found: NumberFormat) -> None:
    info = torch.finfo(getattr(torch, found.torch_name))
    assert info.bits == found.bits
    assert info.max == found.max
    assert info.eps == 2.0**-found.mantissa
    assert info.smallest_normal == 2.0**found.min_exponent


@pytest.mark.parametrize("found", FLOATS, ids=lambda f: f.name)
def test_the_smallest_value_is_the_last_that_does_not_vanish(found: NumberFormat) -> None:
    kind, tiny = getattr(torch, found.torch_name), 2.0 ** (found.min_exponent - found.mantissa)
    if found.name == "fp32":
        assert tiny == 2.0**-149
        return
    values = torch.tensor([tiny, tiny / 2.5], dtype=torch.float64).float()
    assert values.to(kind).float().tolist() == [tiny, 0.0]


def test_e2m1_holds_the_eight_magnitudes_of_the_specification() -> None:
    e2m1 = FORMATS["e2m1"]
    magnitudes = {0.0, 2.0 ** (e2m1.min_exponent - e2m1.mantissa), 1.0, 1.5, 2.0, 3.0, 4.0, e2m1.max}
    assert magnitudes == {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}


def test_names() -> None:
    assert all(name == found.name for name, found in FORMATS.items())
