"""26 Hugging Face architectures built from tiny configurations, in training mode, for benchmarks/graph/graph.py."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

BATCH, TOKENS, VOCAB, WIDTH, HEADS = 2, 16, 128, 64, 4
#: Blocks of a model.
DEPTH = int(os.environ.get("AUTOPREC_ZOO_DEPTH", "2"))
Built = tuple[torch.nn.Module, dict[str, Any]]

warnings.simplefilter("ignore")
logging.getLogger("transformers").setLevel(logging.CRITICAL)

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
}
_DECODER = {**_BASE, "num_key_value_heads": 2}
_MOE = {**_DECODER, "head_dim": 16, "num_experts_per_tok": 2}
_VISION = {k: v for k, v in _BASE.items() if k not in ("vocab_size", "max_position_embeddings")}
_VISION |= {"image_size": 32, "patch_size": 8}
_SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": DEPTH,
    "decoder_layers": DEPTH,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}


def _ids() -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, TOKENS))


def _model(name: str, config: Any, inputs: Callable[[], dict[str, Any]]) -> Callable[[], Built]:
    def build() -> Built:
        model = getattr(hf, name)(config() if callable(config) else config)
        return model.train(), inputs()

    return build


def _language() -> dict[str, Any]:
    ids = _ids()
    return {"input_ids": ids, "labels": ids.clone()}


def _classify_text() -> dict[str, Any]:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    return {"input_ids": _ids(), "attention_mask": mask, "labels": torch.tensor([0, 1])}


def _classify_image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.tensor([1, 2])}


def _contrast() -> dict[str, Any]:
    return {"input_ids": _ids(), "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}


def _speech() -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, 20, 40), "labels": _ids()}


def _lm(name: str, config: str, **options: Any) -> Callable[[], Built]:
    return _model(name, lambda: getattr(hf, config)(**options), _language)


def _llama_eager() -> Any:
    config = hf.LlamaConfig(**_DECODER)
    config._attn_implementation = "eager"
    return config


def _llama_checkpointed() -> Built:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER)).train()
    model.gradient_checkpointing_enable()
    return model, _language()


def _clip() -> Any:
    text = {**_BASE, "eos_token_id": 2, "bos_token_id": 1}
    return hf.CLIPConfig(text_config=text, vision_config=dict(_VISION), projection_dim=32)


_DEEPSEEK: dict[str, Any] = {
    **_BASE,
    "num_key_value_heads": HEADS,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "first_k_dense_replace": 1,
}
_QWEN_NEXT: dict[str, Any] = {
    **_MOE,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * (DEPTH // 2),
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS, "n_positions": 64}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
_T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 16, "d_ff": 128, "num_layers": DEPTH, "num_heads": HEADS}
_WHISPER = {**_SEQ2SEQ, "num_mel_bins": 20, "max_source_positions": 20, "max_target_positions": 32}
_WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_SSM = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "state_size": 8}
_MAMBA2 = {**_SSM, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8}
_RESNET: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
_DEBERTA: dict[str, Any] = {**_BASE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_QWEN_MOE = {**_MOE, "num_experts": 4, "moe_intermediate_size": 64}
_BART = {**_SEQ2SEQ, "max_position_embeddings": 64}
_RWKV = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "context_length": 64}

MODELS: dict[str, Callable[[], Built]] = {
    "gpt2": _lm("GPT2LMHeadModel", "GPT2Config", **_GPT2),
    "llama": _lm("LlamaForCausalLM", "LlamaConfig", **_DECODER),
    "llama eager attention": _model("LlamaForCausalLM", _llama_eager, _language),
    "llama checkpointed": _llama_checkpointed,
    "qwen3": _lm("Qwen3ForCausalLM", "Qwen3Config", **_DECODER, head_dim=16),
    "mistral": _lm("MistralForCausalLM", "MistralConfig", **_DECODER, sliding_window=8),
    "mixtral": _lm("MixtralForCausalLM", "MixtralConfig", **_DECODER, num_local_experts=4),
    "qwen3 moe": _lm("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_QWEN_MOE),
    "gemma2": _lm("Gemma2ForCausalLM", "Gemma2Config", **_DECODER, head_dim=16, sliding_window=8),
    "phi": _lm("PhiForCausalLM", "PhiConfig", **_DECODER),
    "phi3": _lm("Phi3ForCausalLM", "Phi3Config", **_DECODER, pad_token_id=0),
    "gpt-oss": _lm("GptOssForCausalLM", "GptOssConfig", **_MOE, num_local_experts=4),
    "bert": _model("BertForSequenceClassification", lambda: hf.BertConfig(**_BASE), _classify_text),
    "roberta": _lm("RobertaForMaskedLM", "RobertaConfig", **_BASE),
    "deberta v2": _lm("DebertaV2ForMaskedLM", "DebertaV2Config", **_DEBERTA),
    "t5": _lm("T5ForConditionalGeneration", "T5Config", **_T5, decoder_start_token_id=0),
    "bart": _lm("BartForConditionalGeneration", "BartConfig", **_BART),
    "vit": _model("ViTForImageClassification", lambda: hf.ViTConfig(**_VISION, num_labels=10), _classify_image),
    "clip": _model("CLIPModel", _clip, _contrast),
    "whisper": _model("WhisperForConditionalGeneration", lambda: hf.WhisperConfig(**_WHISPER), _speech),
    "mamba": _lm("MambaForCausalLM", "MambaConfig", **_SSM),
    "mamba2": _lm("Mamba2ForCausalLM", "Mamba2Config", **_MAMBA2),
    "rwkv": _lm("RwkvForCausalLM", "RwkvConfig", **_RWKV),
    "deepseek v3": _lm("DeepseekV3ForCausalLM", "DeepseekV3Config", **_DEEPSEEK),
    "qwen3 next": _lm("Qwen3NextForCausalLM", "Qwen3NextConfig", **_QWEN_NEXT),
    "resnet": _model(
        "ResNetForImageClassification", lambda: hf.ResNetConfig(**_RESNET, num_labels=10), _classify_image
    ),
}
