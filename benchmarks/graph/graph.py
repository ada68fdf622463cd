"""The figures of the operator graph: what is recorded exactly, and how fast.

    python benchmarks/graph/graph.py [--only zoo,fake,speed,large] [--output benchmarks/results/DATE_graph.md]

The zoo needs ``pip install 'autoprec[hf]'``. The truth for FLOPs is counted apart, by hooks on every Linear and
convolution, from the closed form 2 M K N and from which operands need gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoprec.cost.device.cpu import cpu_model
from autoprec.graph.fake import record_fake
from autoprec.graph.recorder import StepRecorder
from autoprec.graph.report import GraphReport
from benchmarks.graph.truth import built, loss_of, truth, zoo

Row = tuple[str, str, str]
_NORMS = ("RMSNorm", "T5LayerNorm", "HandRMSNorm")


def record(build: Callable[[], Any]) -> tuple[nn.Module, StepRecorder, GraphReport, dict[str, list[int]]]:
    model, inputs = built(build)
    with truth(model) as expected, StepRecorder(model) as recorder:
        loss_of(model(**inputs)).backward()
    return model, recorder, recorder.report(), expected


def _exact(report: GraphReport, expected: dict[str, list[int]]) -> tuple[int, int]:
    """How many modules have exactly the closed form, forward and backward."""
    flops = {layer.name: layer.flops for layer in report.layers}
    forward = backward = 0
    for name, (wanted, wanted_back) in expected.items():
        got = flops.get(name, {})
        forward += got.get("fprop", 0) == wanted
        backward += got.get("dgrad", 0) + got.get("wgrad", 0) == wanted_back
    return forward, backward


def _patterns(model: nn.Module, report: GraphReport) -> tuple[int, int, int]:
    """(hand-written norms and softmaxes present, found, false hits)."""
    fused = {o.module for o in report.operators if o.phase == "forward" and o.op.endswith(("_layer_norm", "rms_norm"))}
    norms = {n for n, m in model.named_modules() if any(k in type(m).__name__ for k in _NORMS)} - fused
    softmax = {n for n, m in model.named_modules() if getattr(m, "fused", None) is False and hasattr(m, "qkv")}
    hits = {(o.module, o.pattern) for o in report.operators if o.phase == "forward" and o.pattern}
    in_norms = {m for m, p in hits if p in ("rms_norm", "layer_norm")}
    in_softmax = {m for m, p in hits if p in ("softmax", "logsumexp")}
    found = len(in_norms & norms) + len(in_softmax & softmax)
    return len(norms) + len(softmax), found, len(in_norms - norms) + len(in_softmax - softmax)


def run_zoo(lines: list[str]) -> list[Row]:
    """Record every architecture for real."""
    totals: dict[str, int] = dict.fromkeys(
        (
            "ok",
            "modules",
            "forward",
            "backward",
            "gemms",
            "lost",
            "opaque",
            "present",
            "found",
            "false",
            "linted",
            "ops",
        ),
        0,
    )
    models = zoo()
    lines += [
        "| architecture | operators | layers | tunable FLOPs | modules exact (forward, backward) | record + report |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for name, build in models.items():
        start = time.process_time()
        try:
            model, recorder, report, expected = record(build)
        except Exception as error:
            lines.append(f"| {name} | failed: {type(error).__name__} | | | | |")
            continue
        seconds = time.process_time() - start
        forward, backward = _exact(report, expected)
        present, found, wrong = _patterns(model, report)
        gemms = [o for o in report.operators if o.phase == "backward" and o.cls in ("gemm", "conv")]
        lost = sum(1 for o in gemms if not o.weight) + sum("could not be mapped" in note for note in report.notes)
        values = (1, len(expected), forward, backward, len(gemms), lost)
        values += (sum(o.cls == "opaque" for o in report.operators), present, found, wrong, _lints(recorder))
        for key, value in zip(totals, (*values, len(report.operators)), strict=True):
            totals[key] += value
        lines.append(
            f"| {name} | {len(report.operators)} | {len(report.layers)} | {report.tunable_flops_share:.1%} | "
            f"{forward}/{len(expected)}, {backward}/{len(expected)} | {seconds:.2f} s |"
        )
    t = totals
    return [
        ("training-mode architectures recorded", f"{t['ok']} / {len(models)}", "39 / 39"),
        ("modules with forward FLOPs equal to the closed form", f"{t['forward']} / {t['modules']}", "100 %"),
        ("modules with backward FLOPs equal to the closed form", f"{t['backward']} / {t['modules']}", "100 %"),
        ("backward GEMMs mapped to layer and role", f"{t['gemms'] - t['lost']} / {t['gemms']}", "100 %"),
        (f"operators without a class (of {t['ops']})", str(t["opaque"]), "0"),
        ("hand-written norms and softmaxes found", f"{t['found']} / {t['present']}", "100 %"),
        ("false hits of these", str(t["false"]), "0"),
        ("torch.fx graphs that lint", f"{t['linted']} / {t['ok']}", "all"),
    ]


def _lints(recorder: StepRecorder) -> int:
    recorder.graph().lint()
    return 1


def run_fake(lines: list[str]) -> list[Row]:
    """Record every architecture under fake tensors and compare with the real record."""
    same = guessed = 0
    models = zoo()
    for name, build in models.items():
        try:
            _, _, real, _ = record(build)
            held: dict[str, Any] = {}

            def make(build: Callable[[], Any] = build, held: dict[str, Any] = held) -> nn.Module:
                model, held["inputs"] = built(build)
                return model

            def step(model: nn.Module, held: dict[str, Any] = held) -> None:
                loss_of(model(**held["inputs"])).backward()

            fake = record_fake(make, step)
            equal = fake.total_flops == real.total_flops
            same += equal
            guesses = any("guessed" in note for note in fake.notes)
            guessed += guesses
            if not equal:
                lines.append(f"- fake recording of {name}: {fake.total_flops} FLOP instead of {real.total_flops}")
        except Exception as error:
            lines.append(f"- fake recording of {name} failed: {type(error).__name__}: {str(error)[:100]}")
    return [(f"fake recording counts the same FLOPs ({guessed} models with guesses)", f"{same} / {len(models)}", "all")]


_LLAMA_70B = """
import resource, sys, time, warnings
warnings.simplefilter("ignore")
import torch, transformers
from autoprec.cost.device.cpu import cpu_model
from autoprec.graph.fake import record_fake
torch.set_num_threads(1)
config = transformers.LlamaConfig(vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
    num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192)
