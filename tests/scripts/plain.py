"""A plain loop: AdamW, clipping, a scheduler, an evaluation first, prints every loss."""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=64)
args = parser.parse_args()

torch.manual_seed(1)


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(3)
        )
        self.drop = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + self.drop(block(h))
        return self.head(self.norm(h))


model = Net(args.width)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
data = torch.randint(0, 50, (4000,))


def batch():
    at = torch.randint(0, len(data) - 33, (8,))
    return torch.stack([data[i : i + 32] for i in at]), torch.stack([data[i + 1 : i + 33] for i in at])


model.eval()
with torch.no_grad():
    model(batch()[0])
model.train()

clock = 0.0
for step in range(args.steps):
    if step == 10:
        clock = time.process_time()
    x, y = batch()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
if args.steps > 20:
    print(f"cpu_ms_per_step {(time.process_time() - clock) * 1e3 / (args.steps - 10):.4f}")
