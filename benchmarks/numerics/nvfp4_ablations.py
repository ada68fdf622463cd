"""The ablations of the NVFP4 paper (arXiv 2509.25149, appendix D) on a GPT of this machine's size, emulated.

    python benchmarks/numerics/nvfp4_ablations.py --steps 100 --seeds 3 --out FILE.json
    python benchmarks/numerics/nvfp4_ablations.py --out FILE.json --table

The paper says: most of the loss gap comes from the forward; fprop in bf16 for the last 18 % of the run removes most of
it, dgrad and wgrad alone nothing; the last blocks are worth keeping, the first alone are not. Here each GEMM is taken
back to bf16 at equal cost (one of three GEMMs in every layer; as many blocks at one end as at the other). Runs of one
seed share weights, batches and learning rates; a gap is that to bf16 of the same seed, in the training loss over the
last tenth of the run and in the loss of the final weights on text that was not trained on, both without a policy.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from autoprec.applying.policy import apply_policy, remove_policy
from autoprec.policy import policy_from_dict
from autoprec.precision.recipes import BUILTIN_RECIPES
from benchmarks.numerics.paired_runs import Batches, Row, held_out, run, table, train
from examples.train_gpt import GPT, read_text

WIDTH, DEPTH, HEADS, CONTEXT, BATCH, RATE = 64, 6, 4, 64, 4, 4e-3
#: Of the run: where the paper's tail begins.
TAIL = 0.82


def _policy(gemms: dict[str, str], kept: tuple[int, ...] = (), tail: dict[str, str] | None = None) -> dict[str, Any]:
    """NVFP4 in every block but ``kept``, single GEMMs in bf16, others in the tail; the head in bf16."""

    def rules(overrides: dict[str, str]) -> list[dict[str, Any]]:
        own = [{"match": f"blocks.{block}.*", "recipe": "bf16"} for block in kept]
        low = {"match": "blocks.*", "recipe": "nvfp4", "gemms": overrides}
        return [*own, {"match": "head", "recipe": "bf16"}, low]

    recipes = {name: BUILTIN_RECIPES[name].to_dict() for name in ("bf16", "nvfp4")}
    document = {"schema": "autoprec.policy/1", "recipes": recipes, "layers": rules(gemms), "activations": "bf16"}
    return document | ({"phases": [{"from": TAIL, "layers": rules(tail)}]} if tail else {})


BF16 = {"schema": "autoprec.policy/1", "activations": "bf16"}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "nvfp4": _policy({}),
    "fprop bf16": _policy({"fprop": "bf16"}),
    "dgrad bf16": _policy({"dgrad": "bf16"}),
    "wgrad bf16": _policy({"wgrad": "bf16"}),
    "last block bf16": _policy({}, kept=(DEPTH - 1,)),
    "first block bf16": _policy({}, kept=(0,)),
    "tail: fprop bf16": _policy({}, tail={"fprop": "bf16"}),
    "tail: dgrad, wgrad bf16": _policy({}, tail={"dgrad": "bf16", "wgrad": "bf16"}),
}


def trained(name: str, seed: int, steps: int, batches: Batches) -> Row:
    """Train one run; return its training loss over the last part and the held-out loss of its weights, in nats."""
    torch.manual_seed(seed)
    model, began = GPT(WIDTH, DEPTH, HEADS, CONTEXT), time.monotonic()
    apply_policy(policy_from_dict(VARIANTS[name]), model, run_steps=steps)
    loss = train(model, batches, seed, steps, RATE)
    remove_policy(model)
    return {"train": loss, "held_out": held_out(model, batches, 32), "s": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="runs; those that it has are not done again")
    parser.add_argument("--table", action="store_true", help="print the table of what is there, train nothing")
    args = parser.parse_args()
    batches = Batches(read_text(1_000_000), BATCH, CONTEXT)
    first = ("bf16", "nvfp4", "fprop bf16", "wgrad bf16")  # what the question is about, of all seeds
    order = sorted(VARIANTS, key=lambda name: name not in first)
    todo = [(seed, name) for part in (order[:4], order[4:]) for seed in range(args.seeds) for name in part]
    one = functools.partial(trained, steps=args.steps, batches=batches)
    rows = run(args.out, [] if args.table else todo, args.steps, one, "s")
    print(table(rows, VARIANTS, "bf16", "variant"))


if __name__ == "__main__":
    main()
