"""Does a policy that looks fine in twenty steps hold to the end? Whole trainings of tiny models, every policy and seed.

    python benchmarks/long_run/long_run.py --out long_run              # runs what is missing, row by row, resumes
    python benchmarks/long_run/long_run.py --out long_run --report     # prints the tables from the rows
    python benchmarks/long_run/long_run.py --out long_run --tasks gpt vit lstm --policies 'int8*' --no-drift --wider 4

Small models (benchmarks/long_run/tasks.py), 2,000 steps with warm-up and cosine, the policies of
benchmarks/long_run/policies.py from harmless to bad, three paired seeds. Each run has its *early figures*, as a search
takes them by default: the divergence of a short annealed trial (3 + 20 steps), the penalty of what optimizer state
loses, and the gradient error over the mini-batch noise at step 10; and its end: the validation loss beside the paired
fp32 run's. INT8 runs as in a search on a CPU, by its integer GEMM; other numerics are emulated. Nothing here is about
speed.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from autoprec.applying.policy import apply_policy, remove_policy  # noqa: E402
from autoprec.applying.units import tunable_units  # noqa: E402
from autoprec.optim.monitors import StateMonitor  # noqa: E402
from autoprec.optim.optimizer import unwrap_optimizer, wrap_optimizer  # noqa: E402
from autoprec.policy import Policy  # noqa: E402
from autoprec.precision.recipes import BUILTIN_RECIPES  # noqa: E402
from benchmarks.long_run.policies import POLICIES, policy_of  # noqa: E402
from benchmarks.long_run.tasks import TASKS, Task, rate, seeded, widened  # noqa: E402

STEPS, SEEDS, REFERENCE_SEEDS = 2000, 3, 8
WARMUP, SCORED, PROBED_AT = 3, 20, 10  # of a short trial, and where gradients are compared (the search's defaults)
AGES = (0.0, 0.01, 0.1, 0.5, 0.9)
NOISE_BATCHES = 8
DRIFT_RECIPES = ("fp8_rowwise", "fp8_tensorwise", "mxfp8", "nvfp4_plain")
GUARD_STEPS, GUARD_SEEDS = 600, 6
HEALTHY = ("perturbed", "bf16", "fp8 row, head bf16")
BROKEN = ("broken rate", "broken sign", "broken fp4 everywhere", "broken second moment fp16, unscaled")
HOPELESS = 20.0  # a run whose loss is this many times its first one is over
REFERENCE = Policy()
BF16 = Policy(recipes={"bf16": BUILTIN_RECIPES["bf16"]}, default="bf16")


class Run:
    """One training run: model, data and optimizer of a seed, under a policy or several, one after the other."""

    def __init__(self, task: Task, seed: int, steps: int) -> None:
        self.task, self.steps = task, steps
        self.model, self.stream = seeded(task, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=task.lr, weight_decay=0.01, foreach=True)
        self.turned = False
        self.losses: list[float] = []
        self.norms: list[float] = []

    def put(self, policy: Policy, backend: str = "emulated") -> None:
        """Exchange the policy on the live model."""
        remove_policy(self.model)
        apply_policy(policy, self.model, backend=backend)
        wrap_optimizer(self.optimizer, policy, model=self.model)

    def step(self, factor: float = 1.0) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.lr * rate(len(self.losses), self.steps) * factor
        loss = self.task.loss(self.model, next(self.stream))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.turned:
            share = (len(self.losses) - self.steps // 2) / (self.steps // 4)
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 - share)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        self.norms.append(float(norm))


def rounded_once(model: nn.Module) -> None:
    """Round every weight to bf16 once: the benign perturbation of a search."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


# ------------------------------------------------------------------ early figures
def gradient(task: Task, model: nn.Module, batch: Any) -> Tensor:
    model.zero_grad()
    task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    from autoprec.optim.tensor import decoded

    parts = [torch.zeros_like(p) if p.grad is None else decoded(p.grad) for p in model.parameters()]
    return torch.cat([part.detach().float().flatten() for part in parts])


