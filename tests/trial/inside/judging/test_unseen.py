"""Scripts whose forward no module shows are judged as others are: weights in dicts, lists and plain attributes."""

import warnings
from pathlib import Path

import pytest
import torch

from autoprec.graph.recorder import StepRecorder
from autoprec.trial.inside.judging.unseen import forward_begins, update_ends
from benchmarks.precision.running import found_in_text, judged

HEAD = """
import dataclasses, types, typing
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
torch.manual_seed(0)
half, lr = torch.DTYPE, RATE
first, last = ((torch.randn(a, b) / a**0.5).to(half).requires_grad_() for a, b in ((64, 128), (128, 10)))
x, y = torch.randn(64, 64).to(half), torch.randint(0, 10, (64,))
def loss_of(first, last):
    return F.cross_entropy((F.gelu(x @ first) @ last).float(), y)
"""
STEPS = "for step in range(5):\n    "
#: How scripts hold and update their weights: the line that loses their updates ends in a mark.
HELD = {
    "a dict, in place": """
P = {"first": first, "last": last}
for step in range(5):
    loss_of(**P).backward()
    with torch.no_grad():
        for name in P:
            P[name] -= lr * P[name].grad  # here
            P[name].grad = None
""",
    "a list, by new tensors": """
P = [first, last]
for step in range(5):
    grads = torch.autograd.grad(loss_of(*P), P)
    P = [(p - lr * g).detach().requires_grad_() for p, g in zip(P, grads)]  # here
""",
    "a list, by new tensors without gradients": """
P = [first, last]
for step in range(5):
    loss_of(*P).backward()
    with torch.no_grad():
        P = [p - lr * p.grad for p in P]  # here
    for p in P:
        p.requires_grad_(True)
""",
    "a dataclass": """
@dataclasses.dataclass(slots=True)
class Weights:
    first: torch.Tensor
    last: torch.Tensor
W = Weights(first, last)
for step in range(5):
    loss_of(W.first, W.last).backward()
    for w in (W.first, W.last):
        w.data.add_(w.grad, alpha=-lr)  # here
        w.grad.zero_()
""",
    "attributes of a class of its own": """
class Model:
    def __init__(self):
        self.first, self.last = first, last
    def __call__(self):
        return loss_of(self.first, self.last)
    def step(self, grads):
        with torch.no_grad():
            torch._foreach_add_([self.first, self.last], grads, alpha=-lr)  # here
model = Model()
for step in range(5):
    model.step(torch.autograd.grad(model(), [model.first, model.last]))
""",
    "variables of a function": """
def train(weights, steps):
    for _ in range(steps):
        loss_of(*weights).backward()
        with torch.no_grad():
            for w in weights:
                w.copy_(w - lr * w.grad)  # here
                w.grad = None
train((first, last), 5)
""",
    "a state dict": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Parameter(first.detach()), nn.Parameter(last.detach())
    def forward(self):
        return loss_of(self.first, self.last)
net = Net()
P = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
for step in range(5):
    grads = torch.autograd.grad(functional_call(net, P, ()), list(P.values()))
    with torch.no_grad():
        for p, g in zip(P.values(), grads):
            p.sub_(lr * g)  # here
""",
    "parameters that no module calls": """
P = nn.ParameterDict({"first": nn.Parameter(first.detach()), "last": nn.Parameter(last.detach())})
for step in range(5):
    loss_of(P["first"], P["last"]).backward()
    for p in P.values():
        p.data = p.data - lr * p.grad  # here
        p.grad = None
""",
    "tensors of an optimizer": """
P = {"first": first, "last": last}
optimizer = torch.optim.SGD(P.values(), lr=lr)  # here
for step in range(5):
    optimizer.zero_grad()
    loss_of(**P).backward()
    optimizer.step()
""",
    "tensors of an optimizer of its own": """
class Sign(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": lr})  # here
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-lr)
optimizer = Sign([first, last])
for step in range(5):
    optimizer.zero_grad()
    loss_of(first, last).backward()
    optimizer.step()
""",
}


def found(text: str, *, rate: float = 1e-4, dtype: str = "bfloat16") -> list[tuple[str, str, int]]:
    """Return code, severity and line of what is found in a script of these weights."""
    whole = (HEAD + text).replace("RATE", str(rate)).replace("DTYPE", dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scripts' own
        rows = found_in_text(whole)
    return [(one.code, one.severity, int(one.place.rpartition(":")[2])) for one in rows]


def _line(text: str, mark: str = "# here") -> int:
    return next(number for number, line in enumerate((HEAD + text).splitlines(), 1) if line.endswith(mark))


@pytest.mark.parametrize("held", HELD)
def test_lost_updates_are_named_wherever_the_weights_are_held(held: str) -> None:
    assert found(HELD[held]) == [("updates-lost", "error", _line(HELD[held]))]


@pytest.mark.parametrize("held", HELD)
def test_updates_that_arrive_are_not_named(held: str) -> None:
    assert found(HELD[held], rate=30.0) == []


KEPT = {
    "fp32 masters in a dict": """
M = {"first": first.detach().float(), "last": last.detach().float()}
for step in range(5):
    W = {name: m.to(half).requires_grad_() for name, m in M.items()}
    for name, g in zip(W, torch.autograd.grad(loss_of(**W), list(W.values()))):
        M[name] -= lr * g.float()
""",
    "new fp32 masters in each step": """
M = [first.detach().float(), last.detach().float()]
for step in range(5):
    W = [m.to(half).requires_grad_() for m in M]
    M = [m - lr * g.float() for m, g in zip(M, torch.autograd.grad(loss_of(*W), W))]
""",
    "fp32 masters that are copied": """
M, P = [first.detach().float(), last.detach().float()], [first, last]
for step in range(5):
    loss_of(*P).backward()
    with torch.no_grad():
        for m, p in zip(M, P):
            m.sub_(p.grad.float(), alpha=lr)
            p.copy_(m)
            p.grad = None
""",
    "kahan sums": """
P, C = [first, last], [torch.zeros_like(first), torch.zeros_like(last)]
for step in range(5):
    loss_of(*P).backward()
    with torch.no_grad():
        for p, c in zip(P, C):
            u = -lr * p.grad - c
            t = p + u
            c.copy_((t - p) - u)
            p.copy_(t)
            p.grad = None
""",
    "kahan sums of new tensors": """
P, C = [first, last], [torch.zeros_like(first), torch.zeros_like(last)]
for step in range(5):
    grads = torch.autograd.grad(loss_of(*P), P)
    with torch.no_grad():
        N, R = [], []
        for p, c, g in zip(P, C, grads):
            u = -lr * g - c
            t = p + u
            R.append((t - p) - u)
            N.append(t)
    P, C = [t.requires_grad_() for t in N], R
""",
    "stochastic rounding": """
P = {"first": first, "last": last}
def rounded(t):
    bits = t.view(torch.int32)
    return ((bits + torch.randint_like(bits, 0, 1 << 16)) & -65536).view(torch.float32).to(half)
for step in range(5):
    grads = torch.autograd.grad(loss_of(**P), list(P.values()))
    P = {k: rounded(p.detach().float() - lr * g.float()).requires_grad_() for (k, p), g in zip(P.items(), grads)}
""",
    "adversarial inputs that are trained": """
net = nn.Linear(64, 10)
inputs = x.float()
for step in range(5):
    inputs = inputs.detach().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(F.linear(inputs, net.weight.detach()), y), inputs)
    inputs = inputs + 0.1 * g.sign()
