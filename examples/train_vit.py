"""Train a small vision transformer on the handwritten digits that scikit-learn ships.

    python examples/train_vit.py --epochs 6

Plain PyTorch, an ordinary DataLoader and epoch loop, accuracy on held-out images at the end of each epoch.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

CLASSES, SIDE = 10, 8


class ViT(nn.Module):
    """Patches of 2x2 pixels, a learned class token, pre-norm encoder blocks."""

    def __init__(self, width, depth, heads, patch=2):
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=patch, stride=patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIDE // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.encoder(x)[:, 0]))


def load_data(batch, seed):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0 - 0.5
    labels = torch.tensor(digits.target, dtype=torch.long)
    order = torch.Generator().manual_seed(seed)
    train, test = random_split(TensorDataset(images, labels), [0.85, 0.15], generator=order)
    return DataLoader(train, batch, shuffle=True, drop_last=True, generator=order), DataLoader(test, 512)


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    hits = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in loader)
    model.train()
    return hits / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description="train a small ViT on 8x8 digits")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train, test = load_data(args.batch, args.seed)
    model = ViT(args.width, args.depth, args.heads).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train))
    objective = nn.CrossEntropyLoss(label_smoothing=0.05)
    for epoch in range(args.epochs):
        total = 0.0
        for images, labels in train:
            loss = objective(model(images.to(args.device)), labels.to(args.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        right = accuracy(model, test, args.device)
        print(f"epoch {epoch}  loss {total / len(train):.4f}  held-out accuracy {right:.3f}", flush=True)


if __name__ == "__main__":
    main()
