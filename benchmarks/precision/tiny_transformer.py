"""A small transformers model that trains for some steps, and says by hooks of its own what is kept in which dtype.

    python benchmarks/precision/tiny_transformer.py FAMILY DTYPE OPTIMIZER OUT [loaded] [averaged] [clipped]

DTYPE is that of the parameters; ``autocast`` is FP32 with bf16 autocast. ``loaded``: the model is saved in FP32 and
loaded in DTYPE. OUT receives rows (kind, name, dtype, shape) as JSON after each step. It knows nothing of AutoPrec.
"""

import contextlib
import json
import sys
import tempfile

import torch
import torch.nn.functional as F
import transformers

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": 97, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
MORE = {
    "gptj": {"rotary_dim": 8},
    "t5": {"decoder_start_token_id": 0, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "gpt_neox": {"head_dim": None}, "phi": {"head_dim": None}, "falcon": {"head_dim": None},
    "deepseek_v3": {"head_dim": None, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
                    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                    "v_head_dim": 8, "first_k_dense_replace": 1},
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "int64", torch.bool: "bool"}
#: What is said while forward and backward run.
PASSING = ("logits", "loss", "clipping norm", "top-k input")
family, dtype, optimizer_name, out, *more = sys.argv[1:]
seen = []


def say(kind, name, tensor, **also):
    seen.append([kind, name, NAMES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape), also])


def built():
    sizes = {**SMALL, **MORE.get(family, {})}
    config = transformers.AutoConfig.for_model(family, **{k: v for k, v in sizes.items() if v is not None})
    kind = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    if "loaded" not in more:
        return kind.from_config(config).to(DTYPES[dtype])
    with tempfile.TemporaryDirectory() as folder:
        kind.from_config(config).save_pretrained(folder)
        return kind.from_pretrained(folder, dtype=DTYPES[dtype])


def made(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    if optimizer_name == "adafactor":
        return transformers.Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)
    kinds = {
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-3),
        "amsgrad": lambda: torch.optim.Adam(parameters, lr=1e-3, eps=1e-4, amsgrad=True, foreach=True),
        "sgd": lambda: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, nesterov=True),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=1e-4, eps=1e-3, momentum=0.5),
        "plain": lambda: torch.optim.SGD(parameters, lr=1e-3),
    }
    return kinds[optimizer_name]()


def counted(model, optimizer):
    """Hook what is asked of the census; each row is said once, at the first step."""
    names = {p: n for n, p in model.named_parameters()}
    cross_entropy = F.cross_entropy

    def before(*_):
        seen[:] = [row for row in seen if row[0] in PASSING]
        for name, parameter in model.named_parameters():
            say("parameter", name, parameter)
            if parameter.grad is not None:
                say("gradient", name, parameter.grad)
        for name, buffer in model.named_buffers():
            say("buffer", name, buffer)

    def after(*_):
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    say("optimizer state", f"{key} of {names[parameter]}", value)
        with open(out, "w") as stream:
            json.dump(seen, stream)

    def noted(input, *args, **kwargs):
        say("logits", "", input)
        return cross_entropy(input, *args, **kwargs)

    topk = torch.topk

    def chosen(input, *args, **kwargs):
        say("top-k input", "", input)
        return topk(input, *args, **kwargs)

    torch.topk = torch.Tensor.topk = chosen
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    F.cross_entropy = torch.nn.functional.cross_entropy = noted


torch.manual_seed(0)
model = built().train()
optimizer = made(model)
counted(model, optimizer)
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=None) if "averaged" in more else None
for _ in range(3):
    tokens = torch.randint(3, 97, (4, 17))
    context = torch.autocast("cpu", torch.bfloat16) if dtype == "autocast" else contextlib.nullcontext()
    seen[:] = []
    with context:
        loss = model(input_ids=tokens, labels=tokens).loss
    say("loss", "", loss)
    optimizer.zero_grad()
    loss.backward()
    if "clipped" in more:
        say("clipping norm", "", torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    if average is not None:
        average.update_parameters(model)
        for name, parameter in average.module.named_parameters():
            say("copy of the weights", name, parameter)
        with open(out, "w") as stream:
            json.dump(seen, stream)
