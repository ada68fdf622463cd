"""Two optimizers over the parts of one model, three accumulated backward passes per step, a schedule, clipping."""

import torch
from torch import nn

torch.manual_seed(12)
model = nn.Sequential(nn.Embedding(64, 32), nn.Flatten(), nn.Linear(32 * 8, 64), nn.ReLU(), nn.Linear(64, 64))
slow = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
fast = torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(fast, 1e-2, total_steps=40)

for step in range(30):
    for _ in range(3):
        tokens = torch.randint(0, 64, (16, 8))
        loss = nn.functional.cross_entropy(model(tokens), tokens.sum(1) % 64) / 3
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    slow.step()
    fast.step()
    schedule.step()
    slow.zero_grad()
    fast.zero_grad()
    print(step, loss.item())
