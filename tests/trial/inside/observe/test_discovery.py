"""Finding the model by whose parameters are trained."""

from __future__ import annotations

import copy

import torch
from torch import nn

from autoprec.trial.inside.observe.discovery import batch_size, discover, holds_copies, is_running, loss_parameters


class Unusual(nn.Module):
    """Its own class, so that other tests' modules cannot be taken for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)


def test_an_ema_copy_is_left_alone() -> None:
    model = Unusual()
    ema = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = discover([optimizer])
    assert found is not None
    assert found.roots == [model]
    assert found.root is not ema
    assert found.optimizers == [optimizer]
    assert len(found.parameters) == len(found.root_parameters) == 2


class Averaged(nn.Module):
    """As ``ema_pytorch.EMA``: the model that is trained is a child, beside its average."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.online_model, self.ema_model = model, copy.deepcopy(model).requires_grad_(False)


def test_the_model_inside_an_ema_wrapper_is_the_model() -> None:
    model = nn.Sequential(Unusual(), Unusual())
    whole = Averaged(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for called in (None, model, model[0], whole.online_model):
        found = discover([optimizer], called=called)
        assert found is not None
        assert found.roots == [model]
        assert found.notes == []
    found = discover([optimizer], called=whole)  # a teacher and its student, called together
    assert found is not None
    assert found.roots == [whole]


def test_a_frozen_part_of_another_shape_is_part_of_the_model() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(3, 5).requires_grad_(False), "head": Unusual()})
    found = discover([torch.optim.SGD(model["head"].parameters(), lr=0.1)])
    assert found is not None
    assert found.root is model


def test_two_models_are_ordered_by_size() -> None:
    small, large = Unusual(), nn.Sequential(Unusual(), Unusual())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (small, large)]
    found = discover(optimizers)
    assert found is not None
    assert found.roots == [large, small]
    assert found.optimizers == optimizers[::-1]
    assert "several models" in " ".join(found.notes)
    assert len(found.root_parameters) == 4


def test_wrappers_are_looked_through() -> None:
    model = Unusual()
    wrapped = torch.compile(model, backend="eager")
    found = discover([torch.optim.SGD(wrapped.parameters(), lr=0.1)])
    assert found is not None
    assert found.root is model


def test_without_an_optimizer_the_loss_tells() -> None:
    model = Unusual()
    leaves = loss_parameters([model.layer(torch.ones(1, 3)).sum()])
    found = discover((), loss_leaves=leaves)
    assert found is not None
    assert found.backward_only
    assert found.root is model


def test_nothing_owned_is_nothing_found() -> None:
    assert discover([torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)]) is None


def test_batch_size() -> None:
    tokens = torch.zeros(4, 16, dtype=torch.long)
    assert batch_size((tokens,), {}) == 4
    assert batch_size((), {"mask": torch.ones(4, 16), "input_ids": tokens}) == 4
    assert batch_size((torch.zeros(8, 3, 2, 2),), {}) == 8
    assert batch_size(([torch.tensor(1.0)],), {"n": 3}) == 0


def test_an_optimizer_of_copies_is_told_from_one_of_something_else() -> None:
    weights = list(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).parameters())
    copies = [p.detach().float().requires_grad_() for p in weights]
    flat = torch.cat([p.detach().reshape(-1) for p in weights]).requires_grad_()
    picture = torch.zeros(3, 8, 8, requires_grad=True)  # trained through a model whose own weights nobody freezes

    def holds(*trained: torch.Tensor) -> bool:
        return holds_copies([torch.optim.SGD(trained, lr=0.1)], weights)

    assert holds(*copies)
    assert holds(*copies[:1])
    assert holds(flat)
    assert not holds(*copies[1:2])
    assert not holds(picture)


def test_a_models_forward_is_on_the_stack_only_while_it_runs() -> None:
    """``agent.actor(x)`` calls a part: what surrounds the agent's own forward must not be taken to run."""
    seen: list[bool] = []

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor = nn.Linear(4, 2)
            self.actor.register_forward_pre_hook(lambda *_: seen.append(is_running(self)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x)

        def act(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.actor(x)
            return out

    agent = Agent()
    agent(torch.randn(2, 4))
    agent.act(torch.randn(2, 4))
    assert seen == [True, False]
