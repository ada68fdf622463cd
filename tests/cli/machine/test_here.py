"""What this machine gains, and the sentence about it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autoprec.cli.machine import here as module
from autoprec.cli.machine.here import Here, cores, look_here


@pytest.mark.parametrize(
    ("here", "gains", "says"),
    [
        (Here(0, (), 12.3), False, "bf16 linear layers take 12.3 times as long as fp32 (no bf16 instructions)"),
        (Here(0, ("AVX512_BF16",), 0.5), True, "bf16 linear layers are 2.0 times as fast as fp32 (AVX512_BF16)"),
        (Here(0, ("AVX512_BF16",), 0.95), False, "gains nothing"),
        (Here(0, (), 70.0, (), 0.5), True, "int8 linear layers are 2.0 times as fast as fp32 (no int8 instructions)"),
        (Here(0, (), 70.0, ("AVX512_VNNI",), 0.2), True, "5.0 times as fast as fp32 (AVX512_VNNI)"),
        (Here(2, (), 0.0), True, "2 usable GPUs"),
    ],
)
def test_the_sentence_is_about_the_time_not_about_the_name_of_a_unit(here: Here, gains: bool, says: str) -> None:
    assert here.gains is gains
    assert says in here.sentence


def test_this_machine_is_timed_and_left_as_it_was() -> None:
    threads = torch.get_num_threads()
    here = look_here()
    assert torch.get_num_threads() == threads
    assert here.gpus == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert here.gpus or min(here.bf16_ratio, here.int8_ratio) > 0
    assert cores() >= 1


def test_recipes_are_timed_in_turn_and_a_hopeless_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], []

    def run(name: str, seconds: float) -> Callable[[], None]:
        def step() -> None:
            calls.append(name)
            clock[0] += seconds * (2.0 if len(calls) <= 3 else 1.0)  # the warm-up is slower

        return step

    monkeypatch.setattr(module.time, "process_time", lambda: clock[0])
    found = module._seconds([run("fp32", 1.0), run("bf16", 30.0), run("int8", 0.5)])
    assert found == [1.0, 60.0, 0.5]
    assert calls.count("bf16") == 1
    assert calls[:5] == ["fp32", "bf16", "int8", "fp32", "int8"]
