"""A joint search over a script's variants and its layers' precision, against each of the two alone.

    python benchmarks/search/joint.py gpt2 vit tab seq2seq moe mixer --options "--budget 150s" --out FILE.md

Each script accumulates its gradient over four micro-batches; the variants take the whole batch at once, two halves, or
compile the model. Three answers are compared: the policy that a search of the script as given adopts, the fastest
variant with the precision as written (of those that the joint search found to be the same training), and the pair that
``search --variant`` adopts. That chooses the variant before the policy: whether another one would have been better is
seen by the policy of that pair under the others. Each trains in processes of its own, timed as `by_hand.py` times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoprec.cost.calibrate.cpu import cpu_model
from autoprec.support.files import write_json
from benchmarks.search.by_hand import TRAIN, WRITTEN, over, race, text

GIVEN = "--micro-batches 4"
VARIANTS = {
    "whole": "--micro-batches 1",
    "halves": "--micro-batches 2",
    "compiled": "--micro-batches 4 --compile",
    "wholecompiled": "--micro-batches 1 --compile",
}
SCRIPTS = ("gpt2", "vit", "tab", "seq2seq", "moe", "mixer", "lstm", "whisper", "conv", "bert")
Row = dict[str, Any]


def searched(name: str, folder: Path, options: Sequence[str], variants: Sequence[str]) -> dict[str, Any]:
    """Return the answer of a search, of which the folder may have one already."""
    kept = folder / "result.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "autoprec", "search", "--json", "--no-mlflow", "-o", "policy.yaml", *options]
        for variant in variants:
            command += ["--variant", f"{variant}: {VARIANTS[variant]}"]
        began = time.monotonic()
        with (folder / "search.log").open("w") as log:
            done = subprocess.run(
                [*command, "--study", folder.name, str(TRAIN), name, *GIVEN.split()],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=log,
                check=False,
            )
        found = json.loads(done.stdout) if done.stdout.strip() else {"verdict": f"no answer, exit {done.returncode}"}
        write_json(kept, found | {"seconds": time.monotonic() - began})
    result: dict[str, Any] = json.loads(kept.read_text())
    return result


def kind_of(folder: Path, result: dict[str, Any], arguments: str) -> str:
    """Return what by_hand.py serves as the contender of an answer."""
    policy = str(folder / "policy.yaml") if result["verdict"] == "adopt" and (folder / "policy.yaml").exists() else ""
    return f"{policy or WRITTEN} {arguments}"


def variant_of(folder: Path, result: dict[str, Any]) -> str:
    """Return the name of the variant of a joint answer; empty for the script as it was given."""
    if result["verdict"] == "adopt":
        evidence: dict[str, str] = yaml.safe_load((folder / "policy.yaml").read_text())["evidence"]
        return evidence.get("variant", "").partition(":")[0]
    return next((row["name"] for row in result.get("variants", []) if row.get("chosen")), "")


def judged(name: str, work: Path, options: Sequence[str], variants: Sequence[str], rounds: int) -> Row:
    folders = {what: work / name / what for what in ("precision", "joint")}
    alone = searched(name, folders["precision"], options, ())
    joint = searched(name, folders["joint"], options, variants)
    rows = {row["name"]: row for row in joint.get("variants", [])}
    accepted = [key for key, row in rows.items() if row["status"] == "accepted"]
    pair = variant_of(folders["joint"], joint)
    kinds = {
        "as given": f"{WRITTEN} {GIVEN}",
        "precision": kind_of(folders["precision"], alone, GIVEN),
        "joint": kind_of(folders["joint"], joint, VARIANTS.get(pair, GIVEN)),
    }
    kinds |= {key: f"{WRITTEN} {VARIANTS[key]}" for key in accepted}
    under = {"as given": GIVEN, **{key: VARIANTS[key] for key in accepted}}
    adopted = joint["verdict"] == "adopt"
    others = {f"policy, {key}": words for key, words in under.items() if adopted and key != (pair or "as given")}
    kinds |= {key: kind_of(folders["joint"], joint, words) for key, words in others.items()}
    times = race(name, kinds, rounds)
    other = min(others, key=lambda key: statistics.median(times[key]), default="")
    fastest = min(["as given", *accepted], key=lambda key: statistics.median(times[key]))
    better = min(["precision", fastest], key=lambda key: statistics.median(times[key]))
    base = times["as given"]
    return {
        "script": name,
        "precision": over(times["precision"], base),
        "variant": fastest,
        "variant alone": over(times[fastest], base),
        "pair": pair or "as given",
        "joint": over(times["joint"], base),
        "gain": over(times["joint"], times[better]),
        "other": f"{other.removeprefix('policy, ')}: {text(over(times[other], times['joint']))}" if other else "",
        "refused": [key for key in rows if key not in accepted],
        "cost": joint["seconds"] / alone["seconds"],
    }


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| script | precision alone | fastest variant alone | joint | joint over the better alone | "
        "its policy under the fastest other variant, over joint | seconds, of those without variants | not accepted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["script"], text(row["precision"]), f"{row['variant']}: {text(row['variant alone'])}"]
        cells += [f"{row['pair']}: {text(row['joint'])}", text(row["gain"]), row["other"], f"{row['cost']:.1f}x"]
        lines.append(f"| {' | '.join([*cells, ', '.join(row['refused'])])} |")
    gains = [row["gain"] for row in rows]
    surely = sum(low > 1.0 for _, low, _ in gains), sum(high < 1.0 for _, _, high in gains)
    more = sum(middle > 1.05 for middle, _, _ in gains)
    return [*lines, "", f"joint surely faster: {surely[0]}, surely slower: {surely[1]}, by more than 5 %: {more}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", choices=SCRIPTS)
    parser.add_argument("--options", default="", help="options of all searches, e.g. '--budget 150s'")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--work", type=Path, default=Path("autoprec-runs/joint"), help="answers here are kept")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="write the table into this file as well")
    args = parser.parse_args()
    rows = []
    for name in args.scripts:
        rows.append(judged(name, args.work.absolute(), args.options.split(), args.variants, args.rounds))
        print(table(rows)[-3], flush=True)
    lines = ["# Variants and precision together, and each alone", "", f"`python {' '.join(sys.argv)}`", ""]
    lines.append(
        f"{datetime.now():%Y-%m-%d}; {cpu_model()}, {os.cpu_count()} cores; one thread, CPU time; load average "
        f"{os.getloadavg()[0]:.1f} at the end."
    )
    lines += ["", *table(rows)]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
