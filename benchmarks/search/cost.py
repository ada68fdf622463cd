"""What one answer costs: forward and backward passes of a whole search (reference, scan, trials, further seeds).

    python benchmarks/search/cost.py                # train_gpt.py rehearsed for h100, and the simulated models
    python benchmarks/search/cost.py --only real    # or: simulated
    python benchmarks/search/cost.py --output NAME  # also write results/NAME.md

``real`` runs examples/train_gpt.py under emulated recipes with time modelled for an H100. ``simulated`` answers trials
from a formula (tests/simulated.py), with seeds that differ as real ones do, for models that are too slow to train here:
it counts passes, and says nothing about whether the policy is right. A training step counts as one pass.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from autoprec.trial.command import ScriptCommand  # noqa: E402
from autoprec.trial.protocol import TrialSpec  # noqa: E402
from autoprec.tuning.engine import Search  # noqa: E402
from autoprec.tuning.events import Listeners  # noqa: E402
from autoprec.tuning.options import SearchOptions  # noqa: E402
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph  # noqa: E402

#: name -> (blocks, width, tokens, target) of a simulated GPT: a small one, and GPT-2 with 124 M parameters.
SIMULATED = {
    "GPT, 4 blocks, h100": (4, 1024, 16384, "h100"),
    "GPT-2 124M, h100": (12, 768, 16384, "h100"),
    "GPT-2 124M, b200": (12, 768, 16384, "b200"),
    "GPT, 32 blocks of 4096, b200": (32, 4096, 16384, "b200"),
}


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Work in a folder that is taken away again."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def row(name: str, search: Search) -> str:
    """Run a search, and return its row of the table."""
    result = search.run()
    timings, records = result.timings, search.records
    runs = sum(record.kind != "noise" for record in records)
    scan = timings.get("sensitivity_passes", 0.0)
    trials = sum(result.trials.values())
    seeds = sum(record.kind == "finalist" for record in records)
    gain = result.best.get("speedup_over_16bit", result.best["speedup"])
    return (
        f"| {name} | {timings['passes']:.0f} | {scan:.0f} | {trials} | {seeds} | {runs} | {result.verdict} "
        f"{gain:.3f}x over 16-bit, {result.best.get('gain_over_preset', 0.0):.1%} over the best preset "
        f"({result.best.get('best_preset', '-')}) | {result.stopped} |"
    )


def real() -> str:
    """Search examples/train_gpt.py for an H100."""
    script = ROOT / "examples" / "train_gpt.py"
    with scratch():
        options = SearchOptions(command=(str(script),), target="h100", cost_scale="width=16,depth=4,tokens=32")
        return row("examples/train_gpt.py, h100", Search(options, ScriptCommand.parse(options.command), Listeners()))


def simulated(name: str) -> str:
    """Search a simulated model whose seeds differ by a lognormal factor, as real ones do."""
    blocks, width, tokens, target = SIMULATED[name]

    def moved(seed: int, spec: TrialSpec) -> float:
        layers = repr(sorted(map(repr, (spec.policy or {}).get("layers", []))))
        rng = np.random.default_rng([seed, *layers.encode()])
        return 0.02 * (float(rng.lognormal(0.0, 0.35)) - 1.0)

    graph = simulated_graph(blocks, width=width, tokens=tokens)
    script = SimulatedScript(graph=graph, noise=moved, error_scale=3.0 / np.sqrt(4 * blocks + 1), delay_s=0.0)
    with scratch() as folder:
        (folder / "train.py").touch()
        options = SearchOptions(command=("train.py",), target=target, workers=1)
        command = ScriptCommand.parse(options.command)
        search = Search(options, command, Listeners(), lambda seed, _folder: SimulatedRunner(script, seed))
        return row(f"{name} (simulated)", search)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", choices=["", "real", "simulated"])
    parser.add_argument("--output", default="", help="name of the result file")
    args = parser.parse_args()
    lines = [
        f"# What an answer costs, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/search/cost.py`; {platform.machine()}, Python {platform.python_version()}",
        "",
        "| search | passes | of them scan | trials | further seeds | runs | answer | why it stopped |",
        "|---|--:|--:|--:|--:|--:|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in (*(["real"] if args.only != "simulated" else []), *(SIMULATED if args.only != "real" else [])):
        lines.append(real() if name == "real" else simulated(name))
        print(lines[-1], flush=True)
    if args.output:
        path = Path(__file__).resolve().parents[1] / "results" / f"{args.output}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
