"""One training loop for models of several kinds, as a person writes it: `python train.py conv --steps 100`."""

import argparse
import contextlib
from importlib import import_module

import torch
from task import parts_of

#: Where a model is made. Those of `libraries` need timm or transformers.
MODELS = {name: name for name in ("conv", "tab", "lstm", "unet", "moe", "dlrm", "seq2seq", "gpt6", "muon")}
MODELS |= dict.fromkeys(("vit", "convnext", "mixer", "bert", "gpt2", "head", "whisper"), "libraries")


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
    parser.add_argument("--micro-batches", type=int, default=1, help="accumulate over so many parts of a batch")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    task = make(args.model, args.seed)
    model = torch.compile(task.model) if args.compile else task.model
    rates = [group["lr"] for group in task.optimizer.param_groups]
    for step in range(args.steps):
        if task.schedule is not None:
            for group, rate in zip(task.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * task.schedule(step, args.steps)
        task.optimizer.zero_grad()
        for part in parts_of(task.batch(), args.micro_batches) if args.micro_batches > 1 else [task.batch()]:
            with torch.autocast("cpu", torch.bfloat16) if args.autocast else contextlib.nullcontext():
                loss = task.loss_of(model, part)
            (loss / args.micro_batches).backward()
        if task.clip is not None:
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), task.clip)
        task.optimizer.step()
        if step % 20 == 0:
            print(step, f"{loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
