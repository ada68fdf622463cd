"""Every published policy on every family: each role is resolved, named as missing, or silent; or it is refused.

    python benchmarks/graph/published_roles.py [--depth 8]

The 26 families of ``zoo_hf.py``, with eight blocks where their configuration says how many, recorded in this process;
policies that count blocks are taken ``:scaled``. A role of a rule is *resolved* where a tunable layer has it, *missing*
where a note names it, and *silent* where neither is so; the same for blocks. What the resolution itself says is not
believed: a layer's role is read from the table of roles again, and the policy's globs are matched against the layers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from autoprec.errors import PolicyMismatchError
from autoprec.graph.report import GraphReport
from autoprec.graph.roles import places
from autoprec.policy import resolve
from autoprec.policy.library import PREFIX, SCALED, published, published_names
from autoprec.policy.space import Choice
from autoprec.tuning.decide.published import is_of, resolve_published
from benchmarks.cost.decoder import PRESETS, decoder_report


def families(depth: int) -> Iterator[tuple[str, GraphReport]]:
    """Yield one recorded step of each family, and the built-in configurations at their real depth."""
    os.environ["AUTOPREC_ZOO_DEPTH"] = str(depth)
    import torch

    from autoprec.graph.recorder import StepRecorder
    from benchmarks.graph.zoo_hf import MODELS

    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, batch = make()
        with StepRecorder(model) as recorder:
            model(**batch).loss.backward()
        yield name, recorder.report()
    for name in PRESETS:
        yield f"configuration {name}", decoder_report(PRESETS[name], batch=1, seq=64)


def judged(name: str, report: GraphReport) -> Counter[str]:
    """Return what became of the roles and blocks of one policy on one model."""
    entry, found = published(name), places(report.layers)
    try:
        done = resolve_published(f"{PREFIX}{name}{SCALED if entry.blocks else ''}", report)
    except PolicyMismatchError as error:
        print(f"refused: {error.what}", file=sys.stderr)
        return Counter({"refused": 1})
    counts = Counter({"applied": 1})
    plans = resolve(done.policy.stages[0], [layer.name for layer in report.tunable])
    recipes = {**entry.all_recipes, **done.policy.recipes}
    for layer, choice in done.choices.items():
        counts["layers"] += 1
        counts["layers off"] += plans[layer] != Choice.parse(choice).plan(recipes)
    for rule in entry.rules:
        for role in rule.roles:
            has = any(is_of(role, found[layer.name]) for layer in report.tunable)
            said = any(note.startswith(f"{role}:") for note in done.notes)
            counts["resolved" if has else "missing, said" if said else "silent"] += 1
        if rule.blocks is not None:
            has = any(found[layer.name].blocks for layer in report.tunable)
            said = any(note.startswith(f"{rule.blocks.text}:") for note in done.notes)
            counts["resolved" if has else "missing, said" if said else "silent"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=8, help="blocks of a family")
    depth = parser.parse_args().depth
    heads = ("applied", "refused", "resolved", "missing, said", "silent", "layers", "layers off")
    print(f"| model | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    total: Counter[str] = Counter()
    for model, report in families(depth):
        row: Counter[str] = Counter()
        for name in published_names():
            row += judged(name, report)
        total += row
        print(f"| {model} | {' | '.join(str(row[head]) for head in heads)} |", flush=True)
    print(f"| **all** | {' | '.join(str(total[head]) for head in heads)} |")


if __name__ == "__main__":
    main()