""",
}


@pytest.mark.parametrize("kept", KEPT)
def test_updates_whose_rest_is_kept_are_not_named(kept: str) -> None:
    assert found(KEPT[kept]) == []


LOOP = """
P = {{"first": first, "last": last}}
MORE = {more}
for step in range(5):
    {forward}
    grads = torch.autograd.grad(loss, list(P.values()))
    with torch.no_grad():
        for p, g in zip(P.values(), grads):
            p.sub_(30 * g)
    {after}
"""
NEITHER = "loss = loss_of(**P)"


@pytest.mark.parametrize(
    ("code", "more", "forward", "after"),
    [
        (
            "positions-16bit",
            "None",
            "t = torch.arange(600, dtype=half)[:, None] * torch.ones(64, dtype=half)  # here\n"
            "    loss = F.cross_entropy(((F.gelu(x @ P['first']) @ P['last']).float() + t.sin().float().mean()), y)",
            "pass",
        ),
        ("loss-16bit", "None", "loss = F.cross_entropy(F.gelu(x @ P['first']) @ P['last'], y)  # here", "pass"),
        (
            "norm-16bit",
            "None",
            "h = x @ P['first']\n    h = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)  # here\n"
            "    loss = F.cross_entropy((h @ P['last']).float(), y)",
            "pass",
        ),
        (
            "softmax-16bit",
            "None",
            "s = (x @ P['first']) * 4\n    e = torch.exp(s - s.amax(-1, keepdim=True))\n"
            "    a = e / e.sum(-1, keepdim=True)  # here\n    loss = F.cross_entropy((a @ P['last']).float(), y)",
            "pass",
        ),
        (
            "ema-16bit",
            "{k: v.detach().clone() for k, v in P.items()}",
            NEITHER,
            "for k in P:\n        MORE[k].lerp_(P[k].detach(), 1e-4)  # here",
        ),
    ],
)
def test_what_else_such_a_step_loses_is_named(code: str, more: str, forward: str, after: str) -> None:
    text = LOOP.format(more=more, forward=forward, after=after)
    assert (code, _line(text)) in [(one, line) for one, _, line in found(text)]


#: Forwards of all kinds: the loss of the weights `P`, of which the update loses what reaches them.
FORWARDS = {
    "compiled": """
