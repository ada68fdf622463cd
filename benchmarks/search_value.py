"""What a search is worth: the gain of the adopted policy over the best preset that is acceptable, model by model.

    python benchmarks/search_value.py                # 12 models x h100, b200; trials answered by a formula (simulated)
    python benchmarks/search_value.py --output NAME  # also write results/NAME.md

Shapes are those of known models, times are the cost model's; divergence follows a formula (tests/simulated.py) whose
layers differ in sensitivity as real ones do and whose seeds differ by a lognormal factor. So the table says where
mixing recipes can pay at these shapes, not what it does to a real loss. A row ends with what the answer cost.
"""

from __future__ import annotations

import argparse
import datetime
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from search_cost import scratch

from autoprec.policy import LayerPlan
from autoprec.trial.command import ScriptCommand
from autoprec.trial.protocol import TrialSpec
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import SearchOptions
from tests.simulated import ERROR, SimulatedRunner, SimulatedScript, simulated_graph

#: name -> (blocks, width, tokens per step): shapes of known models on one GPU.
MODELS = {
    "GPT-2 small": (12, 768, 16384),
    "GPT-2 medium": (24, 1024, 16384),
    "GPT-2 large": (36, 1280, 8192),
    "GPT-2 XL": (48, 1600, 8192),
    "ViT-B": (12, 768, 25216),
    "ViT-L": (24, 1024, 25216),
    "ViT-H": (32, 1280, 12608),
    "BERT-large": (24, 1024, 16384),
    "Llama 1B": (16, 2048, 8192),
    "Llama 3B": (28, 3072, 8192),
    "Llama 8B, 8 of 32 blocks": (8, 4096, 8192),
    "Llama 70B, 2 of 80 blocks": (2, 8192, 8192),
}
TARGETS = ("h100", "b200")


@dataclass(slots=True)
class Uneven(SimulatedScript):
    """A simulated script whose layers differ in sensitivity: ln has a standard deviation of 0.8 over layers."""

    def error(self, document: object) -> float:
        """Return the relative gradient error of a policy."""
        total = 0.0
        for name, plan in self.plans(document).items():  # type: ignore[arg-type]
            total += self._factor(name) ** 2 * self._square(plan)
        return float(np.sqrt(total))

    def _factor(self, name: str) -> float:
        own = np.random.default_rng([*name.encode()]).lognormal(0.0, 0.8)
        return self.error_scale * float(own) * (self.head_factor / 3 if name == "head" else 1.0)

    @staticmethod
    def _square(plan: LayerPlan) -> float:
        recipes = (plan.fprop, plan.dgrad, plan.wgrad)
        return sum(ERROR[recipe.format] ** 2 if recipe else 0.0 for recipe in recipes) / 3


def row(name: str, target: str) -> tuple[str, float]:
    """Return a row of the table, and the gain."""
    blocks, width, tokens = MODELS[name]

    def moved(seed: int, spec: TrialSpec) -> float:
        layers = repr(sorted(map(repr, (spec.policy or {}).get("layers", []))))
        return 0.02 * (float(np.random.default_rng([seed, *layers.encode()]).lognormal(0.0, 0.35)) - 1.0)

    graph = simulated_graph(blocks, width=width, tokens=tokens)
    script = Uneven(graph=graph, noise=moved, error_scale=3.0 / np.sqrt(4 * blocks + 1))
    with scratch() as folder:
        (folder / "train.py").touch()
        options = SearchOptions(command=("train.py",), target=target, workers=1)
        command = ScriptCommand.parse(options.command)
        search = Search(options, command, Listeners(), lambda seed, _folder: SimulatedRunner(script, seed))
        result = search.run()
    best, gain = result.best, float(result.best.get("gain_over_preset", 0.0))
    over = best.get("speedup_over_16bit", best["speedup"])
    preset = best.get("best_preset", "-")
    passes = result.timings.get("passes", 0.0)
    text = f"| {name} | {target} | {result.verdict} | {over:.3f}x | {gain:.1%} | {preset} | {passes:.0f} |"
    return text, gain


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="", help="name of the result file")
    args = parser.parse_args()
    lines = [
        f"# What a search is worth (simulated), {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/search_value.py`; {platform.machine()}, Python {platform.python_version()}",
        "",
        "| model | target | answer | over 16-bit | over the best preset | that preset | passes |",
        "|---|---|---|--:|--:|---|--:|",
    ]
    print("\n".join(lines), flush=True)
    gains: dict[str, list[float]] = {}
    for target in TARGETS:
        for name in MODELS:
            text, gain = row(name, target)
            gains.setdefault(target, []).append(gain)
            lines.append(text)
            print(text, flush=True)
    lines.append("")
    for target, found in gains.items():
        lines.append(
            f"{target}: {sum(g >= 0.05 for g in found)} of {len(found)} gain 5 % or more, the least {min(found):.1%}."
        )
        print(lines[-1])
    if args.output:
        path = Path(__file__).parent / "results" / f"{args.output}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
