"""What ``autoprec lint`` finds in code of other people: each error and warning is a false alarm, or has a reason.

    python benchmarks/scripts/lint.py --from CLONES --work DIR

Looked at are the third-party scripts of ``scripts.yaml`` (clones as for ``scripts.py``), the examples, and the 26
Hugging Face families of ``benchmarks/graph/zoo_hf.py``. One step of each is recorded and judged twice: without a
policy, and under ``default: bf16`` for an H100. A script runs in a scratch copy; its seconds are of a process of its
own, with the start of Python; a family's are of recording it here. What ``--work`` has is not done again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from autoprec.cli.phases import Phases
from autoprec.cli.policies.lint import _facts
from autoprec.policy import parse_policy
from autoprec.precision.hardware import target
from autoprec.tuning.lint.facts import Facts
from autoprec.tuning.lint.rules import findings
from benchmarks.scripts.scripts import ROOT, Script, Trial, manifest

LIMIT_S, TARGET = 60.0, "h100"
POLICY = "schema: autoprec.policy/1\nrecipes: {bf16: {format: bf16}}\ndefault: bf16\n"


def judged(facts: Facts, unseen: Sequence[str] = ()) -> dict[str, Any]:
    """Return the findings of both judgements, as JSON."""
    facts = replace(facts, targets=[target(TARGET)])
    policy = replace(facts, policy=parse_policy(POLICY), path="policy.yaml", text=POLICY)
    found = {name: [row.to_json() for row in findings(one)] for name, one in (("alone", facts), ("bf16", policy))}
    return {"found": found, "unseen": unseen, "layers": len(facts.layers)}


def judge(words: tuple[str, ...]) -> None:
    """Print what is found in one script: the child process that has its folder and its packages."""
    with Phases() as phases:
        print(json.dumps(judged(*_facts("", words, phases))))


def examples(policy: Path) -> list[Script]:
    """Return the examples as they are; those of ``integrations`` are given a policy that they apply themselves."""
    policy.write_text(POLICY, encoding="utf-8")
    plain = [path for path in ROOT.glob("examples/*.py") if path.name != "use_policy.py"]
    applied = [path for path in ROOT.glob("examples/integrations/*.py") if path.name != "toy.py"]
    found = [Script(f"example-{path.stem}", str(path)) for path in plain]
    return found + [Script(f"example-{path.stem}", str(path), args=(str(policy),)) for path in applied]


def families() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what each of the 26 families has, recorded in this process."""
    import torch

    from autoprec.graph.recorder import StepRecorder
    from benchmarks.graph.zoo_hf import MODELS

    for name, make in MODELS.items():
        torch.manual_seed(0)
        began, (model, batch) = time.monotonic(), make()
        with StepRecorder(model) as recorder:
            model(**batch).loss.backward()
        row = judged(Facts(report=recorder.report()))
        yield f"family {name}", row | {"seconds": round(time.monotonic() - began, 1)}


def lint(script: Script, clones: Path | None, work: Path) -> dict[str, Any]:
    """Return what one script has: findings of both judgements, seconds, and why it was not seen."""
    if why := script.missing(clones):
        return {"skipped": why}
    trial = Trial(script, clones, work)
    tree, began = trial.copy("lint"), time.monotonic()
    done = trial.command([sys.executable, __file__, "--judge", *script.words], tree, LIMIT_S, {})
    if done["code"] == "time":
        return {"skipped": f"not finished within {LIMIT_S:.0f} s"}
    if done["code"]:
        return {"skipped": f"stopped: {done['err'].strip().splitlines()[-1][:150]}"}
    return json.loads(done["out"].splitlines()[-1]) | {"seconds": round(time.monotonic() - began, 1)}


def page(rows: dict[str, dict[str, Any]]) -> str:
    """Return the tables: totals, errors and warnings one by one, one row a script."""
    seen = {name: row for name, row in rows.items() if "found" in row}
    seconds = median(row["seconds"] for name, row in seen.items() if not name.startswith("family "))
    recorded = sum(bool(row["layers"]) for row in seen.values())
    lines = [f"{len(rows)} tried, {recorded} recorded; a script takes {seconds:.1f} s (median)."]
    each = ["| script | judged | code | place | what |", "|---|---|---|---|---|"]
    for way in ("alone", "bf16"):
        codes = Counter[str]()
        for name, row in seen.items():
            codes.update(f"{one['severity']} {one['code']}" for one in row["found"][way])
            bad = [one for one in row["found"][way] if one["severity"] != "note"]
            bad = [one for one in bad if way == "alone" or one not in row["found"]["alone"]]
            where = [f"{name} | {way} | `{one['code']}` | {one['file']}:{one['line']}" for one in bad]
            each += [f"| {place} | {one['message']} |" for place, one in zip(where, bad, strict=True)]
        lines.append(f"- {way}: {', '.join(f'{count} {code}' for code, count in codes.most_common()) or 'nothing'}")
    table = ["| script | layers | findings alone | under bf16 | seconds | not seen |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        alone, bf16 = (len(row["found"][way]) if "found" in row else "" for way in ("alone", "bf16"))
        why = row.get("skipped") or " ".join("; ".join(row["unseen"]).split())
        table.append(f"| {name} | {row.get('layers', '')} | {alone} | {bf16} | {row.get('seconds', '')} | {why} |")
    return "\n".join([*lines, "", *each, "", *table])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="clones", type=Path, help="folder with one clone per repository")
    parser.add_argument("--work", type=Path, required=True, help="results and scratch copies")
    args = parser.parse_args()
    clones, work = args.clones and args.clones.resolve(), args.work.resolve()
    (work / "scratch").mkdir(parents=True, exist_ok=True)
    scripts = [*examples(work / "policy.yaml"), *(script for script in manifest() if script.repository)]
    rows: dict[str, dict[str, Any]] = {}
    for name, script in {"families": None, **{script.name: script for script in scripts}}.items():
        kept = work / f"{name}.json"
        if not kept.exists():
            found = dict(families()) if script is None else {name: lint(script, clones, work)}
            kept.write_text(json.dumps(found), encoding="utf-8")
        rows |= json.loads(kept.read_text(encoding="utf-8"))
    print(page(rows))


if __name__ == "__main__":
    judge(tuple(sys.argv[2:])) if sys.argv[1:2] == ["--judge"] else main()
