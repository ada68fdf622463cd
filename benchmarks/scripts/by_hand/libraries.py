"""Models of timm and transformers at sizes for a CPU, without weights to download."""

import torch
from task import Task, blobs, tokens
from torch.nn import functional as F

SIZE, CLASSES = 64, 20
#: timm's names, and what is not its default.
IMAGES = {
    "vit": ("vit_tiny_patch16_224", {"img_size": SIZE, "patch_size": 8}),
    "convnext": ("convnext_atto", {}),
    "mixer": ("mixer_s16_224", {"img_size": SIZE}),
}


def images(name):
    import timm

    model = timm.create_model(IMAGES[name][0], num_classes=CLASSES, **IMAGES[name][1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    return Task(model, optimizer, blobs(16, 3, SIZE, CLASSES), lambda model, b: F.cross_entropy(model(b[0]), b[1]))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    model = BertForMaskedLM(BertConfig(vocab_size=257, max_position_embeddings=64, **sizes, **none))
    draw = tokens(16, 64)

    def batch():
        text = draw()
        hidden = torch.rand(text.shape) < 0.15
        return text.masked_fill(hidden, 256), text.masked_fill(~hidden, -100)

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    return Task(model, optimizer, batch, lambda model, b: model(b[0], labels=b[1]).loss, clip=1.0)


def gpt2(vocabulary=256, samples=12):
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_positions=64, n_embd=256, n_layer=4, n_head=4, **none))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    return Task(model, optimizer, tokens(samples, 64), lambda model, text: model(text, labels=text).loss, clip=1.0)


def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=256, num_mel_bins=40, d_model=256, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=1024, decoder_ffn_dim=1024, max_source_positions=100,
        max_target_positions=32, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    sounds = torch.randn(256, 40, 8, generator=torch.Generator().manual_seed(1234))

    def batch():
        said = torch.randint(3, 256, (4, 25))
        return sounds[said].permute(0, 2, 1, 3).flatten(2) + 0.5 * torch.randn(4, 40, 200), said

    return Task(model, optimizer, batch, lambda model, b: model(input_features=b[0], labels=b[1]).loss, clip=1.0)


def make(name):
    """Return what is trained, and on what."""
    made = {"bert": bert, "gpt2": gpt2, "head": lambda: gpt2(50_304, 8), "whisper": whisper}
    return images(name) if name in IMAGES else made[name]()
