"""Is the rehearsal true? Emulated against native numerics, and modelled against measured time, on this device.

    python benchmarks/gpu/fidelity.py [--model gpt2-124m] [--recipes ...] [--out FILE]
                                      [--sections gradients,times,curves]

One host of the same script answers everything, in one run: the gradient error of every group and recipe by the
``emulated`` backend and by the device's own (``native``, and torchao's and
Transformer Engine's where they are installed), the step time of uniform and mixed policies beside the cost model's,
loss curves of 50 steps beside the noise floor, and what share of the layers executed what was asked. Curves compile
the script's blocks, not its whole model. Every answer is kept beside ``FILE``, where a second call finds it, and so
are, row by row, the figures that the day's report draws from them (``figures.py``). A CPU's own FP8 products are
slow but real, so a machine without a GPU rehearses all but the times, and the table says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from autoprec.cost import CostModel  # noqa: E402
from autoprec.graph.report import GraphReport  # noqa: E402
from autoprec.policy import Policy, policy_from_dict, resolve  # noqa: E402
from autoprec.precision.recipes import BUILTIN_RECIPES  # noqa: E402
from autoprec.trial.command import ScriptCommand  # noqa: E402
from autoprec.trial.driver.runner import TrialRunner  # noqa: E402
from autoprec.trial.protocol import HostInfo, Probe, TrialResult, TrialSpec  # noqa: E402
from autoprec.tuning.decide.metrics import divergence, step_time  # noqa: E402
from autoprec.tuning.target import resolve_target  # noqa: E402
from benchmarks.gpu.figures import FIGURES_FILE  # noqa: E402
from benchmarks.gpu.parts import TRAIN, Parts, write_whole  # noqa: E402

RECIPES = ("fp8_tensorwise", "fp8_rowwise", "fp8_delayed")
#: The one whose products a CPU runs at a bearable speed (per-tensor E5M2 takes seconds a step even for a tiny model).
ON_CPU = "fp8_rowwise"
CURVE_STEPS = 50
SECTIONS = ("gradients", "times", "curves")


def document(assignment: dict[str, str]) -> dict[str, Any]:
    """Return the policy that gives layers (exact names) their recipes, everything else as written."""
    layers = [{"match": name.replace("[", "[[]"), "recipe": recipe} for name, recipe in assignment.items()]
    recipes = {name: BUILTIN_RECIPES[name] for name in set(assignment.values())}
    return Policy.model_validate({"recipes": recipes, "layers": layers}).to_dict()


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's coefficient."""
    ranks = [np.argsort(np.argsort(np.asarray(x))) for x in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if len(a) > 2 else float("nan")


class Subject:
    """One host of the script, asked one thing after another; what it has answered is kept in ``parts``."""

    def __init__(self, runner: TrialRunner, seed: int | None, parts: Parts) -> None:
        self.runner, self.seed, self.parts = runner, seed, parts

    def run(self, **spec: Any) -> TrialResult:
        """Run a trial, or return what was kept of it; the name is of the whole spec, so another one is another run."""
        asked = TrialSpec(timeout_s=580, **({"seed": self.seed} | spec))
        key = json.dumps(asked.to_json(), sort_keys=True)
        name = f"{asked.kind}-{asked.backend}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        done = TrialResult.from_json(self.parts.get(name, lambda: self._made(asked)))
        if not done.ok:
            print(f"    {spec.get('backend', '')}: {done.status}: {done.reason[:160]}", file=sys.stderr)
        return done

    def _made(self, asked: TrialSpec) -> dict[str, Any]:
        done = self.runner.run(asked)
        return done.to_json() | ({} if done.ok else {"failed": done.reason})

    def errors(self, probes: tuple[Probe, ...], backend: str) -> dict[str, float]:
        """Return the relative gradient error of every probe that the backend ran."""
        done = self.run(kind="sensitivity", warmup=2, probes=probes, backend=backend)
        rows = done.payload.get("probes", [])
        failed = [row for row in rows if row.get("failed")]
        if failed:
            print(f"    {backend}: {len(failed)} probes failed, first: {failed[0]['failed'][:160]}", file=sys.stderr)
        return {row["id"]: row["gradient_error"] for row in rows if row.get("gradient_error")}


class Kept:
    """The figures of the day's report, written whenever one is added: a part may be ended at any time."""

    def __init__(self, path: Path) -> None:
        self.path, self.values = path, dict[str, Any]()
        if path.exists():
            self.values = json.loads(path.read_text())

    def put(self, section: str, value: Any) -> None:
        """Replace a section."""
        self.values[section] = value
        write_whole(self.path, json.dumps(self.values, indent=1))


def gradient_table(
    subject: Subject, graph: GraphReport, recipes: Sequence[str], backends: Sequence[str], kept: Kept
) -> list[str]:
    """Compare gradient errors of every group and recipe between the emulation and each other backend."""
    probes = tuple(
        Probe(f"{group}|{recipe}", document(dict.fromkeys(members, recipe)))
        for group, members in graph.groups.items()
        for recipe in recipes
    )
    emulated = subject.errors(probes, "emulated")
    lines = [
        "| backend | probes | rank correlation | median difference | largest difference |",
        "|---|---|---|---|---|",
    ]
    figures: dict[str, Any] = {}
    for backend in backends:
        other = subject.errors(probes, backend)
        both = [name for name in emulated if name in other]
        figures[backend] = {"probes": len(both), "of": len(probes)}
        if not both:
            kept.put("gradients", figures)
            lines.append(f"| {backend} | 0 of {len(probes)} | - | - | - |")
            continue
        a, b = ([source[name] for name in both] for source in (emulated, other))
        off = np.abs(np.asarray(b) / np.asarray(a) - 1)
        rank = rank_correlation(a, b)
        figures[backend] |= {"median": float(np.median(off)), "largest": float(off.max())}
        kept.put("gradients", figures)
        lines.append(
            f"| {backend} | {len(both)} of {len(probes)} | {rank:.4f} | {np.median(off):.2%} | {off.max():.2%} |"
        )
    return lines


def curve_table(
    subject: Subject, names: Sequence[str], recipes: Sequence[str], backends: Sequence[str], steps: int
) -> list[str]:
    """Compare whole loss curves, emulated against native, with what a benign perturbation does."""
    plain = subject.run(steps=steps, warmup=0, by_block=True)
    floor = divergence(subject.run(steps=steps, warmup=0, by_block=True, perturb="bf16").losses, plain.losses)
    lines = [
        f"Noise floor of {steps} steps: {floor:.3%}.",
        "",
        "| recipe | backend | emulated against it | it against the script | layers executed as asked |",
        "|---|---|---|---|---|",
    ]
    for recipe in recipes:
        policy = document(dict.fromkeys(names, recipe))
        emulated = subject.run(steps=steps, warmup=0, by_block=True, policy=policy, backend="emulated")
        for backend in backends:
            other = subject.run(steps=steps, warmup=0, by_block=True, policy=policy, backend=backend)
            if not other.ok:
                lines.append(f"| {recipe} | {backend} | {other.status}: {other.reason[:60]} | | |")
                continue
            rows = (other.audit or {"layers": []})["layers"]
            asked = [row for row in rows if set(row["requested"].values()) != {"keep"}]
            share = sum(row["ok"] for row in asked) / max(1, len(asked))
            apart = divergence(emulated.losses, other.losses)
            lines.append(
                f"| {recipe} | {backend} | {apart:.3%} | {divergence(other.losses, plain.losses):.3%} | {share:.0%} |"
            )
    return lines


def time_table(
    subject: Subject,
    graph: GraphReport,
    host: HostInfo,
    recipes: Sequence[str],
    kept: Kept,
) -> list[str]:
    """Compare measured with modelled step times: relative to the script as written, and absolutely."""
    compiled = host.compiled
    target, _ = resolve_target("auto", host.device)
    cost = CostModel(graph, target, compiled=compiled)
    names = [layer.name for layer in graph.tunable]
    policies: dict[str, dict[str, Any]] = {"as written": {"schema": "autoprec.policy/1"}}
    # each is compiled for up to a minute, so one mixed policy has to do
    policies |= {f"all {recipe}": document(dict.fromkeys(names, recipe)) for recipe in recipes}
    policies[f"every second {recipes[0]}"] = document(dict.fromkeys(names[::2], recipes[0]))
    seen, said, rows = list[float](), list[float](), list[str]()
    figures: dict[str, Any] = {"label": cost.label, "rows": []}
    for name, policy in policies.items():
        done = subject.run(steps=12, warmup=4, policy=policy)
        if not done.ok:
            rows.append(f"| {name} | {done.status}: {done.reason[:60]} | | |")
            continue
        plans = resolve(policy_from_dict(policy), names, strict=False)
        seen.append(step_time(done.step_ms, done.warmup))
        said.append(cost.estimate(plans).time_ms)
        figures["rows"].append({"policy": name, "measured_ms": seen[-1], "modelled_ms": said[-1]})
        kept.put("times", figures)
        doubt = f" ({done.unreliable})" if done.unreliable else ""
        rows.append(f"| {name}{doubt} | {seen[-1]:.2f} | {said[-1]:.2f} | {said[-1] / seen[-1] - 1:+.1%} |")
    off = np.abs(np.asarray(said) / np.asarray(seen) - 1) if seen else np.asarray([float("nan")])
    return [
        f"Cost model: {cost.label}.",
        f"Error: median {np.median(off):.1%}, largest {off.max():.1%}; "
        f"rank correlation {rank_correlation(seen, said):.3f}.",
        "",
        "| policy | measured ms | modelled ms | error |",
        "|---|---|---|---|",
        *rows,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="emulated against native, modelled against measured")
    parser.add_argument("--model", default="")
    parser.add_argument("--recipes", default="", help=f"default: {', '.join(RECIPES)}; on a CPU {ON_CPU}")
    parser.add_argument("--backends", default="", help="default: native,torchao,transformer_engine; on a CPU native")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="default: %(default)s")
    parser.add_argument("--curve-steps", type=int, default=CURVE_STEPS)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--answers", type=Path, default=None, help="where answers are kept; default: beside FILE")
    asked = parser.parse_args()
    import torch

    gpu = torch.cuda.is_available()
    recipes = asked.recipes.split(",") if asked.recipes else RECIPES if gpu else (ON_CPU,)
    backends = (asked.backends or ("native,torchao,transformer_engine" if gpu else "native")).split(",")
    model = asked.model or ("gpt2-124m" if gpu else "tiny")
    words = [str(TRAIN), "--model", model, "--precision", "bf16", "--steps", "100000"]
    words += ["--compile"] if torch.cuda.is_available() else []  # what FP8 is judged by on a GPU
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        TrialRunner(ScriptCommand.parse(words), run_dir=Path(folder)) as runner,
    ):
        info = runner.start()
        answers = asked.answers or (Path(folder) if asked.out is None else asked.out.with_suffix(""))
        subject = Subject(runner, None if info.launch == "fork" else 0, Parts(answers))
        kept = Kept(answers / FIGURES_FILE)
        graph = GraphReport.from_json(subject.run(kind="record", steps=1).payload["graph"])
        names = [layer.name for layer in graph.tunable]
        lines = [f"## {model} on {info.device}, torch {torch.__version__}", ""]
        if not gpu:
            lines += [
                "No GPU: a rehearsal. FP8 products of a CPU are real and slow, so only numerics mean anything.",
                "",
            ]
        told = 0
        for section in asked.sections.split(","):
            if section == "gradients":
                lines += ["### Gradient errors, emulated against the device's own products", ""]
                lines += gradient_table(subject, graph, recipes, backends, kept)
            elif section == "times":
                lines += ["### Step times", ""]
                lines += time_table(subject, graph, info, recipes, kept)
            else:
                lines += ["### Loss curves", ""]
                lines += curve_table(subject, names, recipes, backends, asked.curve_steps)
            lines.append("")
            print("\n".join(lines[told:]), flush=True)  # what is known if the rest takes too long
            told = len(lines)
    if asked.out is not None:
        asked.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
