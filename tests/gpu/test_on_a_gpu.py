"""What only a GPU can show: native 8-bit GEMMs agree with their emulation, and commands see the device."""

from pathlib import Path

import pytest
import torch
from torch import nn

import autoprec
from autoprec.backends import get
from autoprec.policy import LayerRule
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.cli.helpers import autoprec as command

pytestmark = pytest.mark.gpu

SCRIPT = """\
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(200):
    x = torch.randn(512, 256, device="cuda")
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def uniform(name: str) -> autoprec.Policy:
    return autoprec.Policy(recipes={name: BUILTIN_RECIPES[name]}, layers=(LayerRule(match="*", recipe=name),))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


#: Who else than native multiplies, and what.
OTHERS = [("torchao", "fp8_block")]
EAGER = ("bf16", "int8", "fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4_plain")
COMPILED = ("fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")


@pytest.mark.parametrize(("by", "name"), [*(("native", name) for name in EAGER), *OTHERS])
def test_gemms_agree_with_their_emulation_and_come_off_again(by: str, name: str) -> None:
    asks = {"m": 64, "k": 512, "n": 256, "device": "cuda:0"}
    able = get(by).capability(BUILTIN_RECIPES[name], gemm="dgrad", **asks)
    if not able:
        pytest.skip(able.reason)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128)).cuda()
    x = torch.randn(64, 256, device="cuda")
    before = gradients(model, x)
    found = {}
    for backend in (by, "emulated"):
        policy = uniform(name)
        policy.apply(model, backend=backend)
        found[backend] = gradients(model, x)
        assert policy.audit(model).ok, policy.audit(model).mismatches
        policy.remove(model)
    # one rounding between the layers flips some codes: 0.06 on a CPU, where E5M2's are a quarter apart
    limit = 0.2 if name.startswith("nvfp4") else 0.1
    for theirs, emulated in zip(found[by], found["emulated"], strict=True):
        assert (theirs - emulated).norm() < limit * emulated.norm()
    for now, then in zip(gradients(model, x), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.filterwarnings("ignore")  # the own deprecations of Dynamo and Inductor
@pytest.mark.parametrize(("by", "name"), [*(("native", name) for name in COMPILED), *OTHERS])
def test_a_compiled_step_is_one_graph_and_agrees_with_the_emulation(by: str, name: str) -> None:
    able = get(by).capability(BUILTIN_RECIPES[name], gemm="dgrad", m=256, k=512, n=256, device="cuda:0")
    if not able:
        pytest.skip(able.reason)
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
    x = torch.randn(256, 256, device="cuda")
    found = {}
    for backend in ("emulated", by):
        policy = uniform(name)
        policy.apply(model, backend=backend)
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(model) if backend == by else model
        for _ in range(3):  # delayed scales begin without a history
            model.zero_grad()
            run(x).square().mean().backward()
        found[backend] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert not counters["graph_break"], counters["graph_break"]
        assert policy.audit(model).ok, policy.audit(model).mismatches
        policy.remove(model)
    limit = 0.3 if name == "nvfp4" else 0.1  # stochastic rounding draws otherwise; a fused activation rounds later
    for theirs, emulated in zip(found[by], found["emulated"], strict=True):
        assert (theirs - emulated).norm() < limit * emulated.norm()


class Experts(nn.Module):
    """3-D weights and a grouped product; sizes that no kernel likes, one expert without tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(5, 512, 256, device="cuda", dtype=torch.bfloat16) * 0.05)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.up.transpose(-2, -1), offs=ends)


@pytest.mark.filterwarnings("ignore")  # the own deprecations of Dynamo and Inductor
@pytest.mark.parametrize("compiled", [False, True])
def test_grouped_experts_agree_with_the_emulation(compiled: bool) -> None:
    name = {(9, 0): "fp8_rowwise", (10, 0): "mxfp8"}.get(torch.cuda.get_device_capability())
    if name is None:
        pytest.skip("torch's grouped GEMMs run FP8 on compute capability 9.0 and MXFP8 on 10.0 only")
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(301, 256, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn(301, 512, device="cuda", dtype=torch.bfloat16) * 1e-3
    ends = torch.tensor([37, 37, 100, 290, 301], device="cuda", dtype=torch.int32)
    found = {}
    for backend in ("emulated", "native"):
        policy = uniform(name)
        policy.apply(model, backend=backend)
        torch._dynamo.reset()
        model.zero_grad()
        run = torch.compile(model, fullgraph=True) if compiled and backend == "native" else model
        tokens = x.clone().requires_grad_()
        out = run(tokens, ends)
        out.backward(gradient)
        assert model.up.grad is not None
        found[backend] = [out.detach(), tokens.grad, model.up.grad.clone()]
        (row,) = policy.audit(model).layers
        assert row.ok, row
        assert ("one expert after another" in row.reason) == (backend == "emulated")
        policy.remove(model)
    for native, emulated in zip(found["native"], found["emulated"], strict=True):
        assert (native - emulated).norm() < 0.01 * emulated.norm()


def test_doctor_lists_the_gpu() -> None:
    devices = command("doctor", "--json").json()["devices"]
    assert any(row["name"] == torch.cuda.get_device_name(0) for row in devices)


@pytest.mark.slow
def test_check_passes_on_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    uniform("bf16").save(tmp_path / "policy.yaml")
    found = command("check", "--policy", tmp_path / "policy.yaml", tmp_path / "train.py")
    assert found.code == 0, found.err
