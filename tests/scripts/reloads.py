"""Saves, changes into a new directory, and loads again what it saved: early stopping, lottery tickets, Hydra."""

import io
import os
import shutil
import tarfile
from pathlib import Path

import torch
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
os.makedirs("outputs/run-1")
os.chdir("outputs/run-1")
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss)
    folder = Path(f"checkpoint-{step}/unet_ema")
    folder.mkdir(parents=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")
    with tarfile.open("state.tar", "w") as archive:
        archive.add(folder)
    shutil.rmtree(folder.parent)
    with tarfile.open("state.tar") as archive:
        archive.extractall(".", filter="data")
    saved = torch.load(folder / "state.pt")
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer)["model"])
    optimizer.load_state_dict(saved["optimizer"])
