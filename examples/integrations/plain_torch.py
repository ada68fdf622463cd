"""A plain training loop under a policy, with the long-run guard: python plain_torch.py policy.yaml."""

import sys

import torch
from toy import batches, make_model

import autoprec

model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

policy = autoprec.load(sys.argv[1])
policy.apply(model)
optimizer = policy.wrap_optimizer(optimizer)
guard = autoprec.Guard(policy, model)

for x, y in batches(60):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    guard.step(loss, norm)

print(f"loss {loss.item():.4f}; executed as asked: {policy.audit(model).ok}; breaches: {len(guard.breaches)}")
