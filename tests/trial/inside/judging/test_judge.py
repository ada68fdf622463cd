"""The course of judging: faulty scripts are named by line and kind, and what the finding says cures them."""

import json
import os
import time
import traceback
from pathlib import Path

import pytest
import torch

from autoprec.graph.report import GraphReport
from autoprec.graph.trace import dtype_name
from autoprec.trial.inside.judging import shadow
from autoprec.trial.inside.judging.judge import Judge, broken_backward
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.tuning.lint.judged import CODES
from benchmarks.precision.running import Fault, corpus, found_in_text, judged

FAULTS = {fault.path.stem: fault for fault in corpus()}
#: One script of each kind; the others are judged by ``python -m benchmarks.precision.table``.
QUICK = (
    "a_backward_that_autocast_breaks",
    "a_fourier_layer",
    "a_module_that_asks_for_float32",
    "a_scaler_of_each_step_in_float16",
    "a_scaler_with_bfloat16",
    "adam_s_epsilon_in_float16",
    "autocast_around_the_loop",
    "batch_norm_in_bfloat16",
    "clipping_by_hand_before_unscaling",
    "float16_autocast_without_a_scaler",
    "foreach_and_warmup_on_bfloat16_weights",
    "gradients_reduced_in_bfloat16",
    "gradients_summed_in_bfloat16",
    "gumbel_noise_in_bfloat16",
    "learning_rate_below_half_an_ulp",
    "loss_over_bfloat16_logits",
    "moving_average_in_bfloat16",
    "rms_norm_by_hand_in_bfloat16",
    "rotary_frequencies_cast_with_the_model",
    "rotary_positions_of_the_model_s_dtype",
    "second_moment_in_bfloat16",
    "softmax_by_hand_in_bfloat16",
    "sum_of_squares_in_float16",
    "switch_router_in_bfloat16",
    "the_optimizer_steps_before_unscaling",
    "variance_by_difference_in_bfloat16",
    "weight_decay_by_hand_in_bfloat16",
)


def test_the_quick_ones_are_of_every_kind_that_this_device_can_show() -> None:
    assert len(FAULTS) >= 40
    assert {FAULTS[name].code for name in QUICK} == set(CODES) - {"recurrent-fp32"}
    cured = {FAULTS[name].code for name in QUICK if FAULTS[name].cures}
    assert cured == set(CODES) - {"recurrent-fp32", "wide-part", "angles-16bit"}  # every code that may be an error


@pytest.mark.filterwarnings("ignore")  # the scripts' own
@pytest.mark.parametrize("name", QUICK)
def test_line_and_kind_are_named_and_the_fix_cures_it(name: str) -> None:
    fault: Fault = FAULTS[name]
    found = found_in_text(fault.path.read_text())
    named = [(one.code, int(one.place.rpartition(":")[2])) for one in found]
    assert any(code == fault.code and line in fault.lines for code, line in named), named
    assert all(one.message and one.fix and "{" not in one.message for one in found)
    if fault.cures:
        assert fault.code not in {one.code for one in found_in_text(fault.cured())}


