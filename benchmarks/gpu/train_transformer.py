"""Train a GPT-2, a Llama-like model or a ViT from its configuration, as people do today; knows nothing of AutoPrec.

    python train_transformer.py --model gpt2-124m --compile --precision bf16 --steps 30

``--precision`` names what a user could choose by hand: fp32, bf16 (autocast), torchao's float8 recipes, or Transformer
Engine's. Prints one line per step and, at the end, tokens (or images) per second over the last steps and peak memory.
"""

import argparse
import contextlib
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    width: int
    depth: int
    heads: int
    context: int
    batch: int
    vocabulary: int
    llama: bool = False
    image: int = 0
    patch: int = 0


MODELS = {
    "tiny": Shape(128, 2, 4, 64, 4, 256),
    "tiny-llama": Shape(128, 2, 4, 64, 4, 256, llama=True),
    "tiny-vit": Shape(128, 2, 4, 17, 4, 10, image=32, patch=8),
    "gpt2-124m": Shape(768, 12, 12, 1024, 16, 50304),
    "llama-0.5b": Shape(2048, 8, 16, 2048, 4, 32000, llama=True),
    "llama-1.3b": Shape(2048, 24, 16, 2048, 4, 32000, llama=True),
    "vit-l": Shape(1024, 24, 16, 257, 64, 1000, image=224, patch=14),
}


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class Attention(nn.Module):
    def __init__(self, shape, causal):
        super().__init__()
        self.heads, self.causal = shape.heads, causal
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=not shape.llama)
        self.proj = nn.Linear(shape.width, shape.width, bias=not shape.llama)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self, shape):
        super().__init__()
        hidden = 4 * shape.width
        self.fc, self.proj = nn.Linear(shape.width, hidden), nn.Linear(hidden, shape.width)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class GatedMLP(nn.Module):
    def __init__(self, shape):
        super().__init__()
        hidden = (8 * shape.width // 3 + 255) // 256 * 256
        self.gate = nn.Linear(shape.width, hidden, bias=False)
        self.up = nn.Linear(shape.width, hidden, bias=False)
        self.down = nn.Linear(hidden, shape.width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape, causal):
        super().__init__()
        norm = RMSNorm if shape.llama else nn.LayerNorm
        self.norm1, self.attn = norm(shape.width), Attention(shape, causal)
        self.norm2, self.mlp = norm(shape.width), GatedMLP(shape) if shape.llama else MLP(shape)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        if shape.image:
            self.embed = nn.Linear(3 * shape.patch**2, shape.width)
            self.cls = nn.Parameter(torch.zeros(1, 1, shape.width))
        else:
            self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Parameter(torch.zeros(1, shape.context, shape.width))
        self.blocks = nn.ModuleList(Block(shape, causal=not shape.image) for _ in range(shape.depth))
        self.norm = (RMSNorm if shape.llama else nn.LayerNorm)(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x):
        if self.shape.image:
            p = self.shape.patch
            x = x.unfold(2, p, p).unfold(3, p, p).flatten(4).permute(0, 2, 3, 1, 4).flatten(1, 2).flatten(2)
            x = torch.cat([self.cls.expand(x.shape[0], -1, -1), self.embed(x)], 1)
        else:
            x = self.embed(x)
        x = x + self.position[:, : x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0] if self.shape.image else x))


def read_text():
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8).long()


def batches(shape, device, seed):
    generator = torch.Generator(device if shape.image else "cpu").manual_seed(seed)
    if shape.image:  # drawn on the device: on a CPU 64 images take as long as a step
        while True:
            labels = torch.randint(shape.vocabulary, (shape.batch,), generator=generator, device=device)
            images = torch.randn(shape.batch, 3, shape.image, shape.image, generator=generator, device=device)
            images += labels.view(-1, 1, 1, 1) / shape.vocabulary
            yield images, labels
    text, offsets = read_text(), torch.arange(shape.context + 1)
    while True:
        begin = torch.randint(len(text) - shape.context - 1, (shape.batch, 1), generator=generator)
        window = text[begin + offsets].to(device)
        yield window[:, :-1], window[:, 1:]


def convert(model, precision):
    """Apply what the user chose by hand; return the context of the forward pass."""
    if precision.startswith("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        kind = precision.removeprefix("torchao-")
        recipe = Float8LinearConfig.from_recipe_name("rowwise" if kind == "auto" else kind)
        skip = {"head"}
        if kind == "auto":
            from torchao.float8 import _auto_filter_for_recipe

            wanted = _auto_filter_for_recipe("rowwise", ["head"])
        else:
            # a side that is not a multiple of 16 (ViT's patches of 588 values) has no FP8 GEMM
            wanted = lambda module, name: (  # noqa: E731
                name not in skip and module.in_features % 16 == 0 and module.out_features % 16 == 0
            )
        convert_to_float8_training(model, module_filter_fn=wanted, config=recipe)
    if precision.startswith("te-"):
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as te_recipe

        recipes = {
            "te-delayed": te_recipe.DelayedScaling(amax_history_len=16),
            "te-current": te_recipe.Float8CurrentScaling(),
            "te-block": te_recipe.Float8BlockScaling(),
        }
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and name != "head":
                parent = model.get_submodule(name.rpartition(".")[0])
                new = te.Linear(module.in_features, module.out_features, bias=module.bias is not None)
                with torch.no_grad():
                    new.weight.copy_(module.weight)
                    if module.bias is not None:
                        new.bias.copy_(module.bias)
                setattr(parent, name.rpartition(".")[2], new)
        return lambda: te.autocast(enabled=True, recipe=recipes[precision])
    return contextlib.nullcontext


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="gpt2-124m")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    shape = MODELS[args.model]
    torch.manual_seed(args.seed)
    with torch.device(args.device):  # a billion values drawn on a CPU take half a minute, in every trial anew
        model = Transformer(shape)
    around = convert(model, args.precision)
    run = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=args.device.startswith("cuda"))
    cast = args.precision != "fp32"
    times = []
    for step, (x, y) in zip(range(args.steps), batches(shape, args.device, args.seed), strict=False):
        began = time.perf_counter()
        with torch.autocast(args.device.split(":")[0], torch.bfloat16, enabled=cast), around():
            logits = run(x)
        loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.5f}", flush=True)
        elif args.device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    median = sorted(times[len(times) // 3 :])[len(times[len(times) // 3 :]) // 2]
    items = shape.batch * (1 if shape.image else shape.context)
    memory = torch.cuda.max_memory_allocated() / 1e9 if args.device.startswith("cuda") else 0.0
    print(f"items_per_s {items / median:.1f} step_ms {1000 * median:.2f} memory_gb {memory:.2f}", flush=True)


if __name__ == "__main__":
    main()
