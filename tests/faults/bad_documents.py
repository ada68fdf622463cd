"""Hostile documents, by the seed: damaged valid ones, and shapes made to run code, eat memory, or never end."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from autoprec.policy import Policy, dump_yaml
from autoprec.policy.space import spaces_dir
from autoprec.precision.recipes import BUILTIN_RECIPES

__all__ = ["BOMBS", "HEADS", "bomb", "flipped", "hostile", "policy_document", "policy_seeds", "space_seeds"]

HEADS = ("schema: autoprec.policy/1\n", "schema: autoprec.space/1\nname: x\n")
#: What a mutation puts in: YAML's own words, Python's tags, numbers at the edges, and bytes that are not text.
WORDS = (
    "!!python/object/apply:os.system ['touch pwned']", "!!python/name:os.system", "!!python/object/new:type",
    "!!python/module:antigravity", "!!binary aGk=", "!!set {a}", "!!omap [a: 1]", "!!timestamp 2026-01-01",
    "!!int x", "!!float y", "!<tag:yaml.org,2002:python/tuple>", "&a", "*a", "&a [*a]", "<<: *a", "<<: {a: 1}",
    "? [a]\n: b", "? {a: 1}\n: b", "---\n", "...\n", "%YAML 9.9\n", "%TAG ! tag:x,1:\n", "{", "}", "[", "]", ":",
    ": ", "- ", "|\n", ">-\n", "'", '"', "\\", "#", ",", "~", "null", ".nan", "-.inf", "1e999", "0x", "9" * 60,
    "1:" * 30, "0b1", "017", "yes", "\n", "\r\n", "\t", "  ", "\u2028", "\u0085", "\u202e", "é", "keep", "bf16",
    "fp8", "e4m3", "*", "**", "[z-a]", "[!", "optional: true", "schema: autoprec.policy/2", "__class__",
    "__import__('os')", "${HOME}", "{{7*7}}", "../../etc/passwd", "/dev/zero", "file:///etc/passwd", "layers: []\n",
    "evidence: {}\n", "gemms: {fprop: keep}",
)  # fmt: skip
NO_TEXT = (b"\x00", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\xc3", b"\xed\xa0\x80", b"\x1b[2J", b"\x7f")
TOKENS = [*(word.encode() for word in WORDS), *NO_TEXT]


def policy_document() -> Policy:
    """Return a policy that uses every section."""
    return Policy.model_validate(
        {
            "recipes": {name: BUILTIN_RECIPES[name] for name in sorted(BUILTIN_RECIPES)},
            "layers": [
                {"match": "*.fc", "recipe": "fp8_rowwise", "gemms": {"wgrad": "bf16"}},
                {"match": "h.[0-3].attn?", "recipe": "fp8_delayed", "optional": True},
            ],
            "activations": "bf16",
            "optimizer": {"exp_avg": "e4m3", "exp_avg_sq": "fp16_scaled"},
            "communication": {"gradients": "fp8"},
            "model": {"class": "GPT", "parameters": 124439808, "fingerprint": "sha256:00"},
            "evidence": {"target": "h100", "speedup": 1.31, "versions": {"torch": "2.13"}, "notes": ["a", None, True]},
            "guard": {"metrics": ["loss_gap"], "thresholds": {"loss_gap": 0.02}, "fallback": ["script"]},
        }
    )


def policy_seeds() -> list[bytes]:
    """Return valid policy files."""
    whole = policy_document()
    small = whole.model_copy(update={"evidence": {}, "recipes": {}, "layers": ()})
    return [dump_yaml(policy.to_dict()).encode() for policy in (whole, small)]


def space_seeds() -> list[bytes]:
    """Return the shipped spaces."""
    return [Path(path).read_bytes() for path in sorted(spaces_dir().glob("*.yaml"))]


def flipped(chance: random.Random, raw: bytes) -> bytes:
    """Return the bytes with one to eight bits flipped."""
    out = bytearray(raw)
    for _ in range(chance.choice((1, 1, 1, 2, 8)) if out else 0):
        out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
    return bytes(out)


def _cut(chance: random.Random, raw: bytes) -> bytes:
    return raw[: chance.randrange(len(raw) + 1)]


def _inserted(chance: random.Random, raw: bytes) -> bytes:
    at = chance.randrange(len(raw) + 1)
    return raw[:at] + chance.choice(TOKENS) * chance.choice((1, 1, 1, 3)) + raw[at:]


def _replaced(chance: random.Random, raw: bytes) -> bytes:
    lines = raw.split(b"\n")
    at = chance.randrange(len(lines))
    head, _, _ = lines[at].partition(b":")
    lines[at] = head + b": " + chance.choice(TOKENS)
    return b"\n".join(lines)


def _moved(chance: random.Random, raw: bytes) -> bytes:
    a, b = sorted(chance.randrange(len(raw) + 1) for _ in range(2))
    at = chance.randrange(len(raw) + 1)
    return raw[:at] + raw[a : min(b, a + 300)] + raw[at:]


def _deleted(chance: random.Random, raw: bytes) -> bytes:
    at = chance.randrange(len(raw) + 1)
    return raw[:at] + raw[at + chance.randrange(1, 20) :]


def _encoded(chance: random.Random, raw: bytes) -> bytes:
    coding = chance.choice(("utf-16", "utf-8-sig", "utf-32-le", "latin-1"))
    return raw.decode("utf-8", "replace").encode(coding, "ignore")


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    flipped, _cut, _inserted, _inserted, _replaced, _moved, _deleted, _encoded,
)  # fmt: skip


def _aliases(n: int) -> str:
    rows = "".join(f"  b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 9)}]\n" for i in range(1, 10))
    return "evidence:\n  b0: &b0 [" + "x, " * (n // 8) + "x]\n" + rows


#: Shapes by size in characters; each is put below the head of a policy or of a space.
BOMBS: tuple[Callable[[int], str], ...] = (
    _aliases,
    lambda n: "evidence: " + "[" * n,
    lambda n: "evidence: " + "{a: " * (n // 4),
    lambda n: "evidence:\n " + "- " * (n // 2),
    lambda n: "evidence: [" + "a," * (n // 2) + "]",
    lambda n: "evidence: {" + ",".join(f"k{i}: {{}}" for i in range(n // 9)) + "}",
    lambda n: "evidence: " + "9" * n,
    lambda n: "evidence: {a: 1" + ":1" * (n // 2) + "}",
    lambda n: "evidence: {a: 0x" + "f" * n + "}",
    lambda n: "evidence: {a: '" + "x" * n + "'}",
    lambda n: "x" * n + ": 1",
    lambda n: "? " + "x" * n + "\n: 1",
    lambda n: "default: " + "fp8" * (n // 3),
    lambda n: "activations: " + "x" * n,
    lambda n: "layers:\n" + "- {match: a, recipe: keep}\n" * (n // 27),
    lambda n: "layers:\n" + "- {match: a, recipe: kep}\n" * (n // 26),
    lambda n: "layers:\n- {match: '" + "*a" * (n // 2) + "b', recipe: keep}\n",
    lambda n: "layers:\n- {match: '" + "[!a]" * (n // 4) + "', recipe: keep}\n",
    lambda n: "layers:\n" + "".join(f"- {{match: '{'*a' * 400}{i}', recipe: keep}}\n" for i in range(n // 840)),
    lambda n: "recipes: {" + ", ".join(f"fp8_x{i}: {{format: bf16}}" for i in range(n // 26)) + "}\ndefault: fp8_y",
    lambda n: "recipes: {" + ", ".join(f"r{i}: {{format: bf17, x: 1}}" for i in range(n // 26)) + "}",
    lambda n: "".join(f"key{i}: 1\n" for i in range(n // 10)),
    lambda n: "choices:\n" + "- {match: a, choices: [bf16, keep]}\n" * (n // 36),
    lambda n: "choices: [{choices: [" + "bf16, " * (n // 6) + "keep]}]",
    lambda n: "choices: [{choices: [" + "bf16/wgrad=fp8x, " * (n // 17) + "keep]}]",
    lambda n: "choices: [{choices: ['bf16" + "/wgrad=bf16" * (n // 11) + "']}]",
    lambda n: "parameters: {fp8_delayed.scaling.margin: [" + "1, " * (n // 3) + "1]}",
    lambda n: "parameters: {" + ", ".join(f"fp8_delayed.scaling.m{i}: [1]" for i in range(n // 30)) + "}",
    lambda n: "parameters: {'fp8_delayed" + ".scaling" * (n // 8) + "': [1]}",
    lambda n: "presets:\n" + "- {name: a, parameters: {activations: keep}}\n" * (n // 45),
    lambda n: "optimizer: {weights: [" + "fp32, " * (n // 6) + "fp32]}",
    lambda n: "groups: [[" + "a, " * (n // 3) + "b]]",
    lambda n: "#" * n,
    lambda n: "\n" * n,
    lambda n: "evidence: |\n" + " x\n" * (n // 3),
    lambda n: "%TAG ! tag:x,2026:" + "y" * n + "\n---\n",
    lambda n: "!" + "x" * n + " a",
    lambda n: "&" + "x" * n + " a: b",
    lambda n: "- &a !!python/object/apply:os.system [x]\n" * (n // 40),
)


def bomb(chance: random.Random, most: int) -> bytes:
    """Return a document of up to ``most`` bytes that is made to cost time or memory; one in four is JSON."""
    size = min(int(10 ** chance.uniform(1, len(str(most)) - 0.3)), most)
    if chance.random() < 0.25:
        unit = chance.choice(("[", '{"a":', "[1,", "9", '"x', "[[],", '{"a":{},', "\\ud800", "1e9", " "))
        head = '{"schema": "autoprec.policy/1", "evidence": ' + chance.choice(("", '"', "[", "{"))
        return (head + unit * (size // len(unit)) + chance.choice(("", "}", "]}", '"}'))).encode()
    return (chance.choice((*HEADS, "")) + chance.choice(BOMBS)(size)).encode()


def hostile(chance: random.Random, seeds: list[bytes], *, bombs: float = 0.02, most: int = 2_000_000) -> bytes:
    """Return one hostile document: a bomb, or a seed mutated one to six times."""
    if chance.random() < bombs:
        return bomb(chance, most)
    raw = chance.choice(seeds)
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        raw = chance.choice(MUTATIONS)(chance, raw)
    return raw
