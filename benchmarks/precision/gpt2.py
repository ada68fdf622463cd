"""A GPT-2 of 124M parameters with random weights, by transformers, that trains for some steps on random tokens.

    python benchmarks/precision/gpt2.py bf16|autocast|fp32 [BATCH] [TOKENS]

``bf16`` casts the model, ``autocast`` leaves it in FP32 and runs its forward under bf16 autocast.
"""

import contextlib
import sys

import torch
import transformers

dtype, batch, tokens = (*sys.argv[1:], *("bf16", "1", "128")[len(sys.argv) - 1 :])
torch.manual_seed(0)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).train()
if dtype == "bf16":
    model = model.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for _ in range(4):
    ids = torch.randint(0, 50257, (int(batch), int(tokens)))
    with torch.autocast("cpu", torch.bfloat16) if dtype == "autocast" else contextlib.nullcontext():
        loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
