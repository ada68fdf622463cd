"""Lightning Fabric under a policy: python fabric_loop.py policy.yaml."""

import sys

import torch
from lightning.fabric import Fabric
from toy import batches, make_model

from autoprec.integrations.lightning import PolicyFabricPrecision

plugin = PolicyFabricPrecision(sys.argv[1])
fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)

for x, y in batches(60):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()

print(f"loss {loss.item():.4f}; executed as asked: {plugin.policy.audit(model.module).ok}")
