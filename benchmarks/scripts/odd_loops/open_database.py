"""A database connection and a log that are read back while training: what was written decides what comes next."""

import sqlite3
import sys

import torch
from torch import nn

torch.manual_seed(0)
if sys.argv[1:] == ["log"]:
    log = open("steps.log", "a+")  # noqa: SIM115

    def write() -> None:
        log.write("x\n")
        log.flush()

    def count() -> int:
        log.seek(0)
        return len(log.readlines())
else:
    database = sqlite3.connect("metrics.db")
    database.execute("create table if not exists steps(number)")

    def write() -> None:
        database.execute("insert into steps values (1)")
        database.commit()

    def count() -> int:
        return int(database.execute("select count(*) from steps").fetchone()[0])


model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(40):
    x = torch.randn(8, 16)
    loss = (model(x) * (1 + 0.05 * count()) - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    write()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
