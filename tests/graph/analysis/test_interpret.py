"""From the record to the report: bytes, roles, batch, notes, and a total that adds up."""

import torch
import torch.nn.functional as F
from torch import nn

from autoprec.graph.recorder import StepRecorder, record_step
from autoprec.graph.report import GraphReport
from tests.graph.models import BATCH, TOKENS, Decoder, decoder_step


def test_totals_are_those_of_the_operators():
    model = Decoder()
    report = record_step(model, lambda: decoder_step(model))
    assert report.total_flops == sum(operator.flops for operator in report.operators)
    tunable = sum(layer.total_flops for layer in report.tunable)
    assert report.tunable_flops_share == tunable / report.total_flops


def test_views_move_no_bytes_and_other_operators_each_tensor_once():
    model = nn.Linear(4, 4, bias=False)

    def step():
        y = model(torch.randn(2, 4))
        (y * y).sum().backward()

    rows = {o.op.partition("::")[2]: o for o in record_step(model, step).operators if o.phase == "forward"}
    assert rows["t"].bytes == 0
    assert rows["mul"].bytes == 2 * (2 * 4 * 4)  # y is read twice and counted once, and the result


def test_samples_and_tokens_of_the_batch():
    model = Decoder()
    assert record_step(model, lambda: decoder_step(model)).batch == {"samples": BATCH, "tokens": BATCH * TOKENS}
    plain, x = nn.Linear(4, 4), torch.randn(5, 4)
    assert record_step(plain, lambda: plain(x).sum().backward()).batch == {"samples": 5, "tokens": 5}

    def accumulated():
        for _ in range(3):
            plain(x).sum().backward()

    assert record_step(plain, accumulated).batch["samples"] == 15


def test_whether_the_update_could_be_fused():
    model = nn.Linear(4, 4)

    def could(*optimizers):
        report = record_step(model, lambda: model(torch.randn(2, 4)).sum().backward(), optimizers=optimizers)
        assert GraphReport.from_json(report.to_json()).can_fuse is report.can_fuse
        return report.can_fuse, report.fused_update

    adam, rms = torch.optim.AdamW(model.parameters()), torch.optim.RMSprop(model.parameters())
    assert could(adam) == (True, False)
    assert could(torch.optim.AdamW(model.parameters(), fused=True)) == (False, True)
    assert could(rms) == could() == (False, False)
    assert could(adam, rms) == could(rms, adam) == (True, False)


def test_what_could_not_be_seen_is_noted():
    model = nn.Linear(4, 4)
    report = record_step(model, lambda: model(torch.randn(2, 4)))
    assert report.notes == ("no backward pass was recorded",)


def test_a_group_holds_only_layers_that_can_be_decided():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    x = torch.randn(2, 4)
    with StepRecorder(model) as recorder:
        (model["a"](x) + model["b"](x)).sum().backward()
    report = recorder.report()
    assert report.groups == {"{a,b}": ("a", "b")}
    assert not report.layer("unused").tunable


def test_a_model_whose_parts_are_called_and_never_itself_is_noted():
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Linear(8, 4)

    agent = Agent()
    report = record_step(agent, lambda: agent.actor(torch.randn(2, 8)).sum().backward())
    assert not report.root_called
    assert any("only its parts are" in note for note in report.notes)
    assert GraphReport.from_json(report.to_json()) == report
    whole = record_step(agent.actor, lambda: agent.actor(torch.randn(2, 8)).sum().backward())
    assert whole.root_called
    assert not whole.notes


def test_logits_on_their_way_to_the_loss_are_the_output():
    model = Decoder()

    def step():
        ids, targets = torch.randint(48, (BATCH, TOKENS)), torch.randint(48, (BATCH * TOKENS,))
        logits = 30.0 * torch.tanh(model(ids).bfloat16().float() / 30.0)
        F.cross_entropy(logits.flatten(0, 1), targets).backward()

    report = record_step(model, step)
    found = [o.op.partition("::")[2] for o in report.operators if o.cls == "output"]
    assert found == ["_to_copy", "_to_copy", "div", "tanh", "mul"]
    assert {o.precision for o in report.operators if o.cls == "output"} == {"fp32"}
    (head,) = [o for o in report.operators if o.pattern == "output"]
    assert (head.cls, head.precision, head.module, head.role) == ("gemm", "tunable", "head", "fprop")
    assert "its result is the model's output" in head.reason
