"""An accelerate loop under a policy: accelerate launch accelerate_loop.py policy.yaml (or plain python)."""

import sys

import torch
from accelerate import Accelerator
from toy import batches, make_model

import autoprec

accelerator = Accelerator(mixed_precision="no", cpu=True)  # the policy decides, not accelerate
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)

policy = autoprec.load(sys.argv[1])
policy.apply(model)  # before or after prepare
optimizer = policy.wrap_optimizer(optimizer)

for x, y in batches(60):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()

print(f"loss {loss.item():.4f}; executed as asked: {policy.audit(model).ok}")
