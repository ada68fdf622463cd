"""The patches: complete, and off again without a trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoprec.trial.inside.observe.hooks import Events, Hooks, raw_loss


class Log(Events):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def before_backward(self, tensors: Any) -> None:
        self.seen.append(f"backward {float(raw_loss(tensors[0]).detach()):g}")

    def before_closure(self, optimizer: Any, call: int) -> None:
        self.seen.append(f"closure {call}")

    def gradients_ready(self, optimizer: Any) -> None:
        self.seen.append("ready")

    def after_step(self, optimizer: Any) -> None:
        self.seen.append("step")

    def skipped_step(self, optimizer: Any) -> None:
        self.seen.append("skipped")

    def clipped(self, parameters: Any, norm: Any, max_norm: float) -> None:
        self.seen.append(f"clip {max_norm:g}")


def test_events_of_a_plain_step_a_closure_and_a_scaler() -> None:
    before = (nn.Module.__call__, torch.autograd.backward, torch.optim.Optimizer.__init__, torch.amp.GradScaler.step)
    hooks, log = Hooks(), Log()
    hooks.install()
    hooks.events = log
    try:
        weight = nn.Parameter(torch.tensor(2.0))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        assert hooks.optimizers == [optimizer]
        (weight * 3).backward()
        nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
        assert log.seen == ["backward 6", "clip 1", "ready", "step"]
        log.seen.clear()

        def closure() -> torch.Tensor:
            loss = weight * 1
            loss.backward()
            return loss

        optimizer.step(closure)
        assert log.seen == ["closure 1", "backward 2", "ready", "step"]
        log.seen.clear()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer.zero_grad()
        scaler.scale(weight * float("inf")).backward()
        scaler.step(optimizer)
        assert log.seen == ["backward inf", "skipped"]
        log.seen.clear()
        scaler.update()
        optimizer.zero_grad()
        scaler.scale(weight * 1).backward()  # the raw loss, not the scaled one
        scaler.step(optimizer)
        assert log.seen == ["backward 2", "ready", "step"]
    finally:
        hooks.remove()
    after = (nn.Module.__call__, torch.autograd.backward, torch.optim.Optimizer.__init__, torch.amp.GradScaler.step)
    assert before == after


def test_watching_sees_training_calls_only_and_ends() -> None:
    hooks, seen = Hooks(), []
    original = nn.Module.__call__
    model = nn.Sequential(nn.Linear(2, 2))
    hooks.watch(lambda module, args, kwargs: seen.append(type(module).__name__))
    try:
        model.eval()(torch.ones(1, 2))
        with torch.no_grad():
            model.train()(torch.ones(1, 2))
        assert seen == []
        model(torch.ones(1, 2))
        assert seen == ["Sequential", "Linear"]
    finally:
        hooks.unwatch()
    assert nn.Module.__call__ is original


def test_reentrant_checkpointing_is_one_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    hooks, log = Hooks(), Log()
    hooks.install()
    hooks.events = log
    try:
        x = torch.ones(2, requires_grad=True)
        checkpoint(lambda z: z * 2, x, use_reentrant=True).sum().backward()
    finally:
        hooks.remove()
    assert log.seen == ["backward 4"]
    assert hooks.backwards == 1


def test_what_the_watcher_calls_itself_is_not_watched() -> None:
    hooks, model = Hooks(), nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    seen: list[nn.Module] = []

    def looking(module: nn.Module, *_: Any) -> None:
        seen.append(module)
        assert model[0].weight.shape == (2, 2)  # computed by a module: this would never end

    hooks.watch(looking)
    try:
        model(torch.ones(1, 2))
    finally:
        hooks.remove()
    assert seen[:2] == [model, model[0]]


def test_an_optimizer_that_another_one_steps_for_is_not_one_of_them() -> None:
    """SAM and Lookahead are optimizers themselves, and the one that they hold updates the weights."""

    class Sam(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"rho": 0.05})
            self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)
            self.param_groups = self.base_optimizer.param_groups

    hooks = Hooks()
    hooks.install()
    try:
        model = nn.Linear(2, 2)
        sam, other = Sam(model.parameters()), torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
        other.beside = sam  # type: ignore[attr-defined]  # which trains other parameters
        assert hooks.optimizers == [sam.base_optimizer, other]
    finally:
        hooks.remove()