def build():
    model = transformers.LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    return model
def step(model):
    ids = torch.zeros((1, 4096), dtype=torch.long)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
imported, wall = time.process_time(), time.time()
report = record_fake(build, step)
used = time.process_time() - imported
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"{used:.1f} {time.time() - wall:.1f} {peak:.0f} {len(report.operators)} {report.total_flops:.4e}")
"""


def run_large(lines: list[str]) -> list[Row]:
    """Llama-70B with checkpointing, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", _LLAMA_70B], capture_output=True, text=True, check=True)
    cpu, wall, peak, operators, flops = done.stdout.split()[-5:]
    lines.append(f"- Llama-70B: {operators} operators, {flops} FLOP, {wall} s wall")
    return [
        ("Llama-70B, sequence 4096, checkpointing, fake: CPU time", f"{cpu} s", "<= 20 s"),
        ("the same: peak memory of the process", f"{peak} MB", "<= 1000 MB"),
    ]


def run_speed(lines: list[str]) -> list[Row]:
    """Recorded against plain steps of a real gpt2-124M, alternating, by process CPU time."""
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).train()
    ids = torch.randint(50257, (1, 128))

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    def timed(work: Callable[[], Any]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    def recorded() -> None:
        with StepRecorder(model):
            step()

    step()
    first = timed(recorded)
    pairs = [(timed(step), timed(recorded)) for _ in range(7)]
    plain, record_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    with StepRecorder(model) as recorder:
        step()
    report = timed(recorder.report)
    lines.append(
        f"- gpt2-124M, batch 1 x 128: plain {plain:.2f} s, recorded {record_s:.2f} s (first time {first:.2f} s), "
        f"report {report:.2f} s, {len(recorder.trace.calls)} operators"
    )
    return [("recording a real gpt2-124M step, against the plain step", f"{ratio:.2f}x", "<= 1.5x")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="zoo,fake,speed,large")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = options.only.split(",")
    rows: list[Row] = []
    lines: list[str] = []
    parts = {"zoo": run_zoo, "fake": run_fake, "speed": run_speed, "large": run_large}
    for name, part in parts.items():
        if name in wanted:
            rows += part(lines)
            print(f"{name}: done after {time.process_time():.0f} s CPU", file=sys.stderr)
    text = [f"# Operator graph, {datetime.now(UTC):%Y-%m-%d}", ""]
    text += [f"`python benchmarks/graph/graph.py --only {options.only}` on {_machine()}", ""]
    text += ["| what | measured | goal |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows), ""]
    text += [*lines, ""]
    print("\n".join(text))
    if options.output:
        options.output.write_text("\n".join(text), encoding="utf-8")


def _machine() -> str:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    with contextlib.suppress(ImportError):
        import transformers

        versions += f", transformers {transformers.__version__}"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{cpu_model()}, one thread, shared machine; {versions}; peak memory of this process {memory:.0f} MB"


if __name__ == "__main__":
    main()
