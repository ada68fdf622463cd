"""Train a small Llama: the proxy on which a policy for a big one is searched (docs/long_run.md).

    python examples/llama_proxy.py --steps 200
    autoprec search --target b200 --cost-scale width=64,depth=20,tokens=64 examples/llama_proxy.py
    autoprec transfer -o big.yaml policy.yaml -- train_big.py

Plain PyTorch with the module names of Hugging Face: RMSNorm, rotary positions, grouped queries, SwiGLU. Initial weights
and learning rates follow the width as in muP, so that what is measured here holds where it is wider; the same script
with ``--width 8192 --depth 80`` is the big model, which `autoprec transfer` records without its weights.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, BASE_WIDTH = 256, 128  # bytes; the width at which the learning rate was chosen


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.size = width // heads
        self.q_proj = nn.Linear(width, heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, width, bias=False)

    def forward(self, x, cos, sin):
        batch, time, _ = x.shape
        q, k, v = (
            proj(x).view(batch, time, -1, self.size).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, -1))


class MLP(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, width, heads, kv_heads, inner):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(width), Attention(width, heads, kv_heads)
        self.post_attention_layernorm, self.mlp = RMSNorm(width), MLP(width, inner)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, width, depth, heads, kv_heads, inner):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads, inner) for _ in range(depth))
        self.norm = RMSNorm(width)

    def forward(self, tokens):
        size = self.layers[0].self_attn.size
        rates = 500000.0 ** (-torch.arange(0, size, 2, device=tokens.device) / size)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * rates
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, width, depth, heads, kv_heads):
        super().__init__()
        inner = 16 * round(3.5 * width / 16)
        self.model = Decoder(width, depth, heads, kv_heads, inner)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.3 if "embed" in name else 0.5 / math.sqrt(parameter.shape[1])
                nn.init.normal_(parameter, std=std * math.sqrt(BASE_WIDTH / width) if "lm_head" in name else std)

    def forward(self, tokens, targets):
        return F.cross_entropy(self.lm_head(self.model(tokens)).flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser(description="train a small Llama on the standard library's source")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--context", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]:
        text += path.read_bytes()
    data = torch.frombuffer(text, dtype=torch.uint8).long()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Llama(args.width, args.depth, args.heads, args.kv_heads).to(device)
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    groups = [{"params": hidden, "lr": args.lr * BASE_WIDTH / args.width}, {"params": others, "lr": args.lr}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for step in range(args.steps):
        begin = torch.randint(len(data) - args.context - 1, (args.batch, 1))
        window = data[begin + torch.arange(args.context + 1)].to(device)
        loss = model(window[:, :-1], window[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