class Snapshot:
    """Weights and batches of one moment of the reference, at which gradients are compared."""

    def __init__(self, run: Run) -> None:
        self.task = run.task
        self.model = copy.deepcopy(run.model)
        self.batches = [next(run.stream) for _ in range(NOISE_BATCHES)]
        gradients = torch.stack([gradient(self.task, self.model, batch) for batch in self.batches])
        self.first = gradients[0]
        spread = float((gradients - gradients.mean(0)).square().sum()) / (NOISE_BATCHES - 1)
        self.noise = math.sqrt(spread / float(self.first.square().sum()))

    def error(self, policy: Policy) -> float:
        """Return the relative gradient error of a policy over the mini-batch noise, as a scan measures it."""
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.AdamW(model.parameters())
        apply_policy(policy, model, backend="emulated", strict=False)
        wrap_optimizer(optimizer, policy, model=model)
        found = gradient(self.task, model, self.batches[0])
        error = float((found - self.first).norm() / self.first.norm())
        return error / self.noise if math.isfinite(error) else math.inf


def short_trial(
    task: Task, seed: int, policy: Policy, steps: int, *, perturb: bool = False, backend: str = "emulated"
) -> tuple[list[float], float]:
    """Return the losses of an annealed trial of the default length, and the penalty of its optimizer state."""
    from autoprec.trial.inside.observe.loop import annealed

    run, total = Run(task, seed, steps), WARMUP + SCORED
    if perturb:
        rounded_once(run.model)
    run.put(policy, backend)
    monitor = StateMonitor(run.optimizer, every=max(2, total // 6)) if policy.optimizer != REFERENCE.optimizer else None
    for step in range(total):
        run.step(annealed(step, total))
    return run.losses, 0.0 if monitor is None else monitor.report().penalty()


# ------------------------------------------------------------------ rows
def training_row(task: Task, seed: int, name: str, steps: int) -> dict[str, Any]:
    """Train to the end under one policy (``reference`` and ``perturbed`` are the script's own)."""
    case = POLICIES.get(name)
    backend = "emulated" if case is None else case.backend
    run = Run(task, seed, steps)
    if name == "perturbed":
        rounded_once(run.model)
    policy = REFERENCE if case is None else policy_of(case, task.layers)
    run.put(policy, backend)
    for step in range(steps):
        if case is not None and case.last < 1 and step == round(case.last * steps):
            run.put(BF16)
        run.step()
        if not run.losses[-1] < HOPELESS * run.losses[0]:
            break
    row: dict[str, Any] = {"validation": task.validation(run.model)}
    unwrap_optimizer(run.optimizer)
    remove_policy(run.model)
    row["validation_fp32"] = task.validation(run.model)
    trial, penalty = short_trial(task, seed, policy, steps, perturb=name == "perturbed", backend=backend)
    series = {"losses": [round(x, 4) for x in run.losses], "norms": [round(x, 4) for x in run.norms]}
    return row | {"trial": [round(x, 6) for x in trial], "penalty": penalty, "series": series}


def errors_row(task: Task, seed: int, steps: int, policies: Sequence[str], ages: Sequence[float]) -> dict[str, Any]:
    """Gradient errors over noise of every policy at step 10 of the reference, and at several ages of it.

    And, for the first seed, of every layer alone in some recipes.
    """
    run = Run(task, seed, steps)
    at = {f"step {PROBED_AT}": PROBED_AT} | {f"{age:.0%}": round(age * steps) for age in ages}
    found: dict[str, Any] = {"noise": {}, "policies": {}, "layers": {}}
    names = [name for name in tunable_units(run.model) if name != task.recurrent]
    for label, step in sorted(at.items(), key=lambda item: item[1]):
        while len(run.losses) < step:
            run.step()
        snapshot = Snapshot(copy_of(run))
        found["noise"][label] = snapshot.noise
        found["policies"][label] = {n: snapshot.error(policy_of(POLICIES[n], task.layers)) for n in policies}
        if seed == 0 and ages:
            found["layers"][label] = {
                recipe: {name: snapshot.error(_one_layer(name, recipe)) for name in names} for recipe in DRIFT_RECIPES
            }
    return found


def _one_layer(name: str, recipe: str) -> Policy:
    return Policy.model_validate(
        {
            "schema": "autoprec.policy/1",
            "recipes": {recipe: BUILTIN_RECIPES[recipe].to_dict()},
            "layers": [{"match": name, "recipe": recipe}],
        }
    )


def copy_of(run: Run) -> Run:
    """Return a run at the same step whose batches are its own: looking ahead must not move the data."""
    twin = copy.copy(run)
    generator = torch.Generator().manual_seed(5000 + len(run.losses))
    twin.stream = run.task.batches(generator)
    return twin


# ------------------------------------------------------------------ runs for the guard
def guarded_row(task: Task, seed: int, name: str, steps: int) -> dict[str, Any]:
    """Train under bf16, a policy, or with something that breaks at half: what the guard looks at afterwards.

    ``broken NAME``: from half on that policy of the study runs; ``broken rate``: the learning rate is 30 times what it
    was; ``broken sign``: every gradient has a share of its opposite that grows.
    """
    layers, run = task.layers, Run(task, seed, steps)
    broken = name.removeprefix("broken ") if name.startswith("broken ") else ""
    if name == "perturbed":
        rounded_once(run.model)
    if name in POLICIES:
        run.put(policy_of(POLICIES[name], layers))
    for step in range(steps):
        late = bool(broken) and step >= steps // 2
        if late and step == steps // 2 and broken in POLICIES:
            run.put(policy_of(POLICIES[broken], layers))
        run.turned = late and broken == "sign"
        run.step(30.0 if late and broken == "rate" else 1.0)
        if not math.isfinite(run.losses[-1]):
            break
    return {"series": {"losses": [round(x, 4) for x in run.losses], "norms": [round(x, 4) for x in run.norms]}}


def guard_jobs(tasks: list[str]) -> list[tuple[str, str, int]]:
    """Return (task, what, seed): six healthy seeds, four that break, and their references."""
    out = []
    for seed in range(100, 100 + GUARD_SEEDS):
        for task in tasks:
            out += [(task, name, seed) for name in ("guard reference", *HEALTHY)]
            out += [(task, name, seed) for name in BROKEN if seed < 104]
    return out


# ------------------------------------------------------------------ all of it
def jobs(tasks: list[str], seeds: int, policies: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return (task, what, seed) in the order in which they are run: every policy under one seed, then the next."""
    out: list[tuple[str, str, int]] = []
    for seed in range(max(seeds, REFERENCE_SEEDS)):
        for task in tasks:
            out.append((task, "reference", seed))
            if seed < seeds:
                out += [(task, "perturbed", seed), (task, "errors", seed)]
                out += [(task, name, seed) for name in policies]
    # after the first seed of everything, how far apart references lie: without it no gap means anything
    return sorted(out, key=lambda job: 0.5 if job[1] == "reference" and job[2] else job[2])


def run_all(
    folder: Path, steps: int, tasks: dict[str, Task], seeds: int, *, guard: bool, policies: Sequence[str], drift: bool
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    done = {(row["task"], row["what"], row["seed"], row["steps"]) for row in map(json.loads, lines)}
    wanted = guard_jobs(list(tasks)) if guard else jobs(list(tasks), seeds, policies)
    left = [job for job in wanted if (*job, steps) not in done]
    for number, (task, what, seed) in enumerate(left, 1):
        began = time.process_time()
        torch.manual_seed(seed)
        make = guarded_row if guard else training_row
        if what == "errors":
            made = errors_row(tasks[task], seed, steps, policies, AGES if drift else ())
        else:
            made = make(tasks[task], seed, what, steps)
        row = {"task": task, "what": what, "seed": seed, "steps": steps} | made
        row["cpu_s"] = round(time.process_time() - began, 2)
        with path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        print(f"{number}/{len(left)} {task} {what} seed {seed}: {row['cpu_s']} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("long_run"), help="folder of the rows")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--policies", default="*", help="only those whose name matches, e.g. 'int8*'")
    parser.add_argument("--wider", type=int, default=1, help="models so many times as wide as tasks.py has them")
    parser.add_argument("--no-drift", action="store_true", help="no gradient errors beside those of step 10")
    parser.add_argument("--guard", action="store_true", help="run what the guard is judged by")
    parser.add_argument("--report", action="store_true", help="only print the tables")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.report:
        steps = GUARD_STEPS if args.guard else args.steps
        named = fnmatch.filter(POLICIES, args.policies)
        how = {"guard": args.guard, "policies": named, "drift": not args.no_drift}
        tasks = {task.name: task for task in (widened(TASKS[name], args.wider) for name in args.tasks)}
        run_all(args.out, steps, tasks, args.seeds, **how)
    from benchmarks.long_run.report import report

    lines = (args.out / "rows.jsonl").read_text().splitlines()
    print(report([row for row in map(json.loads, lines) if row["steps"] in (args.steps, GUARD_STEPS)]))


if __name__ == "__main__":
    main()
