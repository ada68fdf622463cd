"""Names of layers in short, and which layers are not among them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoprec.policy.known_layers import known_layers, unknown_layers

NAMES = st.lists(st.lists(st.sampled_from(["mlp", "fc", "0", "1", "7", "12"]), min_size=1, max_size=4).map(".".join))


@given(names=NAMES, others=NAMES)
def test_what_was_seen_is_known_and_other_kinds_are_not(names: list[str], others: list[str]) -> None:
    known = known_layers(names)
    assert unknown_layers(names, known) == []
    assert known_layers(known) == known
    assert len(known) <= len(set(names))
    kinds = {tuple(part.isdigit() or part for part in name.split(".")) for name in names}
    new = [name for name in others if tuple(part.isdigit() or part for part in name.split(".")) not in kinds]
    assert set(new) <= set(unknown_layers(others, known))


def test_blocks_are_ranges() -> None:
    names = [f"h.{i}.{part}" for i in range(12) for part in ("attn.c_attn", "mlp.c_fc")] + ["lm_head", ""]
    assert known_layers(names) == ("h.0-11.attn.c_attn", "h.0-11.mlp.c_fc", "lm_head", "")
    assert unknown_layers(["h.11.mlp.c_fc", "h.12.mlp.c_fc", "h.3.lora_a", "lm_head", ""], known_layers(names)) == [
        "h.12.mlp.c_fc",
        "h.3.lora_a",
    ]
