"""A data set in SQLite: a cursor that is left half read between steps, and a data set that opens its own connection."""

import sqlite3
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS, BATCH, WIDTH = 40, 8, 16
torch.manual_seed(0)
with sqlite3.connect("rows.db") as database:
    database.execute("drop table if exists rows")
    database.execute("create table rows (number integer primary key, x blob)")
    for number in range(STEPS * BATCH):
        database.execute("insert into rows values (?, ?)", (number, torch.randn(WIDTH).numpy().tobytes()))


class Rows(Dataset[torch.Tensor]):
    connection: sqlite3.Connection | None = None

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, number: int) -> torch.Tensor:
        if self.connection is None:
            self.connection = sqlite3.connect("rows.db")
        row = self.connection.execute("select x from rows where number = ?", (number,)).fetchone()
        return torch.frombuffer(bytearray(row[0]), dtype=torch.float32)


def walked():
    cursor = database.execute("select x from rows order by number")
    while rows := cursor.fetchmany(BATCH):
        yield torch.stack([torch.frombuffer(bytearray(x), dtype=torch.float32) for (x,) in rows])


model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = walked() if sys.argv[1:] == ["cursor"] else DataLoader(Rows(), batch_size=BATCH, shuffle=True)
for step, x in enumerate(loader):
    loss = (model(x) - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