compute = torch.compile(loss_of, backend="eager")
def loss(): return compute(*P)
""",
    "checkpointed": """
from torch.utils.checkpoint import checkpoint
def loss(): return checkpoint(loss_of, *P, use_reentrant=False)
""",
    "a function with a backward of its own": """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z
    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]
def loss(): return Square.apply(loss_of(*P))
""",
    "a gradient penalty": """
def loss():
    z = x.detach().clone().requires_grad_()
    out = F.gelu(z @ P[0]).float()
    (g,) = torch.autograd.grad(out.sum(), z, create_graph=True)
    return F.cross_entropy((F.gelu(x @ P[0]) @ P[1]).float(), y) + 1e-6 * g.float().square().mean()
""",
    "gradients by the input": """
def loss():
    z = x.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy((F.gelu(z @ P[0]) @ P[1]).float(), y), z)
    return F.cross_entropy((F.gelu((x + 0.1 * g.sign()) @ P[0]) @ P[1]).float(), y)
""",
    "views of one vector": """
P = [torch.cat([p.detach().flatten() for p in P]).requires_grad_()]
def loss(): return loss_of(P[0][:8192].view(64, 128), P[0][8192:].view(128, 10))
""",
}


@pytest.mark.filterwarnings("ignore")  # Dynamo's
@pytest.mark.parametrize("how", FORWARDS)
def test_whatever_runs_in_the_forward_its_update_is_judged(how: str) -> None:
    body = "\nP = [first, last]" + FORWARDS[how] + STEPS + "loss().backward()\n    with torch.no_grad():\n"
    body += "        for p in P:\n            p -= lr * p.grad  # here\n            p.grad = None\n"
    assert found(body) == [("updates-lost", "error", _line(body))]
    assert [row for row in found(body, rate=30.0) if row[1] == "error"] == []


AVERAGED = """
P = {{"first": first, "last": last}}
E = {{k: p.detach().clone() for k, p in P.items()}}
optimizer = torch.optim.SGD(P.values(), lr=lr)
for step in range(4):
    loss = loss_of(**P)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for k in P:
        {average}  # here
"""


@pytest.mark.parametrize(
    "average",
    [
        "E[k].lerp_(P[k].detach(), 1e-4)",
        "E[k].mul_(0.9999).add_(P[k].detach(), alpha=1e-4)",
        "E[k] += 1e-4 * (P[k].detach() - E[k])",
        "E[k].copy_(E[k] * 0.9999 + P[k].data * 1e-4)",
        "torch._foreach_lerp_([E[k]], [P[k].detach()], 1e-4)",
    ],
)
def test_an_average_after_an_optimizer_s_step_is_no_part_of_the_next_forward(average: str) -> None:
    text = AVERAGED.format(average=average)
    assert found(text, rate=30.0) == [("ema-16bit", "error", _line(text))]


@pytest.mark.parametrize("held", ["a dict, in place", "a list, by new tensors", "tensors of an optimizer"])
def test_the_census_names_weights_as_the_script_does(held: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text((HEAD + HELD[held]).replace("RATE", "30").replace("DTYPE", "bfloat16"))
    seen = judged(script).judged
    assert seen is not None
    names = {row.name for row in seen.census if row.kind == "parameter"}
    assert names == ({"P.0", "P.1"} if "list" in held else {"P.first", "P.last"})
    assert seen.looked_at["updates"] == 64 * 128 + 1280
    assert not seen.unseen


def test_an_update_ends_with_the_last_write_and_a_forward_begins_with_a_gradient() -> None:
    weight = torch.ones(4, requires_grad=True)
    with StepRecorder(torch.nn.Module()) as recorder:
        with torch.no_grad():
            weight.sub_(0.5 * torch.ones(4))
            averaged = weight.clone()
        (weight * 2 + averaged).sum()
        first = update_ends(recorder, [weight], [weight])
        assert [call.name for call in recorder.trace.calls][first - 1] == "sub"
        assert [call.name for call in recorder.trace.calls][forward_begins(recorder, first)] == "mul"
        assert forward_begins(recorder, len(recorder.trace.calls)) == len(recorder.trace.calls)
        new = (weight.detach() * 3).requires_grad_()
        made = update_ends(recorder, [weight], [new])
        assert [call.name for call in recorder.trace.calls][made - 1] == "mul"
    with StepRecorder(torch.nn.Module()) as recorder:
        torch.ones(3) + 1
        assert update_ends(recorder, [weight], [weight]) == 0
