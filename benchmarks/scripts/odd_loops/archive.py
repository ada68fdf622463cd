"""Unpacks its data from an archive it makes, keeps results in SQLite and in a compressed file, and cleans up."""

import bz2
import shutil
import sqlite3
import tarfile
from pathlib import Path

import torch
from torch import nn

Path("rows.txt").write_text("\n".join(str(i % 13) for i in range(512)))
with tarfile.open("rows.tar.gz", "w:gz") as tar:
    tar.add("rows.txt")
Path("rows.txt").unlink()
with tarfile.open("rows.tar.gz") as tar:
    tar.extractall("unpacked", filter="data")
rows = torch.tensor([int(line) for line in Path("unpacked/rows.txt").read_text().split()]).float().view(32, 16)
database = sqlite3.connect("losses.db")
database.execute("create table if not exists losses (step integer, loss real)")
torch.manual_seed(15)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(30):
    loss = (model(rows / 13) - rows.flip(1) / 13).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    database.execute("insert into losses values (?, ?)", (step, loss.item()))
database.commit()
print(database.execute("select count(*), min(loss) from losses").fetchone())
with bz2.open("losses.bz2", "wt") as file:
    file.write(str(loss.item()))
shutil.rmtree("unpacked")
