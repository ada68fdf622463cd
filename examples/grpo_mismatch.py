"""How far training and rollout are apart under policies for both sides, over seeds: the mismatch of train_grpo.py.

    python examples/grpo_mismatch.py --seeds 5 --policy policy.yaml

Measured on every generated token: the divergence of training's distribution from that which the token was drawn from.
bf16 runs as this CPU runs it, fp16 and FP8 are emulated: exact products of rounded operands, so that what the sides
differ by is what is rounded, in which shapes, and in which order it is summed, not a GPU's kernels. Figures of one seed
are means over its steps; tables have geometric means over seeds with 95 % intervals (Student's t of the logarithms).
"""

import argparse
import math
import statistics
import time

import torch
from train_grpo import train

import autoprec
from autoprec.precision.recipes import BUILTIN_RECIPES

#: Two-sided 95 % quantiles of Student's t, by the number of values.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
LAYERS = {"match": "blocks.*", "optional": True}


def both(dtype, recipe=""):
    """The same on both sides: 16 bits around everything, and a recipe for the layers of the blocks."""
    rules = [{**LAYERS, "recipe": recipe}] if recipe else []
    side = {"layers": rules, "activations": dtype}
    recipes = {recipe: BUILTIN_RECIPES[recipe]} if recipe else {}
    return {"recipes": recipes, **side, "rollout": {**side, "weights": dtype}}


POLICIES = {
    "bf16": both("bf16"),
    "fp16": both("fp16"),
    "FP8 tensorwise in the blocks": both("bf16", "fp8_tensorwise"),
    "MXFP8 in the blocks": both("bf16", "mxfp8"),
}


def run(policy, seed, steps):
    """Return the mean divergence, the share of flips and the reward of the last ten steps."""
    rows = []

    def tell(_step, reward, ours, theirs):
        p, q = (one.double().log_softmax(-1) for one in (ours, theirs))
        flips = (ours.argmax(-1) != theirs.argmax(-1)).double().mean()
        rows.append((float((p.exp() * (p - q)).sum(-1).mean()), float(flips), reward))

    train(seed, steps, policy=policy, tell=tell)
    kl, flips, rewards = zip(*rows, strict=True)
    return statistics.fmean(kl), statistics.fmean(flips), statistics.fmean(rewards[-10:])


def interval(values):
    """Return the geometric mean of positive values and its two-sided 95 % interval."""
    logs = [math.log(value) for value in values]
    mean, count = statistics.fmean(logs), len(logs)
    width = STUDENT[count] * statistics.stdev(logs) / math.sqrt(count)
    return math.exp(mean), math.exp(mean - width), math.exp(mean + width)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5, choices=STUDENT)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--policy", action="append", default=[], help="also a policy of a file, such as a search's")
    args = parser.parse_args()
    arms = {name: autoprec.Policy.model_validate(document) for name, document in POLICIES.items()}
    arms |= {name: autoprec.load(name) for name in args.policy}
    torch.set_num_threads(1)
    found, began = {}, (time.monotonic(), time.process_time())
    for name, policy in arms.items():
        found[name] = [run(policy, seed, args.steps) for seed in range(args.seeds)]
    took, computed = (now - then for now, then in zip((time.monotonic(), time.process_time()), began, strict=True))
    print(f"{args.seeds} seeds of {args.steps} steps: {took:.0f} s, {computed:.0f} s of them on the CPU\n")
    print("| policy of both sides | mismatch, nats per token | over bf16 | flips | reward at the end |")
    print("|---|--:|--:|--:|--:|")
    base = [kl for kl, *_ in found["bf16"]]
    for name, rows in found.items():
        kl, flips, reward = zip(*rows, strict=True)
        mismatch = "{:.2e} [{:.2e}, {:.2e}]".format(*interval(kl))
        ratio = interval([own / other for own, other in zip(kl, base, strict=True)]) if name != "bf16" else (1.0,) * 3
        over = "{:.3g} [{:.3g}, {:.3g}]".format(*ratio)
        print(f"| {name} | {mismatch} | {over} | {statistics.fmean(flips):.3%} | {statistics.fmean(reward):.2f} |")


if __name__ == "__main__":
    main()
