"""Makes a folder per run, goes there, and writes everything relative to it, as Hydra does."""

import json
import os
from pathlib import Path

import torch
from torch import nn

os.makedirs("outputs/run", exist_ok=True)
Path("outputs/run/config.json").write_text(json.dumps({"lr": 0.01}))
os.chdir("outputs/run")
rate = json.loads(Path("config.json").read_text())["lr"]
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=rate)

for step in range(30):
    x = torch.randn(32, 16)
    loss = (model(x) - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with open("log.csv", "a") as file:
        file.write(f"{step},{loss.item()}\n")
assert len(Path("log.csv").read_text().splitlines()) >= 30
os.rename("log.csv", "log.done.csv")
