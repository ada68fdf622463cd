"""What a search is worth: the gain of the adopted policy over the best preset that is acceptable, model by model.

    python benchmarks/search/value.py                # every setting below; trials answered by a formula (simulated)
    python benchmarks/search/value.py --quick        # three models
    python benchmarks/search/value.py --settings tight,NVFP4 --targets b200
    python benchmarks/search/value.py --output NAME  # also write results/NAME.md and NAME.json, row by row
    python benchmarks/search/value.py --output NAME --resume   # go on where a run was cut

Shapes are those of known models, times are the cost model's (CPU: this machine's; where the model says that no recipe
gains, nothing is run); divergence follows a formula whose layers differ in sensitivity (a lognormal factor per layer)
and whose runs differ from seed to seed, as far as real ones were seen to (benchmarks/search/quality.py). So the table
says where mixing recipes can pay at these shapes, and whether the search finds it, not what it does to a real loss.

Because it is a formula, the truth is known: the best preset is the fastest one whose mean divergence can be shown to be
within the budget with 12 paired seeds (1.645 standard errors), and whose gradient error and memory are within their
limits. ``possible`` is what the fastest such assignment of recipes to layers gains over it (an exact
knapsack; choices beside the layers' are not in it), ``within`` says whether the adopted policy's true mean is within
the budget. ``over an oracle's`` is the gain over the fastest preset whose true mean is, though no 12 seeds may show it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autoprec.policy import LayerPlan, load_policy
from autoprec.policy.solver import solve
from autoprec.policy.space import Choice
from autoprec.trial.command import ScriptCommand
from autoprec.trial.protocol import TrialSpec
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.setup import Setup
from benchmarks.search.cost import scratch
from tests.simulated import ERROR, TIME, SimulatedRunner, SimulatedScript, simulated_graph

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
    "Llama 13B, 6 of 40 blocks": (6, 5120, 8192),
    "Llama 70B, 2 of 80 blocks": (2, 8192, 8192),
    "GPT-3 175B, 1 of 96 blocks": (1, 12288, 4096),
}
QUICK = ("GPT-2 small", "Llama 1B", "Llama 70B, 2 of 80 blocks")


@dataclass(frozen=True)
class Setting:
    """How a search is asked: targets, options, models; ``memory`` limits it to a share of what all bf16 takes."""

    targets: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    models: Sequence[str] = tuple(MODELS)
    memory: float = 0.0


_SOME = ("GPT-2 medium", "ViT-L", "Llama 1B", "Llama 8B, 8 of 32 blocks")
SETTINGS = {
    "as it comes": Setting(("h100", "b200", "cpu")),
    "NVFP4": Setting(("b200",), {"space": "blackwell-nvfp4"}),
    "tight": Setting(("h100", "b200"), {"max_divergence": 0.0015, "max_gradient_error": 0.072}, _SOME),
    "state": Setting(("h100",), {"space": "msamp-levels"}, _SOME),
    "memory": Setting(("h100",), {"space": "msamp-levels"}, _SOME, memory=0.62),
}
#: Spread of a layer's sensitivity (of ln over layers) and of a run's divergence (of ln over seeds).
LAYERS, SEEDS = 0.8, 0.36
#: A run's divergence for each unit of gradient error, over the simulated script's own (0.75 % of the mean).
STRENGTH = 5.5
#: Mean divergence for each unit of gradient error: the loss is off by 1 % of it, times how far the scored half of 23
#: steps is into the run.
PER_ERROR = 0.01 * 0.74 * STRENGTH * math.exp(SEEDS**2 / 2)
#: Largest true mean, as a share of the budget, that the 95 % bound over 12 seeds shows to be within it.
SHOWN = math.exp(-1.645 * SEEDS / math.sqrt(12))
#: Differences of two equal times, by rounding.
_EXACT = 1e-9
#: Relative gradient noise of the simulated script, and the gradient error that rounded state comes to (assumed).
NOISE = 0.5
STATE = {
    "optimizer.weights": {"fp16_scaled": 0.004, "bf16_stochastic": 0.02, "bf16_kahan": 0.002, "e4m3_master": 0.006},
    "optimizer.gradients": {"bf16": 0.002, "e4m3": 0.02, "e4m3_tensor": 0.025},
    "optimizer.exp_avg": {"bf16": 0.002, "e4m3": 0.015, "e4m3_tensor": 0.05},
    "optimizer.exp_avg_sq": {"fp16_scaled": 0.001, "fp16_tensor": 0.001, "int8_block": 0.015},
    "communication.gradients": {"bf16": 0.002, "fp8": 0.02},
}


@dataclass(slots=True)
class Uneven(SimulatedScript):
    """A simulated script whose layers differ in sensitivity, and whose state matters as well."""

    def error(self, document: Mapping[str, Any] | None) -> float:
        """Return the relative gradient error of a policy."""
        total = sum(self.square(name, plan) for name, plan in self.plans(document).items())
        for name, values in STATE.items():
            part, _, key = name.partition(".")
            total += values.get(str(((document or {}).get(part) or {}).get(key)), 0.0) ** 2
        return math.sqrt(total)

    def square(self, name: str, plan: LayerPlan) -> float:
        """Return the squared error of one layer."""
        factor = np.random.default_rng([*name.encode()]).lognormal(0.0, LAYERS) * (2.0 if name == "head" else 1.0)
        recipes = (plan.fprop, plan.dgrad, plan.wgrad)
        return float(self.error_scale * factor) ** 2 * sum(ERROR[r.format] ** 2 if r else 0.0 for r in recipes) / 3

    def extra(self, seed: int, document: Mapping[str, Any] | None) -> float:
        """Return what a run's gradient error seems to be under one seed, beyond :meth:`error`."""
        layers = repr(sorted(map(repr, (document or {}).get("layers", []))))
        factor = float(np.random.default_rng([seed, *layers.encode()]).lognormal(0.0, SEEDS))
        return self.error(document) * (STRENGTH * factor - 1.0)

    def divergence(self, document: Mapping[str, Any] | None) -> float:
        """Return the mean divergence over all seeds, as the search would measure it."""
        return PER_ERROR * self.error(document)


