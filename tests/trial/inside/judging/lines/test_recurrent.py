"""Recurrent layers under autocast: which of them keep their state in FP32."""

import warnings

import pytest

from benchmarks.precision.running import found_in_text

SCRIPT = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = {layer}, nn.Linear(16, 4)
    def forward(self, x):
        {run}  # here
        return self.head(h)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(2):
    with torch.autocast("cpu", torch.bfloat16, enabled={on}):
        loss = net(torch.randn(5, 3, 8)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WHOLE = "h = self.rnn(x)[0]"
CELL = "h = x.new_zeros(3, 16)\n        for t in x: h = self.rnn(t, h)"
PACKED = "h = self.rnn(pack_sequence([x[:, 0], x[:3, 1]]))[0].data"


def told(layer: str, run: str, on: bool) -> list[tuple[str, str, str]]:
    text = SCRIPT.format(layer=layer, run=run, on=on)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of LSTMs
        found = found_in_text(text)
    lines = text.splitlines()
    return [(one.code, one.message, lines[int(one.place.rpartition(":")[2]) - 1].strip()) for one in found]


@pytest.mark.parametrize(
    ("layer", "run"),
    [
        ("nn.GRU(8, 16)", WHOLE),
        ("nn.GRU(8, 8, 2, bidirectional=True)", WHOLE),
        ("nn.GRU(8, 16)", PACKED),
        ("nn.LSTM(8, 16)", PACKED),
        ("nn.GRUCell(8, 16)", CELL),
        ("nn.LSTMCell(8, 16)", "h = self.rnn(x[0])[0]"),
    ],
)
def test_a_state_that_stays_in_fp32_is_a_note(layer: str, run: str) -> None:
    ((code, message, line),) = told(layer, run, on=True)
    kind = layer.partition("(")[0].removeprefix("nn.")
    assert (code, line) == ("recurrent-fp32", run.splitlines()[-1].strip() + "  # here")
    assert message.startswith(f"a {kind} keeps its state in fp32 under autocast to bf16, and returns fp32: ")
    assert "its products run in bf16" in message


@pytest.mark.parametrize(
    ("layer", "run", "on"),
    [
        ("nn.GRU(8, 16)", WHOLE, False),
        ("nn.GRU(8, 16)", "h = self.rnn(x.to(torch.bfloat16))[0]", True),  # as the note says
        ("nn.LSTM(8, 16)", WHOLE, True),
        ("nn.RNN(8, 16)", WHOLE, True),
        ("nn.RNNCell(8, 16)", CELL, True),
        ("nn.Linear(8, 16)", "h = self.rnn(x)", True),
    ],
)
def test_a_state_that_is_lowered_or_has_no_autocast_is_not_noted(layer: str, run: str, on: bool) -> None:
    assert told(layer, run, on) == []
