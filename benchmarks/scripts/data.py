"""Tiny data in the files' own formats, for training scripts that would otherwise download theirs.

Every generator takes the scratch copy of a repository and the words after its name in the manifest
(``mnist data`` -> ``mnist(tree, "data")``). All are seeded: two copies hold the same bytes.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import string
import struct
from pathlib import Path

import numpy as np

WORDS = "the a cat dog sees likes old red sun moon runs far in on under house tree and but when then never"


def sentences(seed: int, lines: int) -> str:
    draw, words = random.Random(seed), WORDS.split()
    return "\n".join(" ".join(draw.choices(words, k=draw.randint(4, 12))) for _ in range(lines)) + "\n"


def text(tree: Path, file: str, lines: str = "2000", signs: str = "") -> None:
    """A text of simple words; with ``signs`` its last line has every letter and sign of ASCII."""
    path = tree / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(sentences(1, int(lines)) + (string.printable[:95] + "\n" if signs else ""), encoding="utf-8")


def mnist(tree: Path, folder: str, train: str = "1024", test: str = "256") -> None:
    """MNIST's idx files, where torchvision looks for them: noise whose mean tells the class."""
    draw = np.random.default_rng(0)
    raw = tree / folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for stem, count in (("train", int(train)), ("t10k", int(test))):
        labels = draw.integers(0, 10, count, dtype=np.uint8)
        images = draw.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 6, 6:22] += 150
        (raw / f"{stem}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())
        (raw / f"{stem}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())


def nanogpt(tree: Path, folder: str, vocabulary: str = "65") -> None:
    """nanoGPT's memory-mapped token files and its ``meta.pkl``."""
    size = int(vocabulary)
    path = tree / folder
    path.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).zipf(1.3, 20000) % size
    for name in ("train.bin", "val.bin"):
        tokens.astype(np.uint16).tofile(path / name)
    letters = {index: chr(32 + index) for index in range(size)}
    meta = {"vocab_size": size, "itos": letters, "stoi": {value: key for key, value in letters.items()}}
    (path / "meta.pkl").write_bytes(pickle.dumps(meta))


def llama2c(tree: Path, vocabulary: str = "64") -> None:
    """llama2.c's pretokenised shards of TinyStories under a custom tokenizer."""
    folder = tree / "data" / f"tok{vocabulary}"
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for shard in range(3):
        tokens = draw.zipf(1.3, 20000) % int(vocabulary)
        tokens.astype(np.uint16).tofile(folder / f"data{shard:02d}.bin")


def cora(tree: Path, folder: str, nodes: str = "1600", features: str = "60") -> None:
    """The two files of the Cora citation graph, with the names of its classes."""
    count, width = int(nodes), int(features)
    draw = np.random.default_rng(0)
    classes = "Case_Based Genetic_Algorithms Neural_Networks Probabilistic_Methods Reinforcement_Learning Rule_Learning"
    names = [*classes.split(), "Theory"]
    path = tree / folder
    path.mkdir(parents=True, exist_ok=True)
    labels = draw.integers(0, len(names), count)
    rows = []
    for node, label in enumerate(labels):
        bits = (draw.random(width) < 0.1).astype(int)
        bits[label] = 1
        rows.append("\t".join([str(node + 1), *map(str, bits), names[label]]))
    (path / "cora.content").write_text("\n".join(rows) + "\n", encoding="utf-8")
    edges = [f"{node + 1}\t{draw.integers(0, count) + 1}" for node in range(count) for _ in range(2)]
    (path / "cora.cites").write_text("\n".join(edges) + "\n", encoding="utf-8")


def sines(tree: Path, file: str) -> None:
    """What ``generate_sine_wave.py`` of time_sequence_prediction writes, shorter."""
    import torch

    steps = np.array(range(120)) + np.random.default_rng(2).integers(-80, 80, 30).reshape(30, 1)
    (tree / file).parent.mkdir(parents=True, exist_ok=True)
    torch.save(np.sin(steps / 20.0).astype("float64"), tree / file)


def images(tree: Path, folder: str, count: str = "24", size: str = "64", suffix: str = "jpg") -> None:
    """Noise pictures in one folder."""
    from PIL import Image

    draw = np.random.default_rng(3)
    path = tree / folder
    path.mkdir(parents=True, exist_ok=True)
    for index in range(int(count)):
        pixels = draw.integers(0, 255, (int(size), int(size), 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path / f"{index:03d}.{suffix}")


def image_classes(tree: Path, folder: str, count: str = "16", size: str = "40") -> None:
    """An ImageFolder with two classes in train and val."""
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            images(tree, f"{folder}/{part}/{name}", count, size)


def masked_images(tree: Path, pictures: str, masks: str, count: str = "24", size: str = "64") -> None:
    """Noise pictures, and masks of the same names: the upper half is one class, the lower half the other."""
    from PIL import Image

    images(tree, pictures, count, size)
    (tree / masks).mkdir(parents=True, exist_ok=True)
    mask = np.zeros((int(size), int(size)), dtype=np.uint8)
    mask[: int(size) // 2] = 255
    for index in range(int(count)):
        Image.fromarray(mask).save(tree / masks / f"{index:03d}.png")


def empty(tree: Path, folder: str) -> None:
    (tree / folder).mkdir(parents=True, exist_ok=True)


def lines_of_json(tree: Path, file: str, keys: str = "text", count: str = "64") -> None:
    """A JSON-lines data set with the named text columns."""
    (tree / file).parent.mkdir(parents=True, exist_ok=True)
    rows = sentences(4, int(count) * len(keys.split(","))).splitlines()
    names = keys.split(",")
    with open(tree / file, "w", encoding="utf-8") as out:
        for index in range(int(count)):
            out.write(json.dumps({key: rows[index * len(names) + at] for at, key in enumerate(names)}) + "\n")


def tokenizer(tree: Path, folder: str) -> None:
    """A word-level tokenizer in the files of Hugging Face."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {
        word: index
        for index, word in enumerate(["[PAD]", "[UNK]", "[EOS]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()])
    }
    plain = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="[PAD]",
        unk_token="[UNK]",
        eos_token="[EOS]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    fast.model_max_length = 32
    fast.save_pretrained(tree / folder)


def causal_lm(tree: Path, folder: str, kind: str = "llama") -> None:
    """A tiny random causal language model built from its config class, with a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **sizes, **more, pad_token_id=0, bos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tree / folder)
    tokenizer(tree, folder)


def unet(tree: Path, folder: str) -> None:
    """The configuration of a tiny diffusers UNet."""
    sizes = {"sample_size": 16, "block_out_channels": [16, 32], "layers_per_block": 1, "norm_num_groups": 8}
    blocks = {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"]}
    (tree / folder).mkdir(parents=True, exist_ok=True)
    text = json.dumps({"_class_name": "UNet2DModel"} | sizes | blocks)
    (tree / folder / "config.json").write_text(text, encoding="utf-8")
