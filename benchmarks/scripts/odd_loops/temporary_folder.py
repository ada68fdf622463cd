"""Data unpacked into a temporary folder that goes when the script does; each batch is removed once it was used."""

import os
import tempfile
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(0)
with tempfile.TemporaryDirectory(prefix="unpacked-") as folder:
    for step in range(40):
        torch.save(torch.randn(8, 16), f"{folder}/{step}.pt")
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        x = torch.load(f"{folder}/{step}.pt")
        os.remove(f"{folder}/{step}.pt")
        if Path(folder, "marker").exists():
            raise RuntimeError("another run was here")
        Path(folder, "marker").touch()
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        os.remove(f"{folder}/marker")
        print(f"step {step} loss {loss.item():.6f}", flush=True)
        if step == 3 and os.path.exists(os.environ.get("FAIL_IF_THERE", "")):
            raise RuntimeError("this run fails")
