"""A loop that evaluates every few steps, and says what it found with autoprec.report, wandb or mlflow."""

import argparse

import torch
import torch.nn.functional as F
from common import Net

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--every", type=int, default=4)
parser.add_argument("--breaks-at", type=int, default=0)
parser.add_argument("--by", default="autoprec")
args = parser.parse_args()


if args.by == "autoprec":
    import autoprec

    report = autoprec.report
elif args.by == "wandb":
    import wandb

    wandb.init(project="x")
    report = lambda **values: wandb.log(values, step=0)  # noqa: E731
elif args.by == "mlflow":
    import mlflow

    report = lambda **values: mlflow.log_metrics(values, step=0)  # noqa: E731
else:
    report = lambda **values: None  # noqa: E731

torch.manual_seed(1)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(64, 16), torch.randint(0, 10, (64,))
for step in range(1, args.steps + 1):
    batch = torch.randint(0, 64, (8,))
    loss = F.cross_entropy(model(x[batch]), y[batch])
    if step == args.breaks_at:
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report(train_loss=loss.detach())
    if step % args.every == 0:
        model.eval()
        with torch.no_grad():
            logits = model(x)
        model.train()
        report(eval_loss=F.cross_entropy(logits, y), accuracy=(logits.argmax(1) == y).double().mean().item())
        print(f"step {step} eval_loss {F.cross_entropy(logits, y):.6f}", flush=True)
