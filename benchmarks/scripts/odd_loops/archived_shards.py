"""Shards that are streamed out of archives which stay open all through: a member of a zip file, and a gzip file."""

import gzip
import random
import zipfile
from collections.abc import Iterator

import torch
from torch import nn

STEPS, BATCH, WIDTH = 40, 8, 16
torch.manual_seed(0)
draw = random.Random(0)
with zipfile.ZipFile("shards.zip", "w", zipfile.ZIP_DEFLATED) as made:
    for shard in range(4):
        made.writestr(f"{shard}.bin", draw.randbytes(STEPS // 4 * BATCH * WIDTH))
with gzip.open("targets.gz", "wb") as packed:
    packed.write(draw.randbytes(STEPS * BATCH))
archive, targets = zipfile.ZipFile("shards.zip"), gzip.open("targets.gz")  # noqa: SIM115


def batches() -> Iterator[torch.Tensor]:
    for name in archive.namelist():
        with archive.open(name) as member:
            while block := member.read(BATCH * WIDTH):
                yield torch.frombuffer(bytearray(block), dtype=torch.uint8).float().reshape(BATCH, WIDTH) / 256


model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step, x in enumerate(batches()):
    y = torch.frombuffer(bytearray(targets.read(BATCH)), dtype=torch.uint8).long() % 2
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
