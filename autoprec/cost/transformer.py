"""A decoder's training step written down from its configuration, without a model: shapes, FLOPs and traffic.

For planning on paper (a 70B model on a laptop) and for the published end-to-end figures the model is scored on.
Reads the keys of a Hugging Face ``config.json`` of Llama, Mistral, Qwen2/3 and GPT-2 style decoders. A mixture of
experts has no such formula (routers, shared experts and dense blocks differ from family to family): transformers builds
it from its configuration, and one step is recorded on tensors without data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoprec.errors import FileError, UnknownNameError
from autoprec.graph.report import GemmCall, GraphReport, Layer, Operator
from autoprec.support.files import read_document
from autoprec.support.optional import require


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder-only transformer.

    Attributes:
        gated: the MLP has a gate and an up projection (SwiGLU) beside the down projection.
        tied: the head shares the embedding's weight.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = True
    tied: bool = False

    @property
    def q_size(self) -> int:
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_size(self) -> int:
        return (self.kv_heads or self.heads) * (self.head_dim or self.hidden // self.heads)


#: Sizes of well-known decoders, from their published configurations.
PRESETS: dict[str, DecoderConfig] = {
    "llama3-8b": DecoderConfig(4096, 32, 32, 14336, 128256, kv_heads=8),
    "llama3-70b": DecoderConfig(8192, 80, 64, 28672, 128256, kv_heads=8),
    "llama3-405b": DecoderConfig(16384, 126, 128, 53248, 128256, kv_heads=8),
    "gpt2": DecoderConfig(768, 12, 12, 3072, 50257, gated=False, tied=True),
    "nanochat-d12": DecoderConfig(768, 12, 6, 3072, 32768, gated=False),
    "nanochat-d26": DecoderConfig(1664, 26, 13, 6656, 32768, gated=False),
}


#: Families whose MLP has two projections and no gate.
_PLAIN_MLP = (
    "bloom",
    "codegen",
    "falcon",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "mpt",
    "opt",
    "phi",
    "starcoder2",
)
#: Each layer of a configuration becomes a dozen objects here; no decoder has a tenth of these.
MOST_LAYERS, MOST_SIZE = 10_000, 10**9
#: Families whose head shares the embedding's weight where ``config.json`` is silent, as transformers takes it.
_TIED = ("bloom", "cohere", "falcon", "gemma", "gpt2", "gpt_bigcode", "gpt_neo", "mpt", "opt", "starcoder2")
#: Keys that say how many experts a mixture has.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
#: Keys of a ``config.json`` that say where its weights or its code are, not what it is.
_NOT_SIZES = ("auto_map", "quantization_config", "torch_dtype", "dtype", "model_type", "use_cache")


def _check_decoder(document: Mapping[str, Any], path: Path | str) -> None:
    """Refuse a configuration whose step would be written down as that of another model.

    Raises:
        FileError: not a decoder's.
    """
    fix = "record a step of the script itself: autoprec estimate train.py"
    classes = [str(name) for name in document.get("architectures") or ()]
    decoders = ("ForCausalLM", "LMHeadModel")
    if document.get("is_encoder_decoder") or (classes and not any(name.endswith(decoders) for name in classes)):
        named = ", ".join(classes) or "an encoder-decoder"
        raise FileError(f"is the configuration of {named}, not of a decoder", where=str(path), fix=fix)


def load_config(path: Path | str) -> DecoderConfig:
    """Read a Hugging Face ``config.json``.

    Raises:
        FileError: missing, malformed, not of a dense decoder, or a size is absent.
    """
    document = read_document(path)
    _check_decoder(document, path)
    if _has_experts(document):
        raise FileError("is a mixture of experts", where=str(path), fix="record it: config_report")

    def size(*names: str, default: int | None = None, most: int = MOST_SIZE) -> int:
        for name in names:
            value = document.get(name)
            if isinstance(value, int) and value > most:
                raise FileError(f"{name} is {value:,}", where=str(path), fix=f"correct it; the most here is {most:,}")
            if isinstance(value, int) and value > 0:
                return value
        if default is not None:
            return default
        raise FileError(f"no {' or '.join(names)}", where=str(path), fix="is this the config.json of a decoder?")

    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    gated = "intermediate_size" in document and document.get("model_type", "llama") not in _PLAIN_MLP
    family = str(document.get("model_type", "" if gated else "gpt2"))
    # gemma2 and gemma3_text are gemma, but gpt_neox is not gpt_neo
    tied = family in _TIED or family.startswith(("gemma", "cohere"))
    return DecoderConfig(
        hidden=hidden,
        layers=size("num_hidden_layers", "n_layer", most=MOST_LAYERS),
        heads=heads,
        intermediate=size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        vocab=size("vocab_size"),
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads),
        gated=gated,
        tied=bool(document.get("tie_word_embeddings", tied)),
    )


def _layer(name: str, group: str, tokens: int, inp: int, out: int, flags: tuple[str, ...], recompute: bool) -> Layer:
    gemms = [GemmCall("fprop", tokens, inp, out), GemmCall("dgrad", tokens, out, inp)]
    gemms.append(GemmCall("wgrad", out, tokens, inp))
    if recompute:
        gemms.insert(1, GemmCall("recompute", tokens, inp, out))
    return Layer(
        name=name,
        type="Linear",
        kind="linear",
        weight=f"{name}.weight",
        group=group,
        gemms=tuple(gemms),
        parameters=inp * out,
        tunable=True,
        reason="matrix product with a weight",
        flags=flags,
        flops={gemm.role: gemm.flops for gemm in gemms},
        dtype="bf16",
    )


class _Operators:
    """Collects operators of one module, forward and backward."""

    def __init__(self, bytes_per_value: int = 2) -> None:
        self.rows: list[Operator] = []
        self.size = bytes_per_value

    def add(self, module: str, op: str, cls: str, values: float, *, flops: float = 0.0, dtype: str = "bf16") -> None:
        """Add an operator that moves ``values`` values forward; backward moves 1.5 times that, 2.5 times the FLOPs."""
        for phase, traffic, work in (("forward", 1.0, 1.0), ("backward", 1.5, 2.5)):
            self.rows.append(
                Operator(
                    name=f"{op}_{len(self.rows)}",
                    module=module,
                    op=op,
                    phase=phase,
                    cls=cls,
                    precision="follow",
                    reason="from the configuration",
                    shapes=(),
                    dtypes=(dtype,),
                    flops=int(flops * work),
                    bytes=int(values * traffic * self.size),
                )
            )


def _block_operators(out: _Operators, prefix: str, c: DecoderConfig, tokens: int, seq: int) -> None:
    wide = float(tokens) * c.hidden
    qkv = float(tokens) * (c.q_size + 2 * c.kv_size)
    out.add(f"{prefix}.input_layernorm", "rms_norm", "norm", 2 * wide)
    out.add(f"{prefix}.self_attn", "rotary", "pointwise", 2 * qkv)
    # causal: half of the score matrix
    out.add(f"{prefix}.self_attn", "sdpa", "attention", qkv + tokens * c.q_size, flops=2.0 * tokens * seq * c.q_size)
    out.add(prefix, "add", "pointwise", 3 * wide)
    out.add(f"{prefix}.post_attention_layernorm", "rms_norm", "norm", 2 * wide)
    inner = float(tokens) * c.intermediate
    out.add(f"{prefix}.mlp", "silu_mul" if c.gated else "gelu", "pointwise", (3 if c.gated else 2) * inner)
    out.add(prefix, "add", "pointwise", 3 * wide)


def decoder_report(config: DecoderConfig, *, batch: int, seq: int, recompute: str = "") -> GraphReport:
    """Return the step of a decoder trained in bf16 on ``batch`` sequences of ``seq`` tokens.

    Args:
        batch, seq: of one device and step.
        recompute: activation checkpointing: "" none, "full" (every forward GEMM of a block runs twice), or
            "selective" (every second one does, as torchtitan's per-operator checkpointing).
    """
    tokens, h = batch * seq, config.hidden
    layers: list[Layer] = []
    groups: dict[str, tuple[str, ...]] = {}
    operators = _Operators()
    operators.add("model.embed_tokens", "embedding", "embedding", 2.0 * tokens * h)
    for index in range(config.layers):
        prefix = f"model.layers.{index}"
        shapes = [("self_attn.q_proj", "qkv", h, config.q_size), ("self_attn.k_proj", "qkv", h, config.kv_size)]
        shapes += [("self_attn.v_proj", "qkv", h, config.kv_size), ("self_attn.o_proj", "o", config.q_size, h)]
        if config.gated:
            shapes.append(("mlp.gate_proj", "gate_up", h, config.intermediate))
        shapes += [
            ("mlp.up_proj", "gate_up", h, config.intermediate),
            ("mlp.down_proj", "down", config.intermediate, h),
        ]
        for number, (name, group, inp, out) in enumerate(shapes):
            full = f"{prefix}.{group}"
            again = recompute == "full" or (recompute == "selective" and number % 2 == 1)
            layers.append(_layer(f"{prefix}.{name}", full, tokens, inp, out, (), again))
            groups[full] = (*groups.get(full, ()), f"{prefix}.{name}")
        _block_operators(operators, prefix, config, tokens, seq)
    operators.add("model.norm", "rms_norm", "norm", 2.0 * tokens * h)
    layers.append(_layer("lm_head", "lm_head", tokens, h, config.vocab, ("head",), False))
    groups["lm_head"] = ("lm_head",)
    operators.add("", "cross_entropy", "loss", 3.0 * tokens * config.vocab, dtype="bf16")
    weights = sum(layer.parameters for layer in layers) + (0 if config.tied else config.vocab * h)
    weights += (2 * config.layers + 1) * h
    per_token = h * 4 + config.q_size * 2 + 2 * config.kv_size + (3 if config.gated else 2) * config.intermediate
    saved = (
        tokens * config.layers * (2 * h if recompute == "full" else 2 * per_token + 2 * h) + tokens * config.vocab * 4
    )
    in_layers = sum(layer.total_flops for layer in layers)
    total = in_layers + sum(row.flops for row in operators.rows)
    return GraphReport(
        model={"class": "Decoder", "parameters": weights, "fingerprint": ""},
        layers=tuple(layers),
        operators=tuple(operators.rows),
        groups=groups,
        total_flops=total,
        tunable_flops_share=in_layers / total if total else 0.0,
        batch={"samples": batch, "tokens": tokens},
        memory={
            "parameters": weights * 4,
            "gradients": weights * 4,
            "optimizer": weights * 8,
            "saved_for_backward": saved,
        },
        notes=("from the configuration: no model was run",),
        source="analytic",
    )


def config_from(value: str) -> DecoderConfig:
    """Return a preset by name, or the configuration in a file.

    Raises:
        UnknownNameError: neither a preset nor a path.
        FileError: see :func:`load_config`.
    """
    if value in PRESETS:
        return PRESETS[value]
    if Path(value).name == value and not Path(value).suffix and not Path(value).exists():
        raise UnknownNameError("configuration", value, PRESETS)  # no file is called that
    return load_config(value)


def _has_experts(document: Mapping[str, Any]) -> bool:
    return any(isinstance(document.get(name), int) and document[name] > 1 for name in _EXPERTS)


def is_mixture(value: str) -> bool:
    """Say whether a preset or a ``config.json`` is one of a mixture of experts."""
    return value not in PRESETS and Path(value).is_file() and _has_experts(read_document(value))


def config_report(value: str, *, batch: int, seq: int) -> GraphReport:
    """Return the step of a decoder in bf16 from a preset or a ``config.json``: written down, or recorded for a mixture.

    Args:
        value: name of a preset, or path.
        batch, seq: of one device and step.

    Raises:
        UnknownNameError, FileError: see :func:`config_from`; or transformers does not know the family.
        MissingDependencyError: a mixture, without transformers.
    """
    if not is_mixture(value):
        return decoder_report(config_from(value), batch=batch, seq=seq)
    document = read_document(value)
    _check_decoder(document, value)
    return _recorded(document, value, batch, seq)


def _recorded(document: Mapping[str, Any], path: str, batch: int, seq: int) -> GraphReport:
    """Build a model from its configuration without memory, and record one step of it."""
    transformers = require("transformers", purpose="builds a mixture of experts from its configuration")
    import torch

    from autoprec.graph.fake import record_fake

    family = str(document.get("model_type", ""))
    try:
        sizes = {name: entry for name, entry in document.items() if name not in _NOT_SIZES}
        config = transformers.AutoConfig.for_model(family, **sizes, torch_dtype=torch.bfloat16)
    except (KeyError, ValueError, TypeError) as error:
        fix = "record a step of the script itself: autoprec estimate train.py"
        raise FileError(f"is not one that transformers builds: {error}", where=path, fix=fix) from error

    def step(model: Any) -> None:
        ids = torch.zeros((batch, seq), dtype=torch.long)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    report = record_fake(lambda: transformers.AutoModelForCausalLM.from_config(config).train(), step)
    weights = int(report.model["parameters"])
    memory = {**report.memory, "parameters": 4 * weights, "gradients": 4 * weights, "optimizer": 8 * weights}
    notes = (*report.notes, "from the configuration: recorded without weights or data")
    return replace(report, memory=memory, notes=notes)
