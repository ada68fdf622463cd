"""Two models, two optimizers: the discriminator's step has two backwards, the generator's one."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)
G = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
D = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3)
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3)
for step in range(60):
    real, noise = torch.randn(8, 16), torch.randn(8, 8)
    opt_d.zero_grad()
    d_real = F.binary_cross_entropy_with_logits(D(real), torch.ones(8, 1))
    d_real.backward()
    fake = G(noise)
    d_fake = F.binary_cross_entropy_with_logits(D(fake.detach()), torch.zeros(8, 1))
    d_fake.backward()
    opt_d.step()
    opt_g.zero_grad()
    g_loss = F.binary_cross_entropy_with_logits(D(fake), torch.ones(8, 1))
    g_loss.backward()
    opt_g.step()
    print(f"step {step} loss {(d_real + d_fake + g_loss).item():.6f}", flush=True)
