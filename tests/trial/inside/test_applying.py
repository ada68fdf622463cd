from types import SimpleNamespace

import torch
from torch import nn

from autoprec.optim.tensor import StoredTensor
from autoprec.trial.inside.applying import apply_document, state_seen, watch_state
from tests.levels import LEVELS


def found() -> SimpleNamespace:
    root = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return SimpleNamespace(root=root, optimizers=[torch.optim.AdamW(root.parameters())])


def train(item: SimpleNamespace, steps: int) -> None:
    for _ in range(steps):
        item.optimizers[0].zero_grad()
        item.root(torch.randn(2, 8, generator=torch.Generator().manual_seed(0))).float().square().sum().backward()
        item.optimizers[0].step()


def test_no_document_changes_nothing() -> None:
    item = found()
    assert apply_document(None, item, "auto") is None
    assert watch_state(None, item, 10) == []
    assert type(item.root[0].weight) is nn.Parameter


def test_a_level_is_applied_to_model_and_optimizer_watched_and_audited() -> None:
    item = found()
    policy = apply_document(LEVELS["msamp-o2"].to_dict(), item, "auto")
    monitors = watch_state(policy, item, 12)
    train(item, 12)
    assert isinstance(item.root[0].weight, StoredTensor)
    seen = state_seen(policy, item, monitors)
    assert (seen.penalty, seen.problems) == (0, ())
    assert monitors[0].report().watched == 6
    assert all(row["ok"] for row in seen.audit.values())


def test_a_policy_without_low_state_is_not_watched() -> None:
    item = found()
    policy = apply_document(LEVELS["amp-bf16"].to_dict(), item, "auto")
    assert watch_state(policy, item, 12) == []
    train(item, 1)
    seen = state_seen(policy, item, [])
    assert seen.penalty == 0
    assert all(row["ok"] for row in seen.audit.values())
