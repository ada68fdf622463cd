"""Weights in shared memory, trained by this process and, at the end, by two others (Hogwild)."""

import torch
import torch.multiprocessing as mp
from torch import nn


def train(model: nn.Module, seed: int, steps: int) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(seed, step, loss.item(), flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    model.share_memory()
    train(model, 0, 20)
    mp.set_start_method("spawn")
    others = [mp.Process(target=train, args=(model, seed, 10)) for seed in (1, 2)]
    for other in others:
        other.start()
    for other in others:
        other.join()
