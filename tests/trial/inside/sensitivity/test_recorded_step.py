"""A recorded step gives the same gradients again, and changes nothing that the script holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.trial.inside.sensitivity.recorded_step import RecordedStep


class Recorded(RecordedStep):
    """Learns of every backward pass, as from the hooks of a trial."""

    def start(self) -> None:
        self._backward = torch.autograd.backward

        def backward(tensors: Tensor, *args: Any, **kwargs: Any) -> None:
            self.before_backward((tensors,) if isinstance(tensors, Tensor) else tuple(tensors))
            self._backward(tensors, *args, **kwargs)
            self.after_backward()

        torch.autograd.backward = backward  # type: ignore[assignment]
        super().start()

    def stop(self) -> None:
        torch.autograd.backward = self._backward
        super().stop()


def test_two_micro_batches_are_played_again_and_a_sum_of_losses_is_not() -> None:
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), nn.Linear(2, 2)
    total = torch.zeros(())
    step = Recorded(model.parameters(), torch.device("cpu"))
    step.start()
    seen = 0.0
    for _ in range(2):
        out = model(torch.randn(3, 4))
        loss = (out * 2.0).square().mean()
        total += loss.detach()
        loss.backward()
        seen += float(loss.detach())
    other(torch.randn(3, 2)).sum().backward()  # another model, in turns with this one
    step.stop()
    step.stop()
    first, before = [p.grad.clone() for p in model.parameters()], float(total)
    others = other.weight.grad.clone()
    for parameter in model.parameters():
        parameter.grad = None
    assert abs(step.play() - seen) < 1e-6
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), first, strict=True))
    assert float(total) == before
    assert torch.equal(other.weight.grad, others)
    step.forget()
    with pytest.raises(RuntimeError, match="no loss"):
        step.play()


def test_a_forward_that_was_replaced_is_given_back() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    own = model[0].forward
    model[0].forward = own  # as accelerate does
    step = Recorded(model.parameters(), torch.device("cpu"), model.modules())
    step.start()
    model.forward(torch.randn(3, 4)).sum().backward()
    step.stop()
    before = model[0].weight.grad.clone()
    model.zero_grad()
    step.play()
    assert torch.equal(model[0].weight.grad, before)
    assert vars(model[0])["forward"] is own
    assert "forward" not in vars(model)


Losses = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _regularised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) + 0.01 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


def _accumulated(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, total = model(x), torch.zeros(())
    total += out.square().mean()
    total += F.cross_entropy(out, y)
    total /= 2
    return total


def _written_into_elements(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, losses = model(x), torch.ones(3)
    losses[0] = out.square().mean()
    losses[1] += F.cross_entropy(out, y)
    return losses.sum()


def _copied_into_a_buffer(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.zeros(5, 3)
    buffer.copy_(model(x))
    return F.cross_entropy(buffer, y)


def _towards_its_own_output(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    with torch.no_grad():
        target = out.softmax(-1) * F.one_hot(y, 3)
    return F.cross_entropy(out, target)


def _after_another_model(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    encoder = nn.Linear(4, 4)
    return F.cross_entropy(model(encoder(x).tanh()), y)


def _gradient_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + gradient.norm(2)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda model, x, y: F.cross_entropy(model(x), y),
        _regularised,
        _accumulated,
        _written_into_elements,
        _copied_into_a_buffer,
        _towards_its_own_output,
        _after_another_model,
        _gradient_penalty,
    ],
)
def test_losses_as_scripts_write_them_are_played_with_the_same_gradients(loss_of: Losses) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    step = Recorded(model.parameters(), torch.device("cpu"))
    x, y = torch.empty(5, 4), torch.empty(5, dtype=torch.long)
    step.start()
    for _ in range(2):  # the second batch is loaded into the memory of the first
        loss_of(model, x.normal_(), y.random_(0, 3)).backward()
    step.stop()
    y.zero_()
    first = [p.grad.clone() for p in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        step.play()
        for parameter, gradient in zip(model.parameters(), first, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


class _Masked(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + mask


def test_a_mask_that_all_blocks_see_is_copied_once_and_again_where_its_memory_was_written() -> None:
    blocks = nn.ModuleList(_Masked(4, 4) for _ in range(4))
    memory = np.ones((3, 4), dtype=np.float32)
    mask, x = torch.from_numpy(memory), torch.randn(3, 4)
    step = Recorded(blocks.parameters(), torch.device("cpu"))
    step.start()
    for index, block in enumerate(blocks):
        memory[:] += index == 2  # torch does not see that
        x = block(x, mask)
    x.square().mean().backward()
    step.stop()
    calls = [call for call in step._micros[0].calls if call.random is not None]
    assert len({call.args[1].data_ptr() for call in calls}) == 2
    first = [p.grad.clone() for p in blocks.parameters()]
    blocks.zero_grad()
    step.play()
    assert all(torch.equal(p.grad, g) for p, g in zip(blocks.parameters(), first, strict=True))


def test_a_function_that_writes_what_it_is_given_by_name_is_played() -> None:
    model = nn.Linear(4, 4)
    step = Recorded(model.parameters(), torch.device("cpu"))
    step.start()
    torch.relu_(input=model(torch.randn(3, 4))).sum().backward()
    step.stop()
    first = model.weight.grad.clone()
    model.zero_grad()
    step.play()
    assert torch.equal(model.weight.grad, first)


def test_a_model_behind_this_one_keeps_its_gradients_and_its_running_statistics() -> None:
    """A generator that is played again must not train the discriminator."""
    torch.manual_seed(0)
    model, judge = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    step = Recorded(model.parameters(), torch.device("cpu"))
    step.start()
    judge(model(torch.randn(5, 4))).mean().backward()
    step.stop()
    kept = [p.grad.clone() for p in judge.parameters()] + [b.clone() for b in judge.buffers()]
    step.play()
    now = [p.grad for p in judge.parameters()] + list(judge.buffers())
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


def test_a_loss_whose_way_was_not_seen_is_refused() -> None:
    model = nn.Linear(4, 3)
    step = Recorded(model.parameters(), torch.device("cpu"))
    hidden = model.weight.square().sum()  # before the recording began
    step.start()
    (model(torch.randn(5, 4)).mean() + hidden).backward()
    step.stop()
    with pytest.raises(RuntimeError, match="second time"):
        step.play()


def _two_backwards(model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    out.square().mean().backward()


def _two_forwards_first(model: nn.Module, x: Tensor, y: Tensor) -> None:
    one, two = F.cross_entropy(model(x), y), model(2 * x).square().mean()
    one.backward()
    two.backward()


def _a_state_is_handed_on(model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    F.cross_entropy(out, y).backward()
    carried = out.detach().tanh()
    F.cross_entropy(model(x + carried.mean()), y).backward()


@pytest.mark.parametrize("train", [_two_backwards, _two_forwards_first, _a_state_is_handed_on])
def test_several_backward_passes_are_played_with_the_same_gradients(train: Callable[..., None]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    step = Recorded(model.parameters(), torch.device("cpu"))
    step.start()
    for _ in range(2):
        train(model, torch.randn(5, 4), torch.randint(0, 3, (5,)))
    step.stop()
    first = model.weight.grad.clone()
    for _ in range(2):
        model.zero_grad()
        step.play()
        torch.testing.assert_close(model.weight.grad, first)


def test_what_a_micro_batch_made_is_let_go_when_its_backward_has_ended() -> None:
    """Logits of a language model are larger than all that is kept of a step beside them."""
    model = nn.Linear(4, 1000)
    step = Recorded(model.parameters(), torch.device("cpu"))
    held: list[weakref.ref[Tensor]] = []
    step.start()
    for _ in range(3):
        out = model(torch.randn(5, 4))
        wide = out.float() * 2
        held += [weakref.ref(out), weakref.ref(wide)]
        F.cross_entropy(wide, torch.randint(0, 1000, (5,))).backward()
        del out, wide
        assert all(ref() is None for ref in held)
    step.stop()
    first = model.weight.grad.clone()
    model.zero_grad()
    step.play()
    assert torch.equal(model.weight.grad, first)


def test_no_memory_for_a_copy_ends_the_recording_and_not_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3)
    step = Recorded(model.parameters(), torch.device("cpu"))
    step.start()

    def full(_value: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    model(torch.randn(5, 4)).sum().backward()
    monkeypatch.setattr(step, "_copy_of", full)
    for _ in range(2):
        F.cross_entropy(model(torch.randn(5, 4)), torch.randint(0, 3, (5,))).backward()
    step.stop()
    assert step.failed == "OutOfMemoryError: no room"
    with pytest.raises(RuntimeError, match="no room"):
        step.play()


def test_a_device_that_the_script_chose_stays_chosen_in_the_recorded_step() -> None:
    class Positions(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.arange(3).device.type
            return super().forward(x)

    model = Positions(4, 3)
    step = Recorded(model.parameters(), torch.device("cpu"))
    step.start()
    with torch.device("meta"):
        out = model(torch.randn(5, 4, device="cpu"))
        assert model.seen == torch.empty(1).device.type == "meta"
        step.stop()
        assert torch.empty(1).device.type == "meta"
    assert torch.empty(1).device.type == out.device.type == "cpu"


def test_a_compiled_step_is_recorded_as_eager_code() -> None:
    model = nn.Linear(4, 3)

    @torch.compile(backend="eager")
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def backward() -> None:
        loss_of(torch.randn(5, 4), torch.randint(0, 3, (5,))).backward()

    backward()
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    step = Recorded(model.parameters(), torch.device("cpu"))
    model.zero_grad()
    step.start()
    backward()
    step.stop()
    first = model.weight.grad.clone()
    model.zero_grad()
    step.play()
    torch.testing.assert_close(model.weight.grad, first)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    backward()


def test_the_loss_of_a_discriminator_that_is_given_detached_samples_is_not_the_generators() -> None:
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    step = Recorded(generator.parameters(), torch.device("cpu"))
    step.start()
    fake = generator(torch.randn(3, 4))
    F.softplus(discriminator(fake.detach())).mean().backward()
    mine = F.softplus(-discriminator(fake)).mean()
    mine.backward()
    step.stop()
    expected = generator.weight.grad.clone()
    generator.zero_grad()
    assert step.play() == pytest.approx(float(mine.detach()))
    assert torch.equal(generator.weight.grad, expected)
