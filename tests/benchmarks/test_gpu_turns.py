"""Contenders of the GPU commands: timed in turns, one that fails takes no other along, what is measured is kept."""

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import turns
from benchmarks.gpu.bundle import installed
from benchmarks.gpu.turns import Timed, groups, race, table

#: Stands for contender.py: a step takes as many milliseconds as the precision says; "dies" ends, "hangs" never answers.
FAKE = """
import json, sys, time
name = json.loads(sys.argv[1])["precision"]
if name == "dies":
    raise SystemExit("no such kernel")
if name == "hangs":
    time.sleep(60)
print("a library's banner")
print(json.dumps({"ready_s": 0.1, "loss": 2.0, "memory_bytes": 0}), flush=True)
blocks = 0
for line in sys.stdin:
    blocks += 1
    if name == "late" and blocks > 3:
        raise SystemExit("out of memory")
    print(json.dumps({"ms": [float(name) if name[0].isdigit() else 1.0] * int(line)}), flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "benchmarks" / "gpu" / "contender.py"
    script.parent.mkdir(parents=True)
    script.write_text(FAKE)
    monkeypatch.setattr(turns, "ROOT", tmp_path)
    return tmp_path / "out"


def test_ratios_have_an_interval_and_every_block_is_a_line_at_once(fake: Path) -> None:
    now = time.monotonic()
    found = race(["100", "50"], {"model": "x"}, fake, ready_by=now + 20, until=now + 30)
    assert [one.failed for one in found] == ["", ""]
    assert len(found[0].rounds) == turns.MOST_ROUNDS
    lines = [json.loads(line) for line in (fake / "rounds.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * turns.MOST_ROUNDS
    assert {len(line["ms"]) for line in lines if line["name"] == "100"} == {10}, "a block takes about a second"
    text = "\n".join(table(found, items_per_step=1000))
    assert "| 50 | 2.000x [2.000, 2.000] | 50.00 | 20,000 |" in text
    assert "| 100 | 1.000x | 100.00 | 10,000 |" in text


def test_what_dies_hangs_or_ends_late_is_named_and_the_others_go_on(fake: Path) -> None:
    now = time.monotonic()
    found = race(["100", "dies", "hangs", "late", "50"], {}, fake, ready_by=now + 4, until=now + 30)
    said = {one.name: one.failed for one in found}
    assert said == {
        "100": "", "50": "", "dies": "no such kernel", "hangs": "not compiled in time", "late": "out of memory"
    }  # fmt: skip
    rounds = {one.name: len(one.rounds) for one in found}
    assert rounds["100"] == rounds["50"] >= 6
    assert "| dies | failed: no such kernel |" in "\n".join(table(found))


def test_time_that_is_up_ends_the_rounds(fake: Path) -> None:
    now = time.monotonic()
    found = race(["100", "50"], {}, fake, ready_by=now + 20, until=now)
    assert [one.rounds for one in found] == [(), ()]
    assert "no round was done" in "\n".join(table(found))


def test_too_few_rounds_have_no_interval() -> None:
    text = "\n".join(table([Timed("bf16", (2.0, 2.0)), Timed("fp8", (1.0, 1.0))]))
    assert "2.000x (too few rounds for an interval)" in text


def test_contenders_are_split_so_that_a_group_fits_and_each_has_the_first() -> None:
    names = ["bf16", "a", "b", "c"]
    assert groups(names, 20e9, 141e9) == [names]
    assert groups(names, 40e9, 80e9) == [["bf16", "a"], ["bf16", "b"], ["bf16", "c"]]
    assert groups(["bf16"], 40e9, 10e9) == [["bf16"]]


def test_no_bundle_installs_nothing(tmp_path: Path) -> None:
    assert installed(tmp_path) == []
    assert installed(tmp_path / "missing") == []


def test_every_precision_that_the_commands_name_can_be_made() -> None:
    from benchmarks.gpu.contender import policy_of
    from benchmarks.gpu.first import BLOCKS, LLAMA
    from benchmarks.gpu.second import EAGER

    named = [name for part in (BLOCKS, LLAMA, EAGER) for name in part.names]
    ours = {name: policy_of(name) for name in named if name.startswith("native-")}
    assert len(ours) == 5
    fast = ours["native-fp8_tensorwise-fast"]
    assert fast.recipes["fast"].accumulation == "fast"
    assert dict(fast.layers[1].gemms) == {"fprop": "fast"}
    assert ours["native-fp8_rowwise-blocks"].execution == "compile"
    assert ours["native-fp8_tensorwise-fast-mlp"].layers[1].match == "*mlp*"
    assert "transformer_engine" not in sys.modules