def searched(name: str, target: str, setting: str) -> dict[str, Any]:
    """Search one model, and return a row of the table."""
    blocks, width, tokens = MODELS[name]
    graph = simulated_graph(blocks, width=width, tokens=tokens)
    script = Uneven(graph=graph, error_scale=1.5 / math.sqrt(4 * blocks + 1))

    def moved(seed: int, spec: TrialSpec) -> float:
        return script.extra(seed, spec.policy)

    script.noise = moved
    asked, memory = dict(SETTINGS[setting].options), SETTINGS[setting].memory
    with scratch() as folder:
        (folder / "train.py").touch()
        if memory:
            options = SearchOptions(command=("train.py",), target=target, workers=1, **asked)
            whole = Setup.of(options, SimulatedRunner(script).start(), graph)
            baseline = whole.problem.params_of(whole.problem.baseline)
            asked["max_memory"] = int(memory * whole.steps.of(baseline).memory_bytes)
        options = SearchOptions(command=("train.py",), target=target, workers=1, **asked)
        command = ScriptCommand.parse(options.command)
        search = Search(options, command, Listeners(), lambda seed, _folder: SimulatedRunner(script, seed))
        result = search.run()
        chosen = load_policy("policy.yaml").to_dict()
    assert search.setup is not None
    return {
        "setting": setting,
        "model": name,
        "target": target,
        "verdict": result.verdict,
        "over_16bit": result.best.get("speedup_over_16bit", result.best["speedup"]),
        "told": float(result.best.get("gain_over_preset", 0.0)),
        "passes": result.timings.get("passes", 0.0),
        "stopped": result.stopped,
        "divergence": script.divergence(chosen),
        "within": script.divergence(chosen) <= search.setup.options.max_divergence,
        **truth(script, search.setup, float(result.best["step_time_ms"]), adopted=result.verdict == "adopt"),
    }


def truth(script: Uneven, setup: Setup, step_ms: float, *, adopted: bool) -> dict[str, Any]:
    """Return what is really so: the best acceptable preset, the gain over it, and what is possible at all."""
    problem, limits = setup.problem, setup.options
    largest = setup.options.max_gradient_error * NOISE

    timed_here = setup.measured and adopted
    if not adopted:  # told by the cost model, as the search was
        step_ms = setup.steps.script().time_ms

    def milliseconds(params: Mapping[str, Any]) -> float:
        if timed_here:
            return script.milliseconds(problem.policy(params).to_dict())
        return setup.steps.of(params).time_ms

    timed = []
    for preset, params in presets(problem):
        document = problem.policy(params).to_dict()
        held = limits.max_memory is None or setup.steps.of(params).memory_bytes <= limits.max_memory
        if held and script.error(document) <= largest:
            timed.append((milliseconds(params), preset, script.divergence(document)))
    fastest, name, _ = min((t for t in timed if t[2] <= SHOWN * limits.max_divergence), default=(math.nan, "none", 0.0))
    oracle = min((t[0] for t in timed if t[2] <= limits.max_divergence), default=math.nan)
    recipes = setup.space.recipes_with(problem.params_of(problem.baseline))
    work = {layer.name: layer.total_flops for layer in setup.graph.tunable}

    def time_of(layer: str, plan: LayerPlan) -> float:
        if not timed_here:
            return setup.cost.layer_time_ms(layer, plan, activations="bf16")
        rates = [TIME[r.format] if r else 1.0 for r in (plan.fprop, plan.dgrad, plan.wgrad)]
        return script.step_ms * 0.8 * work[layer] * sum(rates) / 3 / sum(work.values())

    plans = {choice: Choice.parse(choice).plan(recipes) for choice in problem.choice_names}
    times = problem.table(lambda g, c: sum(time_of(layer, plans[c]) for layer in g.layers))
    squares = problem.table(lambda g, c: sum(script.square(layer, plans[c]) for layer in g.layers))
    index = solve(times, squares, min(largest, SHOWN * limits.max_divergence / PER_ERROR) ** 2)
    best = milliseconds(problem.from_indices(index, {})) if index is not None else math.nan
    if not adopted and best > step_ms:
        best, name = step_ms, "the script as written" if fastest >= step_ms else name
        fastest, oracle = min(fastest, step_ms), min(oracle, step_ms)
    return {
        "preset": name,
        "step_ms": step_ms,
        "gain": fastest / step_ms - 1.0,
        "over_oracle": oracle / step_ms - 1.0,
        "possible": fastest / best - 1.0,
    }


