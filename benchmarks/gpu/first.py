"""The first five minutes on a GPU: what FP8 gains in compiled layers, and in a compiled model, beside torchao's.

    python benchmarks/gpu/first.py [--limit 290] [--out DIR] [--bundle gpu-bundle]
    python benchmarks/gpu/first.py --small      the same path on a CPU with tiny models: not the figures

1. Four blocks of width 4096, compiled one by one, forward and backward: bf16; native and torchao tensorwise with full
   and with fast accumulation in fprop; both rowwise.
2. A Llama of 1.3B, its blocks compiled: bf16, torchao tensorwise, native the same, native in the MLPs alone.

Nothing is downloaded: wheels that lie in the folder of ``make gpu-bundle`` are installed into a temporary folder.
Rows are written as they come; the dated table is ``benchmarks/results/<date>_gpu_first.md`` (``--small``: in ``DIR``).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.session import Part, Session

BLOCKS = Part(
    "four blocks of width 4096, compiled, forward and backward",
    ("bf16", "native-fp8_tensorwise-fast", "torchao-tensorwise", "native-fp8_tensorwise", "torchao-tensorwise-full",
     "native-fp8_rowwise", "torchao-rowwise"),
    {"model": "blocks", "compiled": True}, small="tiny-blocks", bytes_each=14e9, share=0.45,
)  # fmt: skip
LLAMA = Part(
    "Llama of 1.3B, compiled, AdamW, 8,192 tokens a step",
    ("bf16", "torchao-tensorwise", "native-fp8_tensorwise-fast", "native-fp8_tensorwise-fast-mlp"),
    {"model": "llama-1.3b", "compiled": True}, small="tiny-llama", bytes_each=40e9, share=1.0,
)  # fmt: skip


def main() -> None:
    """Run both parts within the limit."""
    session = Session("first", __doc__ or "", limit=290.0)
    for part in (BLOCKS, LLAMA):
        session.race(part)
    session.close()


if __name__ == "__main__":
    main()
