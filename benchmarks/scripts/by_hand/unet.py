"""A small diffusion UNet (GroupNorm, SiLU, attention at the bottom) that learns the noise added to synthetic images."""

import math

import torch
from task import Task
from torch import nn
from torch.nn import functional as F

LEVELS = 1000  # of noise
WIDTH, BATCH, SIZE = 32, 8, 32  # size of an image: a multiple of 8


class Residual(nn.Module):
    def __init__(self, before, width, embedding):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, before), nn.Conv2d(before, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(embedding, width)
        self.skip = nn.Conv2d(before, width, 1) if before != width else nn.Identity()

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(8, width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, width, height, across = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        qkv = self.qkv(tokens).view(batch, height * across, 3, self.heads, width // self.heads)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2)
        return x + self.proj(mixed.reshape_as(tokens)).transpose(1, 2).reshape_as(x)


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        widths, embedding = [width, 2 * width, 4 * width], 4 * width
        self.width, self.stem = width, nn.Conv2d(3, width, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        pairs = list(zip([width, *widths[:-1]], widths, strict=True))
        self.down = nn.ModuleList(Residual(before, after, embedding) for before, after in pairs)
        self.middle, self.attention = Residual(widths[-1], widths[-1], embedding), Attention(widths[-1])
        self.up = nn.ModuleList(Residual(2 * after, before, embedding) for before, after in reversed(pairs))
        self.norm, self.head = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, level):
        waves = torch.exp(-math.log(1e4) * torch.arange(self.width // 2) / (self.width // 2))
        angles = level[:, None].float() * waves
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, skips = self.stem(x), []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.attention(self.middle(x, time))
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1), time)
        return self.head(F.silu(self.norm(x)))


def make():
    """Return what is trained, and on what."""
    model = UNet(WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    kept = torch.cos(torch.linspace(0, math.pi / 2, LEVELS + 1)[1:-1]) ** 2  # cosine schedule
    grid = torch.linspace(-1, 1, SIZE)

    def batch():
        """Draw blobs of random place, width and colour; their noise levels; and the noise."""
        place, width = torch.rand(2, BATCH, 1, 1) * 1.2 - 0.6, torch.rand(BATCH, 1, 1) * 0.3 + 0.1
        away = (grid[:, None] - place[0]) ** 2 + (grid[None, :] - place[1]) ** 2
        images = torch.exp(-away / width**2)[:, None] * torch.randn(BATCH, 3, 1, 1)
        return images, torch.randint(len(kept), (BATCH,)), torch.randn_like(images)

    def loss_of(model, batch):
        images, level, noise = batch
        share = kept[level][:, None, None, None]
        return F.mse_loss(model(share.sqrt() * images + (1 - share).sqrt() * noise, level), noise)

    return Task(model, optimizer, batch, loss_of)
