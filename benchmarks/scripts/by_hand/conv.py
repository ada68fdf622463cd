"""A residual conv net with BatchNorm on images of 20 noisy patterns, SGD with momentum."""

import torch
from task import Task, cosine
from torch import nn
from torch.nn import functional as F

CLASSES, WIDTH, BATCH = 20, 40, 24


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


def make():
    """Return what is trained, and on what."""
    model = Net(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(1234))

    def batch():
        classes = torch.randint(0, CLASSES, (BATCH,))
        return F.interpolate(patterns[classes], 32) * 0.5 + torch.randn(BATCH, 3, 32, 32), classes

    def loss_of(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    return Task(model, optimizer, batch, loss_of, schedule=cosine)
