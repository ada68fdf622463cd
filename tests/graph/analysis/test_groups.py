"""Groups: found from the graph, named readably."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from autoprec.graph.analysis.groups import group_name, merge, named
from autoprec.graph.recorder import record_step
from tests.graph.models import Decoder, decoder_step


def report():
    torch.manual_seed(0)
    model = Decoder()
    return record_step(model, lambda: decoder_step(model))


def test_siblings_that_read_one_tensor_move_together():
    groups = report().groups
    assert groups["blocks.0.attn.{q_proj,k_proj,v_proj}"] == tuple(f"blocks.0.attn.{x}_proj" for x in "qkv")
    assert groups["blocks.1.{gate,up}"] == ("blocks.1.gate", "blocks.1.up")
    assert groups["head"] == ("head",)


def test_cross_attention_of_different_blocks_is_not_one_group():
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleDict({"k": nn.Linear(8, 8), "v": nn.Linear(8, 8)}) for _ in range(2))

        def forward(self, memory):
            return sum(layer["k"](memory) + layer["v"](memory) for layer in self.layers)

    model = Net()
    found = record_step(model, lambda: model(torch.randn(3, 8)).sum().backward()).groups
    assert set(found.values()) == {("layers.0.k", "layers.0.v"), ("layers.1.k", "layers.1.v")}


def test_layers_that_share_a_weight_move_together():
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).relu())

    model = Net()
    found = record_step(model, lambda: model(torch.randn(3, 8)).sum().backward()).groups
    assert found == {"{a,b}": ("a", "b")}


def test_every_group_has_a_name_of_its_own():
    found = named([("a.0.w", "a.1.w"), ("a.2.w", "a.3.w"), ("b",)])
    assert found == {"a.*.w": ("a.0.w", "a.1.w"), "a.*.w'": ("a.2.w", "a.3.w"), "b": ("b",)}


def test_names_are_unique_and_short():
    assert group_name(["a.0.w", "a.1.w"]) == "a.*.w"
    assert group_name(["a.q", "a.k"]) == "a.{q,k}"
    assert group_name(["a.b.q", "a.k"]) == "a.{b.q,k}"
    assert group_name([f"a.x{i}" for i in range(9)]) == "a.{x0,...,x8}"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_merge_is_a_partition_in_order(pairs):
    names = [str(i) for i in range(10)]
    sets = merge(names, [(str(a), str(b)) for a, b in pairs])
    assert sorted(n for members in sets for n in members) == names
    assert all(list(members) == sorted(members) for members in sets)
    where = {n: index for index, members in enumerate(sets) for n in members}
    assert all(where[str(a)] == where[str(b)] for a, b in pairs)
