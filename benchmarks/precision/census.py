"""The census of a step beside hooks of the script's own, on small transformers models, randomly initialised.

    python -m benchmarks.precision.census [FAMILY ...] [--out benchmarks/results/<date>_census.md]

A row is one model. Rows (kind, name, dtype, shape) of parameters, buffers, gradients and optimizer state have to be the
same, each; of copies of the weights dtype and shape, of logits, loss, clipping norm and the inputs of top-k the dtypes.
Seconds are CPU time, imports apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter
from datetime import datetime
from pathlib import Path

from autoprec.graph.census import Judged
from benchmarks.precision.running import judged

SCRIPT = Path(__file__).with_name("tiny_transformer.py")
#: Family, dtype of its parameters, optimizer, and how else the script differs.
MODELS: tuple[tuple[str, ...], ...] = (
    ("llama", "fp32", "adamw"), ("llama", "bf16", "adamw", "clipped"), ("llama", "bf16", "adamw", "loaded"),
    ("qwen2", "bf16", "sgd"), ("qwen3", "autocast", "adamw", "averaged"), ("mistral", "fp16", "amsgrad"),
    ("gpt2", "fp32", "amsgrad", "clipped"), ("gpt2", "bf16", "plain"), ("gpt_neox", "bf16", "adamw"),
    ("gptj", "autocast", "adamw"), ("opt", "bf16", "rmsprop"), ("bloom", "bf16", "adamw", "loaded"),
    ("falcon", "fp32", "adafactor"), ("phi", "bf16", "adamw", "averaged"), ("phi3", "bf16", "adafactor"),
    ("stablelm", "autocast", "sgd", "clipped"), ("starcoder2", "fp32", "rmsprop"), ("gemma", "bf16", "adamw"),
    ("gemma2", "bf16", "adamw", "clipped"), ("gemma3_text", "autocast", "adamw"), ("cohere", "bf16", "adamw"),
    ("olmo2", "fp32", "plain"), ("granite", "fp16", "sgd"), ("glm4", "bf16", "adamw"), ("smollm3", "bf16", "amsgrad"),
    ("mixtral", "bf16", "adamw"), ("qwen3_moe", "autocast", "adamw"), ("granitemoe", "bf16", "sgd"),
    ("deepseek_v3", "bf16", "adamw", "loaded"), ("t5", "fp16", "amsgrad", "loaded"),
)  # fmt: skip
#: Kinds of which every row has to be the same, and of which the dtypes.
ROWS, DTYPES = (
    ("parameter", "buffer", "gradient", "optimizer state"),
    ("logits", "loss", "clipping norm", "top-k input"),
)

#: A copy that has no name of its own: of each dtype and shape there have to be as many.
COPY = "copy of the weights"


def differences(found: Judged, truth: list[list[object]]) -> list[str]:
    """Return in what a census and the script's own count differ."""
    out = []
    for kind in ROWS:
        ours = Counter((row.name, row.dtype, tuple(row.shape)) for row in found.census if row.kind == kind)
        theirs = Counter((str(row[1]), str(row[2]), tuple(row[3])) for row in truth if row[0] == kind)  # type: ignore[call-overload]
        out += [
            f"{kind} {row}: {ours[row]} times, not {theirs[row]}" for row in ours | theirs if ours[row] != theirs[row]
        ]
    copies = Counter((row.dtype, tuple(row.shape)) for row in found.census if row.kind == COPY)
    kept = Counter((str(row[2]), tuple(row[3])) for row in truth if row[0] == COPY)  # type: ignore[call-overload]
    out += [f"{COPY} {row}: {copies[row]} times, not {kept[row]}" for row in copies | kept if copies[row] != kept[row]]
    for kind in DTYPES:
        dtypes = {row.dtype for row in found.census if row.kind == kind}
        real = {str(row[2]) for row in truth if row[0] == kind}
        out += [f"{kind}: {sorted(dtypes)}, not {sorted(real)}"] if dtypes != real else []
    return out


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="default: all")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    lines, equal, slowest, count = [], 0, 0.0, 0
    for family, dtype, optimizer, *more in MODELS:
        if asked.families and family not in asked.families:
            continue
        with tempfile.TemporaryDirectory() as folder:
            out, began = Path(folder) / "truth.json", time.process_time()
            found = judged(SCRIPT, (family, dtype, optimizer, str(out), *more)).judged
            took, truth = time.process_time() - began, json.loads(out.read_text())
        assert found is not None
        wrong = differences(found, truth)
        equal, slowest, count = equal + (not wrong), max(slowest, took), count + 1
        dtypes = Counter(row.dtype for row in found.census)
        kinds = ", ".join(f"{number} {name}" for name, number in sorted(dtypes.items()))
        cells = (family, " ".join((dtype, optimizer, *more)), kinds, "; ".join(wrong[:3]) or "equal", f"{took:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    head = [
        "# The census of a step beside hooks of the script's own",
        "",
        f"`python -m benchmarks.precision.census`; transformers {transformers.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}, one thread; CPU seconds, imports of torch and "
        f"transformers apart, on a machine with other load; {datetime.now():%Y-%m-%d}.",
        "",
        f"Equal in {equal} of {count}; the slowest takes {slowest:.1f} s.",
        "",
        "| model | parameters, optimizer | tensors by dtype | beside its own hooks | seconds |",
        "|---|---|---|---|--:|",
    ]
    print("\n" + head[4])
    if asked.out:
        asked.out.write_text("\n".join([*head, *lines]) + "\n")
    sys.exit(equal != count)


if __name__ == "__main__":
    main()
