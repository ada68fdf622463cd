"""The best weights are saved, read back within the run, and kept in memory too."""

import io

import torch
from torch import nn

torch.manual_seed(6)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.save(model.state_dict(), "first.pt")

for step in range(30):
    x = torch.randn(32, 16)
    loss = (model(x) - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept = io.BytesIO()
    torch.save(model.state_dict(), kept)
    kept.seek(0)
    assert torch.equal(torch.load(kept)["0.weight"], model[0].weight)
    if step % 4 == 0:
        torch.save({"step": step, "model": model.state_dict()}, "best.pt")
    if step % 7 == 6:
        model.load_state_dict(torch.load("best.pt")["model"])
    print(step, loss.item())
model.load_state_dict(torch.load("first.pt"))