PLAIN = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range({steps}):
    loss = net(torch.randn(8, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
"""


LOW = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8)).to(torch.bfloat16)
optimizer = {optimizer}
for step in range(3):
    loss = net(torch.randint(0, 32, (16,))).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        ("torch.optim.AdamW(net.parameters(), lr=1e-5)", {"exp_avg_sq": "fp16_scaled"}),
        ("torch.optim.AdamW(net.parameters(), lr=1e-5)", {"exp_avg_sq": "int8_block"}),
        ("torch.optim.Adam(net.parameters(), lr=1e-5, foreach=True)", {"exp_avg_sq": "fp16_scaled", "exp_avg": "e4m3"}),
        ("torch.optim.AdamW([{'params': [p]} for p in net.parameters()], lr=1e-5)", {"exp_avg_sq": "fp16_scaled"}),
        ("torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)", {}),
        ("torch.optim.SGD(net.parameters(), lr=1e-6)", {}),
    ],
)
def test_stored_weights_of_a_policy_cure_lost_updates_and_are_seen_to(optimizer: str, state: dict[str, str]) -> None:
    """Embeddings, norms and biases in 16 bits lose updates as matrices do, and are stored as well."""
    text = LOW.format(optimizer=optimizer)
    assert "updates-lost" in {one.code for one in found_in_text(text) if one.severity == "error"}
    policy = {"schema": "autoprec.policy/1", "optimizer": {"weights": "bf16_kahan", **state}}
    assert found_in_text(text, policy) == []


@pytest.mark.parametrize("more", ["", ", foreach=True", ", fused=True", ", amsgrad=True"])
def test_lost_updates_are_seen_however_large_the_weights_are(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "_MOST", 64)  # elements of an operator beyond which there are no twins
    text = LOW.format(optimizer=f"torch.optim.AdamW(net.parameters(), lr=1e-5{more})")
    assert "updates-lost" in {one.code for one in found_in_text(text) if one.severity == "error"}


def test_what_arrives_at_stored_weights_is_measured(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOW.format(optimizer="torch.optim.SGD(net.parameters(), lr=1e-6)"))
    seen = judged(script, policy={"schema": "autoprec.policy/1", "optimizer": {"weights": "bf16_kahan"}}).judged
    assert seen is not None
    (lost,) = (one.figures for one in seen.observations if one.code == "updates-lost")
    assert 0.95 < lost["arrives"] < 1.05
    assert lost["unchanged"] < 0.3
    assert lost["tensors"] == 7


AVERAGED = """
import copy, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
other = copy.deepcopy(net).to({dtype})
average = torch.optim.swa_utils.AveragedModel(net)
for step in range(3):
    loss = net(torch.randn(8, 8)).square().mean()
    optimizer.zero_grad(set_to_none={drops})
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        {update}
    optimizer.zero_grad(set_to_none={drops})
"""
EACH = "[o.{} for o, p in zip(other.parameters(), net.parameters())]"


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
@pytest.mark.parametrize(
    ("update", "copies"),
    [
        ("average.update_parameters(net)", 4),
        (EACH.format("lerp_(p.to(o.dtype), 0.1)"), 4),
        (EACH.format("detach().copy_(0.9 * o + 0.1 * p)"), 4),
        (EACH.format("data.mul_(0.9).add_(p.to(o.dtype), alpha=0.1)"), 4),
        ("torch._foreach_lerp_([*other.parameters()], [p.to({dtype}) for p in net.parameters()], 0.1)", 4),
        ("other.load_state_dict(net.state_dict())", 4),
        ("pass", 0),
        (EACH.format("sub(p)"), 0),
    ],
)
@pytest.mark.parametrize("drops", [True, False])
def test_every_copy_of_the_weights_that_is_written_is_in_the_census(
    tmp_path: Path, update: str, copies: int, dtype: str, drops: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(AVERAGED.format(update=update.format(dtype=dtype), dtype=dtype, drops=drops))
    found = judged(script).judged
    assert found is not None
    kept = [row for row in found.census if row.kind == "copy of the weights"]
    asked = "fp32" if "average" in update else dtype_name(getattr(torch, dtype[6:]))
    assert sorted((row.dtype, row.shape) for row in kept) == [
        (asked, shape) for shape in [(4,), (4, 16), (16,), (16, 8)][:copies]
    ]


@pytest.mark.parametrize("steps", [1, 3])
def test_the_census_of_a_sound_script(tmp_path: Path, steps: int) -> None:
    (tmp_path / "script.py").write_text(PLAIN.format(steps=steps))
    seen = judged(tmp_path / "script.py").judged
    assert seen is not None
    assert [one.code for one in seen.observations] == ["rate-below-half-ulp"]  # of which nothing is said
    assert seen.observations[0].figures["unchanged"] < 0.1
    kinds = {kind: sorted(dtypes) for kind, dtypes in seen.by_kind().items()}
    assert kinds == {
        "parameter": ["fp32"],
        "buffer": ["fp32", "int64"],
        "optimizer state": ["fp32"],
        "gradient": ["fp32"],
        "loss": ["fp32"],
        "clipping norm": ["fp32"],
    }
    assert seen.looked_at["updates"] == sum(p.numel() for p in torch.nn.Linear(8, 16).parameters()) + 32 + 68


def test_a_warm_up_that_begins_with_no_rate_is_waited_for(tmp_path: Path) -> None:
    text = PLAIN.format(steps=6).replace("lr=1e-3", "lr=0.0")
    (tmp_path / "script.py").write_text(text)
    seen = judged(tmp_path / "script.py").judged
    assert seen is not None
    assert "learning rate was 0" in seen.unseen[0]
    assert not seen.observations


def test_a_script_that_takes_no_second_step_is_judged_by_a_thread() -> None:
    net = torch.nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # what a thread ends, ends with its process

        def done(report: GraphReport) -> None:
            os.write(writing, json.dumps(report.to_json()["judged"]).encode())
            os._exit(0)

        try:
            hooks = Hooks()
            hooks.install()
            found = Found([net], [optimizer], list(net.parameters()))
            Judge(found, hooks, done, patience_s=0.05).start(running=False)
            net(torch.ones(4, 8).bfloat16()).float().square().mean().backward()
            optimizer.step()
            time.sleep(30)
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as told:
        judged = json.loads(told.read() or "null")
    assert os.waitpid(child, 0)[1] == 0
    assert judged["unseen"] == []
    assert "updates-lost" in {one["code"] for one in judged["observations"]}
    assert judged["looked_at"]["updates"] == 72


def test_only_a_backward_of_an_own_function_that_met_two_dtypes_is_broken_by_autocast() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError(message)

    def failed_by(text: str) -> BaseException:
        nonlocal message
        message = text
        with pytest.raises(RuntimeError) as caught:
            Own.apply(torch.ones(2, requires_grad=True)).sum().backward()
        return caught.value

    message = ""
    seen = broken_backward(failed_by("expected m1 and m2 to have the same dtype"))
    assert seen is not None
    assert (seen.operator, seen.where.rpartition(":")[0]) == ("Own", __file__)
    assert broken_backward(failed_by("out of memory")) is None
    assert broken_backward(RuntimeError("dtype")) is None


_WIDE = """
import numpy, torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
net = nn.Linear(64, 10)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data, seen = torch.randn(32, 64, dtype=torch.float64), 0.0
for step in range(3):
    x, y = data.float(), torch.randint(0, 10, (32,))
    logits = net(x)
    BEFORE
    loss = F.cross_entropy(logits, y)
    AFTER
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("right = (logits.argmax(-1) == y).double().mean()", ""),
        ("", "right = logits.max(1)[1].eq(y).double().sum() / len(y)"),
        ("", "seen += loss.detach().double()"),
        ("", "seen += loss.double().item()"),
        ("norm = logits.double().norm()", ""),
        ("wave = torch.fft.rfft(logits.detach()).abs()", ""),
        ("logits = logits + torch.from_numpy(numpy.ones(10)).float()", ""),
        ("logits = logits * torch.FloatTensor(numpy.ones((32, 1)))", ""),
        ("logits = logits.masked_fill(torch.from_numpy(numpy.eye(32, 10)).byte() > 0, 0.5)", ""),
    ],
)
def test_what_the_loss_is_not_made_of_may_be_as_wide_as_it_likes(before: str, after: str) -> None:
    found = found_in_text(_WIDE.replace("BEFORE", before).replace("AFTER", after))
    assert [one.code for one in found] == []


