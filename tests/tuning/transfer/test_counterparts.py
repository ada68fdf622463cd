"""Which layer of a small model stands where one of a large model stands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.graph.roles import Place, places
from autoprec.tuning.transfer.counterparts import Edges, counterparts, edges_of
from tests.graph.test_roles import layer


def model(blocks: int, *leaves: str, head: str = "head") -> dict[str, Place]:
    return places([*(layer(f"h.{b}.{leaf}") for b in range(blocks) for leaf in leaves), layer(head)])


def test_the_first_and_the_last_block_stay_first_and_last() -> None:
    small, big = model(4, "fc1"), model(32, "fc1")
    choices = {"h.0.fc1": "bf16", "h.1.fc1": "fp8", "h.2.fc1": "fp8", "h.3.fc1": "bf16"}
    found = counterparts(big, small, choices).of
    assert [name for name in big if choices.get(found[name]) == "bf16"] == ["h.0.fc1", "h.31.fc1"]
    assert found["head"] == "head"


def test_what_is_not_an_edge_goes_by_relative_depth() -> None:
    small, big = model(4, "fc1"), model(32, "fc1")
    choices = {f"h.{i}.fc1": "bf16" if i < 2 else "fp8" for i in range(4)}
    found = counterparts(big, small, choices).of
    assert [choices[found[f"h.{i}.fc1"]] for i in range(32)] == ["bf16"] * 16 + ["fp8"] * 16


@pytest.mark.parametrize(
    ("runs", "edges"),
    [("aaaa", (0, 0)), ("abbb", (1, 0)), ("abba", (1, 1)), ("bbba", (0, 1)), ("aabbbbb", (2, 0)), ("aabb", (0, 0))],
)
def test_edges_are_short_runs_at_the_ends(runs: str, edges: tuple[int, int]) -> None:
    assert edges_of(dict(enumerate(runs))) == Edges(*edges)


@given(st.integers(1, 12), st.integers(1, 100), st.integers(0, 3), st.integers(0, 3))
def test_ranks_keep_their_order_and_stay_in_range(small: int, big: int, front: int, back: int) -> None:
    ranks = [Edges(front, back).rank(rank, big, small) for rank in range(big)]
    assert all(0 <= rank < small for rank in ranks)
    assert big < front + back or ranks == sorted(ranks)


def test_fused_and_split_projections_are_the_same_place() -> None:
    split, fused = model(2, "attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc1"), model(4, "attn.c_attn", "mlp.c_fc")
    assert counterparts(split, fused, {}).of["h.1.attn.k_proj"] == "h.3.attn.c_attn"
    assert counterparts(fused, split, {}).of["h.3.attn.c_attn"].startswith("h.1.attn.")
    assert counterparts(fused, split, {}).of["h.0.mlp.c_fc"] == "h.0.mlp.fc1"


def test_a_namesake_is_a_counterpart_without_a_role_and_a_stranger_is_alone() -> None:
    small, big = model(2, "odd"), model(4, "odd", "strange")
    found = counterparts(big, small, {})
    assert found.of["h.3.odd"] == "h.1.odd"
    assert found.alone == tuple(f"h.{i}.strange" for i in range(4))
