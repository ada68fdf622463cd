"""Reinforcement learning in miniature: a copy of the model generates, and gets its weights every so often."""

import argparse
import contextlib
import copy
import io
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

import autoprec

parser = argparse.ArgumentParser()
parser.add_argument("--every", type=int, default=1, help="steps from one copy of the weights to the next")
parser.add_argument("--dtype", default="float32", help="of the copy")
parser.add_argument("--autocast", action="store_true", help="the copy generates under it")
parser.add_argument("--returns", default="tensor")
parser.add_argument("--wrapped", action="store_true", help="the model is inside another module, as under DDP")
parser.add_argument("--unnamed", action="store_true")
parser.add_argument("--frozen", action="store_true", help="the script has a copy that stays as it was, too")
parser.add_argument("--copies", action="store_true", help="the copy is itself copied, and saved as a whole")
args = parser.parse_args()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(32, 64), nn.Dropout(0.1)
        self.up, self.down, self.head = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 32)

    def forward(self, tokens: torch.Tensor):
        x = self.drop(self.embedding(tokens))
        logits = self.head(x + self.down(torch.relu(self.up(x))))
        if args.returns == "object":
            return SimpleNamespace(logits=logits)
        return logits.mean() if args.returns == "loss" else logits


def logits(output) -> torch.Tensor:
    return getattr(output, "logits", output)


torch.manual_seed(0)
model = Model()
rollout = copy.deepcopy(model).eval().requires_grad_(False).to(getattr(torch, args.dtype))
frozen = copy.deepcopy(model) if args.frozen else None
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model = nn.DataParallel(model) if args.wrapped else model
if not args.unnamed:
    autoprec.register(policy=model, rollout=rollout)
around = torch.autocast("cpu", dtype=torch.bfloat16) if args.autocast else contextlib.nullcontext()
for step in range(40):
    if step % args.every == 0:
        rollout.load_state_dict((model.module if args.wrapped else model).state_dict())
    tokens = torch.randint(32, (8, 6))
    with torch.no_grad(), around:
        answers = logits(rollout(tokens)).float()
    out = logits(model.forward(tokens) if args.returns == "unseen" else model(tokens))
    loss = out if out.dim() == 0 else F.cross_entropy(out.flatten(0, 1), (tokens + 1).flatten() % 32)
    if args.copies:
        torch.save(copy.deepcopy(rollout), io.BytesIO())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