def line(row: Mapping[str, Any]) -> str:
    """Return a row as Markdown."""
    gain, oracle = ("-" if math.isnan(row[k]) else _gain(row[k]) for k in ("gain", "over_oracle"))
    cells = [row["setting"], row["model"], row["target"], row["verdict"], f"{row['over_16bit']:.3f}x", gain]
    cells += [row["preset"], f"{row['possible']:+.1%}", oracle, "yes" if row["within"] else "no"]
    cells += [f"{row['passes']:.0f}"]
    return f"| {' | '.join(cells)} |"


def totals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what all rows of a setting and target come to."""
    out = []
    for key in dict.fromkeys((row["setting"], row["target"]) for row in rows):
        mine = [row for row in rows if (row["setting"], row["target"]) == key]
        gains = [row["gain"] for row in mine if not math.isnan(row["gain"])]
        if not gains:
            continue
        oracle = [row["over_oracle"] for row in mine if not math.isnan(row["over_oracle"])]
        lost = [row["possible"] - row["gain"] for row in mine if not math.isnan(row["gain"] + row["possible"])]
        left = f"left of what is possible: mean {np.mean(lost):.1%}, most {max(lost):.1%}"
        refused = sum(not row["within"] for row in mine)
        out.append(
            f"- {key[0]}, {key[1]}: {_gains(gains)} (against an oracle's preset {_gains(oracle)}); {left}; {refused} "
            f"beyond the budget; {np.mean([row['passes'] for row in mine]):.0f} passes."
        )
    aimed = [row for row in rows if row["target"] == "b200" and not math.isnan(row["gain"])]
    if aimed:
        gains = [row["gain"] for row in aimed]
        many, could = (sum(row[key] >= 0.05 for row in aimed) for key in ("gain", "possible"))
        met = "met" if 3 * many >= len(aimed) and min(gains) > -_EXACT else "missed"
        out.append(
            f"- {met}: 5 % or more over the best preset in a third of the b200 rows, never below 0: {many} of "
            f"{len(aimed)} ({could} where layers' recipes alone could), least {_gain(min(gains))}."
        )
    return out


def _gain(value: float) -> str:
    """Return a gain in percent; that of equal times is 0 whatever they are rounded to."""
    return f"{0.0 if abs(value) < _EXACT else value:+.1%}"


def _gains(values: Sequence[float]) -> str:
    many = sum(value >= 0.05 for value in values)
    return f"{many} of {len(values)} gain 5 % or more, mean {np.mean(values):+.1%}, least {_gain(min(values))}"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS), help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--targets", default="h100,b200,cpu")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--output", default="", help="name of the result files")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the result file already has")
    args = parser.parse_args()
    path = Path(__file__).resolve().parents[1] / "results" / f"{args.output}.json"
    rows = json.loads(path.read_text()) if args.resume and args.output and path.exists() else []
    known = {(row["setting"], row["model"], row["target"]) for row in rows}
    head = [
        "| setting | model | target | answer | over 16-bit | over the best preset | that preset | possible | over an "
        "oracle's | within | passes |",
        "|---|---|---|---|--:|--:|---|--:|--:|---|--:|",
    ]
    print("\n".join(head), flush=True)
    for setting in args.settings.split(","):
        for target in SETTINGS[setting].targets:
            for model in SETTINGS[setting].models:
                wanted = target in args.targets.split(",") and (not args.quick or model in QUICK)
                if not wanted or (setting, model, target) in known:
                    continue
                rows.append(searched(model, target, setting))
                print(line(rows[-1]), flush=True)
                if args.output:
                    path.write_text(json.dumps(rows, indent=1))
    print("\n".join(["", *totals(rows)]))
    if args.output:
        lines = [
            f"# What a search is worth (simulated), {datetime.date.today().isoformat()}",
            "",
            f"`python benchmarks/search/value.py`; {platform.machine()}, Python {platform.python_version()}",
            "",
            *(__doc__ or "").split("\n\n")[2:],
            *totals(rows),
            "",
            *head,
            *map(line, rows),
        ]
        path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
