"""Where a layer stands in a network: its role (``attention.qkv``, ``mlp.out``, ``head``, ...), its stack, its depth.

Every library names the same places differently (``c_attn``, ``query_key_value``, ``Wqkv``), so roles are read from the
words of a module's name and from the flags of the recorded step (head, first, router). What neither tells has no role:
it may still have a namesake, and the shape of its GEMM gives a guess to put into a message. Depth is counted per stack
and role: the i-th of n blocks that have such a layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from autoprec.errors import UnknownNameError, UsageError
from autoprec.graph.report import Layer
from autoprec.policy import glob_matches

#: Every role that a layer can have, with what it is called in a table.
ROLES: dict[str, str] = {
    "embedding": "input projection (patches, features)",
    "attention.qkv": "attention input (q, k, v)",
    "attention.out": "attention output",
    "cross_attention.qkv": "cross-attention input",
    "cross_attention.out": "cross-attention output",
    "mixer.in": "input of a state-space or linear-attention mixer",
    "mixer.inner": "inner projections of a mixer",
    "mixer.out": "output of a mixer",
    "mlp.in": "MLP input (gate, up)",
    "mlp.out": "MLP output (down)",
    "router": "router of a mixture of experts",
    "expert.in": "input of the experts (gate, up)",
    "expert.out": "output of the experts (down)",
    "shared_expert.in": "input of the shared experts",
    "shared_expert.out": "output of the shared experts",
    "conv": "convolution of a stage",
    "conv.shortcut": "convolution on a shortcut",
    "head": "output layer",
}
#: A whole component of a name: the 3 of ``h.3.fc1``.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
#: Words of the path that say which half of a block a layer is in.
_ATTENTION = re.compile(r"attn|attention|\bmha\b|\bsa\b")
_CROSS = re.compile(r"encoder_attn|cross_?att|encdecatt|multihead_attn|\bca\b|\bcross\b")
_MIXER = re.compile(r"\b(mixer|ssm|mamba2?|linear_attn|delta_net)\b")
_MLP = re.compile(r"\b(mlp|ffn?|feed_?forward|densereludense|intermediate|block_sparse_moe|moe)\b")
_EXPERT, _SHARED = re.compile(r"\bexperts?\b"), re.compile(r"\bshared_experts?\b")
#: Last words of a name.
_QKV = re.compile(
    r"(q|k|v|kv|qkv|qk|query|key|value|queries|keys|values|c_attn|wq|wk|wv|wqkv|receptance|query_key_value|"
    r"(to_)?(q|k|v|kv|qkv)(_proj|_lin|_a_proj|_b_proj)?|kv_a_proj_with_mqa|(\w+_)?(query|key|value)_proj|in_proj\w*|"
    r"[qkv]_proj_weight)"
)
_MLP_IN = re.compile(
    r"(fc1?|c_fc|fc_in|gate|up|gate_proj|up_proj|gate_up(_proj)?|w1|w3|w12|wi(_\d)?|lin1|linear1|dense_h_to_4h|"
    r"intermediate|in_proj|mlp_in|ffn_in|key|receptance|expand|c_fc_\d)"
)
_MLP_OUT = re.compile(
    r"(fc2|c_proj|proj|fc_out|down|down_proj|w2|wo|lin2|linear2|dense_4h_to_h|out_proj|mlp_out|ffn_out|value|reduce|"
    r"output)"
)
_HEAD = re.compile(
    r"(lm_head|head|heads|classifier|proj_out|score|embed_out|cls|predictions|lm_predictions|pooler|qa_outputs|"
    r"(visual|text)_projection|generator|output(_layer)?|logits)"
)
_EMBEDDING = re.compile(r"\b(patch_?embed\w*|embed\w*|wte|stem|conv_in|to_patch\w*|input_proj\w*|feature_proj\w*)\b")
_STACK = re.compile(
    r"(encoder|decoder|vision|visual|text|language|audio|image)(_?(model|tower|backbone|encoder|decoder))?"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one layer stands.

    Attributes:
        role: a key of :data:`ROLES`; empty where nothing tells it.
        part: which of several layers of that role in one block: the last word of its name (``gate_proj``).
        stack: encoder, decoder, vision, ... where the model has several; empty for the only one.
        alike: its name with every component that is a number as ``*``: what it shares with its siblings elsewhere.
        rank, count: it is in the ``rank``-th (from 0) of the ``count`` blocks of its stack that have its role.
        block, blocks: it is in the ``block``-th (from 0) of the ``blocks`` beside each other; -1 and 0 outside of them.
        guess: where there is no role, the one that the GEMM's shape suggests: for a message, never for a match.
    """

    name: str
    role: str
    part: str
    stack: str
    alike: str
    rank: int = 0
    count: int = 1
    guess: str = ""
    block: int = -1
    blocks: int = 0