@pytest.mark.parametrize("before", ["logits = logits.double()", "logits = logits + torch.fft.fft(logits).real"])
def test_what_the_loss_is_made_of_is_said_to_be_wide(before: str) -> None:
    found = found_in_text(_WIDE.replace("BEFORE", before).replace("AFTER", ""))
    assert [one.code for one in found] == ["wide-part"]


_ROUTED = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.parts = nn.Linear(64, 10), nn.ModuleList(nn.Linear(64, 10) for _ in range(10))
    def forward(self, x):
        scores = self.gate(x)
        USE
net = Net().bfloat16()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x, y = torch.randn(4096, 64).bfloat16(), torch.randint(0, 10, (4096,))
    logits = net(x).float()
    right = (logits.argmax(-1) == y).sum()
    loss = F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "use",
    [
        "self.right = scores.max(1, keepdim=True)[1].eq(1).sum(); return scores",
        "self.seen = scores.topk(5, 1)[1].t(); return scores",
        "self.seen = scores.detach().argmax(1); return scores",
        "return scores - scores.max(-1, keepdim=True).values",
        "return scores + scores.topk(3).values.sum(-1, keepdim=True)",
        "return scores * scores.sort(-1).values",
    ],
)
def test_a_prediction_that_is_counted_routes_nothing(use: str) -> None:
    assert "router-16bit" not in {one.code for one in found_in_text(_ROUTED.replace("USE", use))}


