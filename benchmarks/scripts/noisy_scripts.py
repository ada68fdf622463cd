"""Scripts whose loss cannot judge a policy: uniform bf16 must be acceptable on every one, FP4 everywhere on none.

    python benchmarks/scripts/noisy_scripts.py [--only NAME,...] [--seeds 4] [--steps 24] [--output FILE]

Every script is a real, tiny training loop that is chaotic (or flat, or ends near a loss of zero) in its own way. It is
trained under its own precision, under benign perturbations, under uniform bf16 and under uniform nvfp4 (both emulated),
over paired seeds with the search's own trials; the decision is the search's own. CPU only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoprec.policy import LayerRule, Policy
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.protocol import GradientErrors, Probe, ScanSpec, TrainSpec, TrialResult
from autoprec.tuning.decide.decision import Rules, Standing, choose, gradient_limit
from autoprec.tuning.decide.metrics import divergence, signed_gap
from autoprec.tuning.decide.noise import (
    Baseline,
    compare_gaps,
    has_learnt,
    needs_more_benign_runs,
)
from autoprec.tuning.phases.record import answer_of
from autoprec.tuning.workers.local import HostPool

BUDGET = 0.0025
MLP = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, {out}))
x = torch.randn(512, 32); y = {y}
"""
SCRIPTS = {
    "conv net at a high rate": """
        import torch, torch.nn as nn, torch.nn.functional as F
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
                              nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 16))
        x = torch.randn(256, 1, 16, 16); y = torch.randint(0, 16, (256,))
        opt = torch.optim.Adam(model.parameters(), lr=5e-3)
        for step in range(400):
            i = torch.randint(0, 256, (8,))
            opt.zero_grad(); loss = F.cross_entropy(model(x[i]), y[i]); loss.backward(); opt.step()
        """,
    "LBFGS": MLP.format(out=1, y="torch.sin(x.sum(1, keepdim=True))")
    + """
opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
for step in range(400):
    i = torch.randint(0, 512, (128,))
    def closure():
        opt.zero_grad(); loss = F.mse_loss(model(x[i]), y[i]); loss.backward(); return loss
    opt.step(closure)
""",
    "REINFORCE": MLP.format(out=4, y="torch.randint(0, 4, (512,))")
    + """
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(400):
    i = torch.randint(0, 512, (16,))
    policy = torch.distributions.Categorical(logits=model(x[i]))
    action = policy.sample(); reward = (action == y[i]).float() - 0.25
    opt.zero_grad(); loss = -(policy.log_prob(action) * reward).mean(); loss.backward(); opt.step()
""",
    "loss near zero": MLP.format(out=1, y="(x @ torch.randn(32, 1)) / 6")
    + """
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(1200):
    opt.zero_grad(); loss = F.mse_loss(model(x), y); loss.backward(); opt.step()
""",
    "warm-up": MLP.format(out=16, y="torch.randint(0, 16, (512,))")
    + """
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, step / 20000))
for step in range(400):
    i = torch.randint(0, 512, (64,))
    opt.zero_grad(); loss = F.cross_entropy(model(x[i]), y[i]); loss.backward(); opt.step(); warm.step()
""",
    "dropout with tiny batches": """
        import torch, torch.nn as nn, torch.nn.functional as F
        torch.manual_seed(0)
        layers = [m for _ in range(3) for m in (nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5))]
        model = nn.Sequential(*layers, nn.Linear(64, 8))
        x = torch.randn(256, 64); y = torch.randint(0, 8, (256,))
        opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for step in range(400):
            i = torch.randint(0, 256, (2,))
            opt.zero_grad(); loss = F.cross_entropy(model(x[i]), y[i]); loss.backward(); opt.step()
        """,
    "super-resolution": """
        import torch, torch.nn as nn, torch.nn.functional as F
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
                              nn.Linear(256, 1024), nn.Unflatten(1, (1, 32, 32)))
        opt = torch.optim.Adam(model.parameters(), lr=5e-3)
        grid = torch.linspace(0, 6, 32)
        for step in range(400):
            phase = torch.rand(4, 1, 1, 1) * 6
            high = torch.sin(grid[None, None, :, None] + phase) * torch.cos(grid[None, None, None, :] - phase)
            opt.zero_grad(); loss = F.mse_loss(model(F.avg_pool2d(high, 4)), high); loss.backward(); opt.step()
        """,
}


#: Names of the convolutions of a script.
CONVOLUTIONS = {"conv net at a high rate": ("0", "2")}


@dataclass(frozen=True)
class Row:
    """What one script showed; gaps and errors are fractions."""

    script: str
    floor: float
    learnt: bool
    noise: float | None
    ratio: dict[str, float]
    divergence: dict[str, float]
    gradient_error: dict[str, float]
    verdict: dict[str, str]
    reason: dict[str, str]
    seconds: float