def parse_hints(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Read ``GLOB=ROLE`` hints, which come before what a name says.

    Raises:
        UsageError: not of that form.
        UnknownNameError: an unknown role.
    """
    out = []
    for text in texts:
        glob, equals, role = text.rpartition("=")
        if not equals or not glob:
            raise UsageError(f"'{text}' is not GLOB=ROLE", fix="e.g. --role 'blocks.*.ff_a=mlp.in'")
        if role not in ROLES:
            raise UnknownNameError("role", role, ROLES)
        out.append((glob, role))
    return out


def shown(names: Sequence[str]) -> str:
    """Return layer names in a few words: ``h.{0-3,11}.mlp.up``, those that differ in one number together."""
    runs: dict[str, list[int]] = {}
    for name in names:
        numbers = _NUMBER.findall(name)
        runs.setdefault(_NUMBER.sub("*", name), []).append(int(numbers[0]) if numbers else -1)
    out = []
    for alike, numbers in runs.items():
        first = sorted(set(numbers))
        out.append(alike.replace("*", _ranges(first), 1) if first != [-1] else alike)
    return ", ".join(out[:4]) + (f" and {len(out) - 4} more kinds" if len(out) > 4 else "")


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    texts = [str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts]
    text = ",".join(texts[:4]) + (",..." if len(texts) > 4 else "")
    return text if len(numbers) == 1 else f"{{{text}}}"


def places(layers: Sequence[Layer], hints: Sequence[tuple[str, str]] = ()) -> dict[str, Place]:
    """Return the place of every layer, in the order given.

    Args:
        layers: of one model, in model order.
        hints: ``(glob, role)``, first match wins over what the names say.
    """
    names = [layer.name for layer in layers]
    found = {layer.name: _place(layer, names, hints) for layer in layers}
    blocks, whole = _blocks(names), _whole_blocks(names)
    series: dict[tuple[str, str], dict[tuple[int, ...], int]] = {}
    beside: dict[str, dict[tuple[str, ...], int]] = {}
    for place in found.values():
        ranks = series.setdefault(_series(place), {})
        ranks.setdefault(blocks[place.name], len(ranks))
        if whole[place.name]:
            inside = beside.setdefault(_beside(whole[place.name]), {})
            inside.setdefault(whole[place.name], len(inside))
    out = {}
    for name, place in found.items():
        ranks, inside = series[_series(place)], beside.get(_beside(whole[name]), {})
        placed = replace(place, rank=ranks[blocks[name]], count=len(ranks))
        out[name] = replace(placed, block=inside[whole[name]], blocks=len(inside)) if whole[name] else placed
    return out


def _beside(block: tuple[str, ...]) -> str:
    """Return what blocks in a row share: ``model.layers``, or ``layer`` of ``layer1`` to ``layer4``."""
    return block[0].rpartition(".")[0].rstrip("0123456789") if block else ""


def _series(place: Place) -> tuple[str, str]:
    return place.stack, place.role or place.alike


def _blocks(names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return, per name, the numbers that count blocks: those with two layers or more under them, experts apart."""
    under = Counter(prefix for name in names for prefix, _ in _numbered(name))
    out = {}
    for name in names:
        levels = [(p, n) for p, n in _numbered(name) if not _EXPERT.search(p.rpartition(".")[0].rpartition(".")[2])]
        chosen = [n for p, n in levels if under[p] > 1] or [n for _, n in levels[:1]]
        out[name] = (_stage(name), *chosen)
    return out


def _whole_blocks(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return, per name, the prefixes of the blocks it lies in, outermost first; empty outside of all.

    The first number of a name counts blocks, whatever is in them (attention here, a mixer there). A later one does
    where what it counts is alike (the blocks of a stage), and not where it counts the parts of one block.
    """
    kinds: dict[str, set[str]] = {}
    for name in names:
        for prefix, _ in _numbered(name):
            kinds.setdefault(prefix, set()).add(_NUMBER.sub("*", name.removeprefix(prefix)))
    alike = Counter((prefix.rpartition(".")[0], frozenset(kind)) for prefix, kind in kinds.items())

    def counts(prefix: str) -> bool:
        above = prefix.rpartition(".")[0]
        return alike[above, frozenset(kinds[prefix])] > 1 and not _EXPERT.search(above.rpartition(".")[2])

    out = {}
    for name in names:
        first, *later = [prefix for prefix, _ in _numbered(name)] or [""]
        out[name] = (first, *filter(counts, later)) if first else ()
    return out


def _stage(name: str) -> int:
    """Return the number at the end of a word in the path: ``layer3.0.conv1`` is in stage 3."""
    found = re.match(r"(?:.*\.)?(?:layer|stage|block|res|down|up)_?(\d+)\.", name)
    return int(found.group(1)) if found else -1


def _numbered(name: str) -> list[tuple[str, int]]:
    parts = name.split(".")
    return [(".".join(parts[: i + 1]), int(part)) for i, part in enumerate(parts[:-1]) if part.isdigit()]


def _place(layer: Layer, names: Sequence[str], hints: Sequence[tuple[str, str]]) -> Place:
    words = [part for part in layer.name.split(".") if not part.isdigit()]
    part, alike = (words[-1] if words else ""), _NUMBER.sub("*", layer.name)
    stack = " ".join(dict.fromkeys(found[1] for word in words[:-1] if (found := _STACK.fullmatch(word.lower()))))
    hinted = next((role for glob, role in hints if glob_matches(glob, layer.name)), "")
    role = hinted or _role(layer, words, names)
    return Place(layer.name, role, part, stack, alike, guess="" if role else _by_shape(layer))


def _role(layer: Layer, words: Sequence[str], names: Sequence[str]) -> str:
    """Return the role that flags and names tell; empty for none."""
    leaf = words[-1].lower().removeprefix("linear_") if words else ""  # Megatron's linear_qkv
    above = words if layer.name.rpartition(".")[2].isdigit() else words[:-1]
    path = " ".join(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word).lower() for word in above)
    flat = " ".join(word.lower() for word in above)
    if "router" in layer.flags or _is_router(layer.name, leaf, flat, names):
        return "router"
    if layer.kind == "conv" and not _MIXER.search(path):
        return _conv_role(layer, leaf, flat)
    inside = any(part.isdigit() for part in layer.name.split(".")[:-1])
    if "head" in layer.flags or (not inside and any(_HEAD.fullmatch(word.lower()) for word in words)):
        return "head"
    for role, tells in _BY_PATH:
        if tells.search(path) or tells.search(flat):
            half = _half(role, leaf, layer.name, names)
            if half:
                return f"{role}.{half}"
    if not inside and (_EMBEDDING.search(flat) or _EMBEDDING.search(leaf) or "first" in layer.flags):
        return "embedding"
    return _bare(leaf, layer.name) if inside else ""


#: Word in the path -> half of a block, in order: the experts of an MLP are in an MLP too.
_BY_PATH = (
    ("shared_expert", _SHARED),
    ("expert", _EXPERT),
    ("mixer", _MIXER),
    ("cross_attention", _CROSS),
    ("attention", _ATTENTION),
    ("mlp", _MLP),
)


def _is_router(name: str, leaf: str, path: str, names: Sequence[str]) -> bool:
    if leaf in ("router", "shared_expert_gate") or "router" in path:
        return True
    beside = name.rpartition(".")[0]
    return leaf == "gate" and any(other.startswith(f"{beside}.") and ".experts" in other for other in names)


def _conv_role(layer: Layer, leaf: str, path: str) -> str:
    if re.search(r"shortcut|downsample|skip|residual", f"{path} {leaf}"):
        return "conv.shortcut"
    inside = any(part.isdigit() for part in layer.name.split(".")[:-1])
    if not inside and ("first" in layer.flags or _EMBEDDING.search(path) or _EMBEDDING.search(leaf)):
        return "embedding"
    return "conv"


def _half(role: str, leaf: str, name: str, names: Sequence[str]) -> str:
    """Return ``in``/``qkv`` or ``out`` (a mixer has ``inner``); empty where the last word tells neither."""
    if role in ("attention", "cross_attention"):
        if _QKV.fullmatch(leaf):
            return "qkv"
        known = re.fullmatch(r"(\w+_)?(o|out|output|dense|proj|wo|projection)(_proj|_lin)?|to_out|c_proj", leaf)
        return "out" if known else ""
    if role == "mixer":
        if leaf.startswith("in_proj"):
            return "in"
        return "out" if leaf.startswith(("out", "o_proj")) else "inner"
    return _mlp_half(leaf, name, names)


def _mlp_half(leaf: str, name: str, names: Sequence[str]) -> str:
    if name.rpartition(".")[2].isdigit():  # a Sequential: its first layer goes in, its last comes out
        beside = [other for other in names if other.rpartition(".")[0] == name.rpartition(".")[0]]
        return "in" if name == beside[0] and len(beside) > 1 else "out" if name == beside[-1] else ""
    if leaf == "dense":  # BERT: intermediate.dense, output.dense
        return "in" if re.search(r"\bintermediate\b", name) else "out"
    if _MLP_OUT.fullmatch(leaf):
        return "out"
    return "in" if _MLP_IN.fullmatch(leaf) else ""


def _bare(leaf: str, name: str) -> str:
    """Return the role of a layer that lies in its block directly: ``h.3.fc``, ``layer.3.output.dense``."""
    if re.search(r"\boutput\.dense$", name):
        return "mlp.out"
    first: tuple[tuple[str, Callable[[str], object]], ...] = (
        ("mlp.in", re.compile(r"fc1?|c_fc|gate|up|gate_proj|up_proj|w1|w3|lin1|linear1|fc_in|wi(_\d)?").fullmatch),
        ("mlp.out", re.compile(r"fc2|proj|down|down_proj|w2|lin2|linear2|fc_out").fullmatch),
        ("attention.qkv", _QKV.fullmatch),
        ("attention.out", re.compile(r"(to_)?(o|out)(_proj)?|wo|c_proj").fullmatch),
    )
    return next((role for role, tells in first if tells(leaf)), "")


def _by_shape(layer: Layer) -> str:
    """Guess the role of a layer in a block whose name says nothing, from its forward GEMM."""
    gemm = next((g for g in layer.gemms if g.role in ("fprop", "recompute")), None)
    if gemm is None or not any(part.isdigit() for part in layer.name.split(".")[:-1]):
        return ""
    if gemm.n == 3 * gemm.k:
        return "attention.qkv"
    if gemm.n == gemm.k:
        return "attention.out"
    return "mlp.in" if gemm.n > gemm.k else "mlp.out"
