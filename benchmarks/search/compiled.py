"""What a search says of the speed of a script that compiles its model, against processes of its own.

    python benchmarks/search/compiled.py gpt6 conv vit --search --out FILE.md
    python benchmarks/search/compiled.py gpt6 --policy policy.yaml

The scripts are those of ``benchmarks/scripts/by_hand``, with ``--compile``. For the truth the script as written, under
``torch.autocast("cpu", bfloat16)``, with every layer in bf16, and with the policy train in processes of their own,
eight each, as in ``by_hand.py`` (with ``OMP_NUM_THREADS=1`` in CPU time). Two processes of one program differ by 2 to
6 % for all of their life, and copies of a model in one process share its heap: one process knows a speed-up less well
than its blocks seem to say.

With ``--search`` the policy is what ``autoprec search`` adopts, and its claims stand beside the truth: of its answer,
and of autocast and all bf16 where their loss is within the budget. A claim is right where its interval overlaps the
true one, and an answer is wrong where such an autocast by hand is surely faster.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.search.by_hand import (
    ADOPTED,
    AUTOCAST,
    BF16,
    BY_HAND,
    CLOSE,
    TRAIN,
    WRITTEN,
    Interval,
    over,
    race,
    search,
    text,
)

#: What the rows of a search are called that say the same.
ROWS = {AUTOCAST: "bf16 autocast", BF16: "all bf16"}
#: The divergence that a search allows by default.
BUDGET = 0.0025


@dataclass(frozen=True)
class Row:
    """One claim: of the answer, or of what is done by hand; without an interval it is of trials, and says "about"."""

    script: str
    what: str
    claimed: Interval
    truth: Interval

    @property
    def apart(self) -> float:
        """How far the claim is from the truth."""
        return self.claimed[0] / self.truth[0] - 1.0

    @property
    def overlap(self) -> str:
        both = self.claimed[1] <= self.truth[2] and self.truth[1] <= self.claimed[2]
        return "-" if math.isnan(self.claimed[1]) else "yes" if both else "no"


def truth(name: str, policy: Path | None, rounds: int) -> dict[str, list[float]]:
    """Return milliseconds per step of a script's contenders, one for each of their processes."""
    asked = {who: who for who in BY_HAND} | ({ADOPTED: str(policy.resolve())} if policy is not None else {})
    return race(name, {who: f"{kind} --compile" for who, kind in asked.items()}, rounds)


def claimed(row: dict[str, Any]) -> Interval:
    """Return the speed-up of a row of a search's result; without an interval where it was not timed in a duel."""
    low, high = row.get("intervals", {}).get("speedup", (math.nan, math.nan))
    return row["speedup"], low, high


def claims(name: str, result: dict[str, Any], times: dict[str, list[float]]) -> list[Row]:
    """Return each claim of a search beside the truth; what its loss rejects is not a choice, and not timed again."""
    rows = {row["name"]: row for row in result["presets"] if (row.get("divergence") or 0.0) <= BUDGET}
    asked = {who: rows.get(named) for who, named in ROWS.items()}
    asked |= {ADOPTED: result["best"]} if ADOPTED in times else {}
    return [Row(name, who, claimed(row), over(times[who], times[WRITTEN])) for who, row in asked.items() if row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", help="models of benchmarks/scripts/by_hand/train.py")
    parser.add_argument("--policy", type=Path, help="time this file")
    parser.add_argument("--search", action="store_true", help="search first, and compare the claims with the truth")
    parser.add_argument("--options", default="", help="options of the searches, e.g. '--trials 6'")
    parser.add_argument("--work", type=Path, default=Path("autoprec-runs/compiled"), help="answers here are kept")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of a contender, in eight processes at most")
    parser.add_argument("--out", type=Path, help="write the table into this file as well")
    args = parser.parse_args()
    rows, slower, took = list[Row](), list[str](), list[str]()
    for name in args.scripts:
        folder = args.work.resolve() / name
        script = (str(TRAIN), name, "--compile", "--steps", "100000")
        result = search(name, folder, args.options.split(), script) if args.search else {"verdict": "", "presets": []}
        own = folder / "policy.yaml" if result["verdict"] == "adopt" else args.policy
        times = truth(name, own, args.rounds)
        for who, ms in times.items():
            print(f"{name:8}{who:10}{statistics.median(ms):9.1f} ms  {text(over(ms, times[WRITTEN]))}", flush=True)
        if not args.search:
            continue
        rows += (own_rows := claims(name, result, times))
        took.append(f"{name} {result['verdict']} {result['seconds']:.0f} s")
        beside = over(times[ADOPTED if ADOPTED in times else WRITTEN], times[AUTOCAST])
        slower += [f"{name} {text(beside)}"] if beside[2] < 1.0 and AUTOCAST in {row.what for row in own_rows} else []
    if not args.search:
        return
    off, both = [row for row in rows if abs(row.apart) > CLOSE], [row.overlap for row in rows]
    lines = [
        "# What a search claims of a script that compiles its model, and the truth",
        "",
        f"`python {' '.join(sys.argv)}`",
        "",
        f"{datetime.now():%Y-%m-%d}; {platform.processor() or platform.machine()}, {os.cpu_count()} cores; torch "
        f"{torch.__version__}; {torch.get_num_threads()} threads, {args.rounds} rounds; "
        f"load average {os.getloadavg()[0]:.1f}.",
        "",
        "| script | what | claimed | truth | apart | overlap |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        said = f"about {row.claimed[0]:.2f}x" if row.overlap == "-" else text(row.claimed)
        cells = [row.script, row.what, said, text(row.truth), f"{row.apart:+.1%}", row.overlap]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"claims whose interval overlaps the truth's: {both.count('yes')} of {len(both) - both.count('-')}",
        f"claims off by more than {CLOSE:.0%}: {len(off)} of {len(rows)}",
        f"answers slower than compiled autocast by hand: {len(slower)} of {len(args.scripts)}; {', '.join(slower)}",
        f"searches: {', '.join(took)}",
    ]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
