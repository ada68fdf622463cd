from __future__ import annotations

import pytest

from autoprec.errors import UnknownNameError, UsageError
from autoprec.tuning.target import resolve_target


def test_auto_is_the_device_the_script_trains_on_and_is_timed() -> None:
    target, here = resolve_target("auto", "cpu")
    assert (target.name, here) == ("cpu", True)
    target, here = resolve_target("auto", "NVIDIA H200")
    assert (target.name, here) == ("h200", True)


def test_a_gpu_named_on_a_laptop_is_a_rehearsal() -> None:
    target, here = resolve_target("h100", "cpu")
    assert (target.name, here) == ("h100", False)


def test_naming_the_gpu_at_hand_times_it() -> None:
    assert resolve_target("h100", "NVIDIA H100 80GB HBM3")[1] is True
    assert resolve_target("b200", "NVIDIA H100 80GB HBM3")[1] is False


def test_what_cannot_be_resolved_says_what_to_do() -> None:
    with pytest.raises(UnknownNameError, match="h10") as unknown:
        resolve_target("h10", "cpu")
    assert "h100" in unknown.value.fix
    with pytest.raises(UsageError, match="not in the hardware table"):
        resolve_target("auto", "Some Future Device")
    with pytest.raises(UsageError, match="trains on"):
        resolve_target("cpu", "NVIDIA H200")
