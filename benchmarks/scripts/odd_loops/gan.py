"""A GAN: two models, two optimizers, three backward passes per round, a latent vector kept over the run."""

import torch
from torch import nn

torch.manual_seed(11)
maker = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
judge = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
judge_optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
fixed = torch.randn(4, 8)

for step in range(30):
    real = torch.randn(32, 16).sort(1).values
    fake = maker(torch.randn(32, 8))
    judge_optimizer.zero_grad()
    criterion(judge(real), torch.ones(32, 1)).backward()
    criterion(judge(fake.detach()), torch.zeros(32, 1)).backward()
    judge_optimizer.step()
    maker_optimizer.zero_grad()
    loss = criterion(judge(fake), torch.ones(32, 1))
    loss.backward()
    maker_optimizer.step()
    if step % 10 == 0:
        maker(fixed)
    print(step, loss.item())
