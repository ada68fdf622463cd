"""The second five minutes on a GPU: a search there, what its policy is worth, and what the emulation was worth.

    python benchmarks/gpu/second.py [--limit 290] [--out DIR] [--bundle gpu-bundle]
    python benchmarks/gpu/second.py --small      the same path on a CPU with tiny models: not the figures

1. ``autoprec search --budget 150s`` of a Llama of 0.5B that compiles itself; then its policy beside bf16 and torchao.
2. Gradient errors of the native backend beside the emulated ones, recipe by recipe.
3. An eager script of four micro-batches: bf16, native, native with its blocks compiled, Transformer Engine.

Run ``first.py`` before. Nothing is downloaded; rows are written as they come; the dated table is
``benchmarks/results/<date>_gpu_second.md``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.session import Part, Session  # noqa: E402

RECIPES = ("fp8_tensorwise", "fp8_rowwise", "fp8_delayed")
SEARCHED = {"model": "llama-0.5b", "compiled": True}
EAGER = Part(
    "Llama of 0.5B, eager, four micro-batches a step",
    ("bf16", "native-fp8_rowwise", "native-fp8_rowwise-blocks", "te-delayed"),
    {"model": "llama-0.5b", "compiled": False, "micro_batches": 4}, small="tiny-llama", bytes_each=20e9, share=1.0,
)  # fmt: skip


def search(session: Session) -> Path | None:
    """Search the Llama that compiles itself, for at most 150 s; return its policy's file, None without an answer."""
    small, policy = session.small, session.out / "policy.yaml"
    budget = min(150.0, 0.5 * session.left())
    script = ["benchmarks/gpu/train_transformer.py", "--model", "tiny-llama" if small else "llama-0.5b", "--compile"]
    command = [sys.executable, "-m", "autoprec", "search", "--budget", f"{budget:.0f}s", "--no-mlflow", "--json"]
    command += ["--output", str(policy), *script, "--precision", "bf16", "--steps", "100000"]
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    with (session.out / "search.log").open("w") as log:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, timeout=1.3 * budget
            )
        except subprocess.TimeoutExpired:
            session.say(f"search: not done {1.3 * budget:.0f} s after its start, for a budget of {budget:.0f} s")
            return None
    if done.returncode:
        session.say(f"search: exit {done.returncode}; its log is {log.name}")
        return None
    answer = json.loads(done.stdout)
    (session.out / "search.json").write_text(done.stdout)
    session.say(
        f"search: {time.monotonic() - began:.0f} s for a budget of {budget:.0f} s; {answer['verdict']}: "
        f"{answer['reason']} ({answer['trials']['complete']} trials)"
    )
    return policy if answer["verdict"] == "adopt" else None


def gradient_errors(*, small: bool) -> list[str]:
    """Return a table: each recipe's relative gradient error by the native backend, and emulated, on two blocks."""
    import torch

    import autoprec
    from benchmarks.gpu.contender import policy_of
    from benchmarks.gpu.train_transformer import Block, Shape

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Shape(64, 2, 2, 32, 2, 0) if small else Shape(1024, 2, 8, 512, 2, 0)

    def gradient(policy: autoprec.Policy | None, backend: str = "auto") -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[Block(shape, causal=True) for _ in range(shape.depth)]).to(device)  # type: ignore[no-untyped-call]
        if policy is not None:
            policy.apply(model, backend=backend)
        x = torch.randn(shape.batch, shape.context, shape.width, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=policy is not None):
            out = model(x)
        out.float().square().mean().backward()
        return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])

    exact = gradient(None)
    lines = ["| recipe | native | emulated | native / emulated |", "|---|--:|--:|--:|"]
    for recipe in RECIPES:
        policy, errors = policy_of(f"native-{recipe}"), {}
        for backend in ("native", "emulated"):
            try:
                errors[backend] = float((gradient(policy, backend) - exact).norm() / exact.norm())
            except Exception as error:  # what one device cannot run is told, the others go on
                errors[backend] = float("nan")
                lines.append(f"| {recipe}, {backend} | {type(error).__name__}: {str(error).splitlines()[0][:80]} | | |")
        native, emulated = errors["native"], errors["emulated"]
        lines.append(f"| {recipe} | {100 * native:.3f} % | {100 * emulated:.3f} % | {native / emulated:.3f} |")
    return lines


def main() -> None:
    """Run the three parts within the limit."""
    session = Session("second", __doc__ or "", limit=290.0)
    policy = search(session)
    names = ("bf16", "torchao-tensorwise", *([f"policy:{policy}"] if policy else []))
    title = "Llama of 0.5B, compiled: the searched policy beside what is written by hand"
    session.race(Part(title, names, SEARCHED, small="tiny-llama", bytes_each=20e9, share=0.5))
    session.table("gradient errors, native beside emulated", gradient_errors(small=session.small))
    session.race(EAGER)
    session.close()


if __name__ == "__main__":
    main()
