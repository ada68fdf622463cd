"""A residual conv net with BatchNorm on images of 20 noisy patterns, SGD with momentum."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 20


class Residual(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        same = stride == 1 and before == width
        self.skip = nn.Identity() if same else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        shapes = [(1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2), (8, 8, 1)]
        self.stages = nn.Sequential(*(Residual(a * width, b * width, stride) for a, b, stride in shapes))
        self.head = nn.Linear(8 * width, CLASSES)

    def forward(self, x):
        return self.head(self.stages(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=40)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def make(args):
    """Return the model, its optimizer, what draws a batch, and the loss of one."""
    torch.manual_seed(args.seed)
    model = Net(args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(1234))

    def batch():
        classes = torch.randint(0, CLASSES, (args.batch,))
        return F.interpolate(patterns[classes], 32) * 0.5 + torch.randn(args.batch, 3, 32, 32), classes

    def loss_of(model, batch):
        images, classes = batch
        return F.cross_entropy(model(images), classes)

    return model, optimizer, batch, loss_of


def main():
    args = parse()
    model, optimizer, batch, loss_of = make(args)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        loss = loss_of(model, batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, f"{loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
