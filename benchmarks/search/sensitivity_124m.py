"""Sensitivity table of a model of GPT-2's size (124M parameters, 49 layers) under six recipes, on a CPU.

    python benchmarks/search/sensitivity_124m.py      # forward and backward passes, seconds, and the check of the table

Random weights, 32 random tokens a step: what counts here is what the scan costs, and that squares of errors add. About
six seconds of CPU per pass, and 5 GB.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
torch.set_num_threads(1)
model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(40):
    tokens = torch.randint(50257, (1, 32))
    loss = model(tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, float(loss))
"""
SPACE = """
schema: autoprec.space/1
name: six-recipes
baseline: bf16
choices:
  - match: "*"
    choices: [bf16, fp8_rowwise, fp8_tensorwise, mxfp8, nvfp4_plain, {recipe: fp8_rowwise, gemms: {wgrad: bf16}}]
"""


def main() -> None:
    """Run ``autoprec inspect --sensitivity`` on it, and print what it took."""
    with tempfile.TemporaryDirectory() as folder:
        script, space = Path(folder, "train.py"), Path(folder, "space.yaml")
        script.write_text(SCRIPT)
        space.write_text(SPACE)
        command = [sys.executable, "-m", "autoprec", "inspect", "--sensitivity", "--json"]
        began = time.monotonic()
        done = subprocess.run(
            [*command, "--target", "b200", "--space", str(space), str(script)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            cwd=folder,
        )
        table = json.loads(done.stdout)
        fit, measured = table["misfit"], sum(map(sum, table["measured"]))
        print(f"{len(table['groups'])} groups x {len(table['choices'])} recipes: {len(table['rows'])} numbers")
        print(f"{table['passes']} forward and backward passes, {time.monotonic() - began:.0f} s")
        print(f"{measured} numbers measured singly, the others shared out of measured sums")
        print(f"measured / predicted error of {fit['count']} mixes: {fit['ratio']:.2f}, within {fit['spread']:.2f}")
        print(f"gradient noise {table['noise']:.3f}")


if __name__ == "__main__":
    main()
