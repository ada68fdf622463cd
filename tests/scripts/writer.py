"""Writes everywhere a training script writes: logs, checkpoints, configs, directories, renames, removals."""

import json
import os
import pathlib
import shutil

import torch
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
os.makedirs("out/deep", exist_ok=True)
assert os.path.isdir("out/deep")
assert "out" in os.listdir(".")
pathlib.Path("out/config.json").write_text(json.dumps({"a": 1}))
assert json.loads(pathlib.Path("out/config.json").read_text()) == {"a": 1}
with open("existing.txt", "a") as f:
    f.write("more\n")
assert open("existing.txt").read() == "precious\nmore\n"  # noqa: SIM115
os.rename("out/config.json", "out/deep/moved.json")
assert not os.path.exists("out/config.json")
assert os.path.exists("out/deep/moved.json")
if os.path.exists("old"):
    shutil.rmtree("old")
assert not os.path.exists("old")
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
log_file = open("train.log", "w")  # noqa: SIM115
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss)
    log_file.write(f"{loss.item()}\n")
    log_file.flush()
    torch.save(model.state_dict(), "model.pt")
    torch.save({"step": step}, f"out/step{step}.pt")
    with open(f"out/{step}.json", "w") as f:
        json.dump({"loss": loss.item()}, f)
    os.replace(f"out/{step}.json", "out/latest.json")
    if step == 3:
        os.remove("existing.txt")
