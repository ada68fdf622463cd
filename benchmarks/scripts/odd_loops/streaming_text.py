"""Data sets that are read as they come: lines of an open file through a DataLoader, and blocks of a binary one."""

import random
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

STEPS, BATCH, WIDTH = 40, 8, 16
torch.manual_seed(0)
draw = random.Random(0)
with open("rows.csv", "w") as out, open("blocks.bin", "wb") as blocks:
    for _ in range(STEPS * BATCH):
        out.write(",".join(f"{draw.gauss(0, 1):.6f}" for _ in range(WIDTH)) + "\n")
        blocks.write(draw.randbytes(WIDTH))


class Lines(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        with open("rows.csv") as rows:
            for row in rows:
                yield torch.tensor([float(value) for value in row.split(",")])


model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
raw, seen = open("blocks.bin", "rb", buffering=0), open("seen.log", "w")  # noqa: SIM115
for step, x in enumerate(DataLoader(Lines(), batch_size=BATCH)):
    noise = torch.frombuffer(bytearray(raw.read(BATCH * WIDTH)), dtype=torch.uint8).float().reshape(BATCH, WIDTH) / 256
    loss = (model(x + noise) - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seen.write(f"{step}\n")
    seen.flush()
    with open("seen.log") as back:
        assert back.read() == "".join(f"{number}\n" for number in range(step + 1))
    print(f"step {step} loss {loss.item():.6f}", flush=True)
