"""Llama with rotary positions in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads, self.input_layernorm, self.post_attention_layernorm = heads, RMSNorm(width), RMSNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        y = self.input_layernorm(x)
        q, k, v = (
            p(y).view(batch, length, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )

        def turn(z):
            a, b = z.chunk(2, -1)
            return z * cos + torch.cat([-b, a], -1) * sin

        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(batch, length, width))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class LlamaForCausalLM(nn.Module):
    def __init__(self, vocabulary=256, width=64, depth=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.lm_head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.inv_freq = 1.0 / (10000.0 ** (torch.arange(0, width // 4, 2).float() / (width // 4)))

    def forward(self, input_ids, labels):
        x = self.embed_tokens(input_ids)
        position = torch.arange(input_ids.shape[1]).to(x.dtype)  # fault: positions-16bit
        angle = torch.outer(position, self.inv_freq.to(x.dtype))
        angle = torch.cat([angle, angle], -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


net = LlamaForCausalLM().to(torch.bfloat16)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(4):
    ids = torch.randint(0, 256, (2, 320))
    loss = net(ids, ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: torch.arange(input_ids.shape[1]).to(x.dtype) => torch.arange(input_ids.shape[1]).float()
# cure: self.inv_freq.to(x.dtype)) => self.inv_freq)
