"""A stand-in for transformers: a Llama of a configuration's sizes in plain torch, for tests of our side alone."""

from __future__ import annotations

import contextlib
import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["LLAMA_8B", "install"]

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


class Attention(nn.Module):
    def __init__(self, c: Any, number: int) -> None:
        super().__init__()
        self.layer_idx, self.heads, self.kv = number, c.num_attention_heads, c.num_key_value_heads
        head = c.hidden_size // self.heads
        self.q_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(c.hidden_size, self.kv * head, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (
            f(x).view(batch, seq, count, -1).transpose(1, 2)
            for f, count in ((self.q_proj, self.heads), (self.k_proj, self.kv), (self.v_proj, self.kv))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, seq, width))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block; a list of inner sizes gives each its own, and ``returns_tuple`` hands its result on as older ones do."""

    def __init__(self, c: Any, number: int) -> None:
        super().__init__()
        inner = c.intermediate_size
        self.self_attn = Attention(c, number)
        self.mlp = Mlp(c.hidden_size, inner[number] if isinstance(inner, list) else inner)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(c.hidden_size) for _ in range(2))
        self.returns_tuple = getattr(c, "returns_tuple", False)

    def forward(self, hidden_states: Tensor) -> Any:
        x = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        x = x + self.mlp(self.post_attention_layernorm(x))
        return (x, None) if self.returns_tuple else x


class Llama(nn.Module):
    supports_gradient_checkpointing = True

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.checkpointed: dict[str, Any] | None = None
        self.tied = getattr(c, "tie_word_embeddings", False)
        if getattr(c, "broken", ""):
            raise NotImplementedError(c.broken)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(Block(c, number) for number in range(c.num_hidden_layers))
        self.model.norm = nn.RMSNorm(c.hidden_size)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def tie_weights(self) -> None:
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        self.checkpointed = gradient_checkpointing_kwargs

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        x = self.model.embed_tokens(input_ids)
        for block in self.model.layers:
            x = block(x) if self.checkpointed is None else checkpoint(block, x, **self.checkpointed)
            x = x[0] if isinstance(x, tuple) else x
        logits = self.lm_head(self.model.norm(x)).flatten(0, 1).float()
        return SimpleNamespace(loss=F.cross_entropy(logits, labels.flatten()))


class Config(SimpleNamespace):
    pass


class Encoder(SimpleNamespace):
    pass


def _for_model(family: str, **sizes: Any) -> Any:
    if sizes.get("num_attention_heads", 1) <= 0:
        raise ValueError("heads must be positive")
    return {"llama": Config, "bert": Encoder}[family](**sizes)


def _from_config(config: Any) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        return Llama(config)
    finally:
        torch.set_default_dtype(before)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import transformers` find the stand-in."""
    module: Any = ModuleType("transformers")
    module.__version__ = "5.0.0"
    module.CONFIG_MAPPING = {"llama": Config, "bert": Encoder}
    module.MODEL_FOR_CAUSAL_LM_MAPPING = {Config: Llama}
    module.AutoConfig = SimpleNamespace(for_model=_for_model)
    module.AutoModelForCausalLM = SimpleNamespace(from_config=_from_config)
    quiet = SimpleNamespace(get_verbosity=lambda: 30, set_verbosity=lambda _: None, set_verbosity_error=lambda: None)
    module.utils = SimpleNamespace(logging=quiet)
    initialization: Any = ModuleType("transformers.initialization")
    initialization.no_init_weights = contextlib.nullcontext
    module.initialization = initialization
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setitem(sys.modules, "transformers.initialization", initialization)
    monkeypatch.setattr("autoprec.cost.configuration.require", functools.partial(_required, module))


def _required(module: Any, name: str, **_: Any) -> Any:
    assert name == "transformers"
    return module
