"""accelerate: prepared model, optimizer and loader, accumulation and clipping through the Accelerator."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import Net, log
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(640, 16), torch.randint(0, 10, (640,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
step, total = 0, 0.0
for x, y in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        total += loss.item() / 2
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        if accelerator.is_main_process:
            log(step, total)
        step, total = step + 1, 0.0