def uniform(name: str, convolutions: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the policy that runs every layer in one recipe; convolutions have bf16 at least."""
    recipes = {name: BUILTIN_RECIPES[name], "bf16": BUILTIN_RECIPES["bf16"]}
    layers = tuple(LayerRule(match=layer, recipe="bf16") for layer in convolutions)
    return Policy(recipes=recipes, layers=layers, default=name).to_dict()


def train(pool: HostPool, seed: int, steps: int, policy: dict[str, Any] | None, **changes: Any) -> TrialResult:
    """Run one paired trial.

    Raises:
        SystemExit: it failed.
    """
    result = pool.host(seed).run(TrainSpec(policy=policy, steps=steps, backend="emulated", timeout_s=300, **changes))
    if not result.ok:
        raise SystemExit(f"{result.status}: {result.reason}\n{result.tail}")
    return result


def measure(name: str, seeds: int, steps: int) -> Row:
    """Measure and judge both policies on one script."""
    began = time.monotonic()
    policies = {recipe: uniform(recipe, CONVOLUTIONS.get(name, ())) for recipe in ("bf16", "nvfp4")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(textwrap.dedent(SCRIPTS[name]))
        command = ScriptCommand.parse((str(path),))
        pool = HostPool(lambda seed, where: TrialRunner(command, run_dir=where, seed_offset=seed), Path(folder))
        try:
            first = train(pool, 0, steps, None)
            perturbed: list[float] = []
            while not perturbed or needs_more_benign_runs(perturbed, BUDGET):
                label = f"bf16:{len(perturbed)}" if perturbed else "bf16"
                perturbed.append(divergence(train(pool, 0, steps, None, perturb=label).losses, first.losses))
            runs: dict[str, list[tuple[float, float]]] = {"benign": [], **{n: [] for n in policies}}
            for seed in range(seeds):
                reference = train(pool, seed, steps, None, anneal=True).losses
                rounded = train(pool, seed, steps, None, anneal=True, perturb="bf16")
                answers = {n: train(pool, seed, steps, p, anneal=True) for n, p in policies.items()}
                for label, result in {"benign": rounded, **answers}.items():
                    pair = divergence(result.losses, reference), signed_gap(result.losses, reference)
                    runs[label].append(pair)
            probes = tuple(Probe(n, p) for n, p in policies.items())
            scan = ScanSpec(warmup=10, probes=probes, backend="emulated")
            found = answer_of(pool.host().run(scan), GradientErrors, name)
        finally:
            pool.close()
    errors = {row.id: row.error for row in found.probes}
    gaps, excess = zip(*runs["benign"], strict=True)
    baseline = Baseline(statistics.fmean(perturbed), gaps, excess, has_learnt(first.losses))
    noise = found.gradient_noise
    verdict, reason = {}, {}
    for n in policies:
        ours, signed = zip(*runs[n], strict=True)
        candidates = [
            Standing("script", 1.0, (0.0,), reference=True),
            Standing(n, 2.0, ours, excess=signed, gradient_error=errors[n]),
        ]
        found = choose(candidates, Rules(BUDGET, baseline, max_gradient=gradient_limit(noise)))
        verdict[n], reason[n] = found.verdict, found.reason
    return Row(
        name,
        baseline.floor,
        baseline.learnt,
        noise,
        {n: compare_gaps([g for g, _ in runs[n]], gaps)[0] for n in policies},
        {n: statistics.fmean(g for g, _ in runs[n]) for n in policies},
        errors,
        verdict,
        reason,
        time.monotonic() - began,
    )


def main() -> int:
    """Print the table; exit 1 when a script is judged wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SCRIPTS))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    print("| script | noise floor | learns | policy | divergence | to benign | gradient error | verdict |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name in asked.only.split(","):
        row = measure(name, asked.seeds, asked.steps)
        rows.append(row)
        for n in row.verdict:
            print(
                f"| {name} | {row.floor:.3%} | {'yes' if row.learnt else 'no'} | {n} | {row.divergence[n]:.3%} "
                f"| {row.ratio[n]:.1f}x | {row.gradient_error[n]:.3f} | {row.verdict[n]} |",
                flush=True,
            )
    wrong = [r.script for r in rows if r.verdict != {"bf16": "adopt", "nvfp4": "stay"}]
    for row in rows:
        for n, why in row.reason.items():
            print(f"{row.script}, {n}: {why}")
    print(f"{len(rows) - len(wrong)} of {len(rows)} scripts are judged rightly" + (f"; not {wrong}" if wrong else ""))
    if asked.output is not None:
        asked.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