@pytest.mark.parametrize(
    "use",
    [
        "share, chosen = scores.softmax(-1).topk(2); return scores.gather(1, chosen) @ x[:2, :10] * share.sum()",
        "chosen = scores.argmax(-1); return torch.stack([p(x) for p in self.parts], 1)[torch.arange(len(x)), chosen]",
        "chosen = scores.argmax(-1); out = torch.zeros_like(scores)\n"
        "        for at, part in enumerate(self.parts): out[chosen == at] = part(x[chosen == at])\n"
        "        return out",
        "chosen = scores.topk(1).indices[:, 0]; out = torch.zeros_like(scores)\n"
        "        for at, part in enumerate(self.parts):\n"
        "            rows = (chosen == at).nonzero()[:, 0]; out.index_add_(0, rows, part(x[rows]))\n"
        "        return out",
        "chosen = scores.max(-1)[1]; return scores * F.one_hot(chosen, 10).to(scores.dtype)",
    ],
)
def test_what_chooses_rows_for_the_loss_is_a_router(use: str) -> None:
    assert "router-16bit" in {one.code for one in found_in_text(_ROUTED.replace("USE", use))}


_DIFFERS = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
policy, value = nn.Linear(64, 8), nn.Linear(64, 1)
net = nn.ModuleList([policy, value]).bfloat16()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
x, taken, gained = torch.randn(256, 64).bfloat16(), torch.randint(0, 8, (256,)), torch.randn(256)
gained = gained - gained.mean()
old = None
for step in range(3):
    made = F.log_softmax(policy(x), -1)
    now = made.gather(1, taken[:, None])[:, 0]
    old = now.detach().float().mul(1.001).bfloat16()
    LINE
    loss = -(gained * ratio).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "line",
    [
        "ratio = (now - old).exp()",
        "ratio = (now.float() - old.float()).exp(); seen = ((ratio - 1) - (now - old)).mean()",
        "ratio = (now - old).exp(); seen = (old - now).mean().item()",
        "ratio = (now - old).exp().clamp(0.8, 1.2)",
        "ratio = torch.exp(now - old).float()",
    ],
)
def test_what_is_made_of_rounded_log_probabilities_is_said_of_them_alone(line: str) -> None:
    found = [one for one in found_in_text(_DIFFERS.replace("LINE", line)) if one.code != "updates-lost"]
    assert {one.code for one in found} <= {"loss-16bit"}
    assert len(found) == 1
    assert found[0].seen is not None
    assert "log_softmax" in found[0].seen.operator


@pytest.mark.parametrize("more", ["", ".float()"])
def test_a_sum_whose_terms_cancel_is_held_against_its_terms(more: str) -> None:
    line = f"ratio = now{more}; spread = (ratio - ratio.mean()) / ratio.std(); ratio = spread.mean() + spread"
    found = found_in_text(_DIFFERS.replace("LINE", line))
    assert "error" not in {one.severity for one in found if one.code == "reduction-16bit"}
