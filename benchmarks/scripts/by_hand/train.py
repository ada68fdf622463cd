"""One training loop for models of several kinds, as a person writes it: `python train.py conv --steps 100`."""

import argparse
import contextlib
from importlib import import_module

import torch

#: Where a model is made. Those of `libraries` need timm or transformers.
MODELS = {name: name for name in ("conv", "tab", "lstm", "unet", "moe", "dlrm", "seq2seq")}
MODELS |= dict.fromkeys(("vit", "convnext", "mixer", "bert", "gpt2", "whisper"), "libraries")


def make(name, seed=0):
    """Return the task of that name, with the random state that its training begins with."""
    module = import_module(MODELS[name])
    torch.manual_seed(seed)
    return module.make() if MODELS[name] == name else module.make(name)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--autocast", action="store_true", help="torch.autocast in bf16, as a person adds it")
    args = parser.parse_args()
    task = make(args.model, args.seed)
    rates = [group["lr"] for group in task.optimizer.param_groups]
    for step in range(args.steps):
        if task.schedule is not None:
            for group, rate in zip(task.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * task.schedule(step, args.steps)
        with torch.autocast("cpu", torch.bfloat16) if args.autocast else contextlib.nullcontext():
            loss = task.loss_of(task.model, task.batch())
        task.optimizer.zero_grad()
        loss.backward()
        if task.clip is not None:
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), task.clip)
        task.optimizer.step()
        if step % 20 == 0:
            print(step, f"{loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
