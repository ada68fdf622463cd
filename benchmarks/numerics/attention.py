"""Torch's attention on this CPU over the same written out (``implementation: {attention: unfused}``).

    python benchmarks/numerics/attention.py

Forward and backward, four heads, 2,048 tokens in all, one thread, CPU time: medians of seven turns.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoprec.applying.around.unfused import unfused_attention

torch.set_num_threads(1)
print("dtype     tokens  width   causal: kernel  written out       full: kernel  written out")
for dtype in (torch.bfloat16, torch.float32):
    for tokens in (64, 128, 256, 512, 1024):
        for width in (32, 64, 128):
            cells = ""
            for causal in (True, False):
                q, k, v = torch.randn(3, 2048 // tokens, 4, tokens, width, dtype=dtype).requires_grad_().unbind()
                ways, took = (F.scaled_dot_product_attention, unfused_attention), ([], [])
                for _ in range(7):
                    for attend, ms in zip(ways, took, strict=True):
                        began = time.process_time()
                        attend(q, k, v, is_causal=causal).sum().backward(retain_graph=True)
                        ms.append((time.process_time() - began) * 1e3)
                kernel, written = (statistics.median(ms[1:]) for ms in took)
                cells += f"{kernel:10.1f} ms {written:8.1f} ms {kernel / written:5.2f}x"
            print(f"{str(dtype)[6:]:10}{tokens:6}{width:7} {cells}", flush=True)
