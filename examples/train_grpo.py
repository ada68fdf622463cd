"""Reinforcement learning with both of its sides: a tiny GPT learns to copy digits by GRPO, from checked rewards.

    python examples/train_grpo.py --steps 300

The copy that generates runs as a rollout engine does: token by token, with cached keys and values, its weights in one
dtype and written over before every batch. The model that trains sees whole sequences. Equal weights, other arithmetic:
the ratio of their probabilities, which GRPO multiplies gradients by, is not 1.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import autoprec

DIGITS, LENGTH = 10, 5  # a prompt, a separator, and the same digits again
GROUP, PROMPTS = 16, 8


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, cache=None):
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = (torch.cat([*held, new], 2) for held, new in zip(cache.get(self, ((), ())), (k, v), strict=True))
            cache[self] = (k,), (v,)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.proj(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, cache=None):
        x = x + self.attn(self.norm1(x), cache)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width=128, depth=3, heads=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(DIGITS + 1, width), nn.Embedding(2 * LENGTH + 1, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, DIGITS, bias=False)

    def forward(self, tokens, cache=None):
        begin = 0 if cache is None else cache.setdefault("length", 0)
        x = self.tokens(tokens) + self.positions(torch.arange(begin, begin + tokens.shape[1]))
        for block in self.blocks:
            x = block(x, cache)
        if cache is not None:
            cache["length"] += tokens.shape[1]
        return self.head(self.norm(x))


class Rollout(GPT):
    """The copy that generates; called with whole sequences it gives the logits of decoding them."""

    def forward(self, tokens, cache=None):
        if cache is not None:
            return super().forward(tokens, cache)
        cache = {}
        return torch.cat([super(Rollout, self).forward(token, cache) for token in tokens.split(1, 1)], 1)

    @torch.no_grad()
    def generate(self, prompts):
        """Return whole sequences and the logits of their answers, in float32."""
        cache, tokens, found = {}, prompts, []
        for step in range(prompts.shape[1] + LENGTH - 1):
            logits = self(tokens[:, step : step + 1], cache)[:, -1].float()
            if step >= prompts.shape[1] - 1:
                found.append(logits)
                tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
        return tokens, torch.stack(found, 1)


def train(seed=0, steps=300, lr=1e-3, policy=None, dtype=torch.float32, tell=lambda *_: None):
    """Train; ``tell`` gets the step, the mean reward, and the logits of the answers by rollout and by training."""
    torch.manual_seed(seed)
    model = GPT()
    rollout = Rollout().eval().requires_grad_(False).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    autoprec.register(policy=model, rollout=rollout)
    if policy is not None:
        policy.apply(model)
        policy.wrap_optimizer(optimizer)
    for step in range(steps):
        rollout.load_state_dict(model.state_dict())
        digits = torch.randint(DIGITS, (PROMPTS, LENGTH)).repeat_interleave(GROUP, 0)
        tokens, ours = rollout.generate(F.pad(digits, (0, 1), value=DIGITS))
        answers = tokens[:, LENGTH + 1 :]
        reward = (answers == digits).float().mean(1)
        of_group = reward.view(PROMPTS, GROUP)
        advantage = (of_group - of_group.mean(1, keepdim=True)) / (of_group.std(1, keepdim=True) + 1e-4)
        theirs = model(tokens[:, :-1])[:, LENGTH:].float()
        chosen = [one.log_softmax(-1).gather(2, answers[..., None])[..., 0] for one in (theirs, ours)]
        ratio, weight = (chosen[0] - chosen[1]).exp(), advantage.view(-1, 1)
        loss = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(step, float(reward.mean()), ours, theirs.detach())
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollout-dtype", default="bfloat16", help="of the copy that generates")
    args = parser.parse_args()

    def tell(step, reward, ours, theirs):
        if step % 20 == 0 or step == args.steps - 1:
            p, q = ours.log_softmax(-1), theirs.log_softmax(-1)
            print(f"step {step:4d}  reward {reward:.3f}  mismatch {float((p.exp() * (p - q)).sum(-1).mean()):.2e}")

    train(args.seed, args.steps, args.lr, dtype=getattr(torch, args.rollout_dtype), tell=tell)


if __name__ == "__main__":
    main()
