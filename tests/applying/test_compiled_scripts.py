"""What a script compiles in ways of its own, and which modules of a model are its blocks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoprec import Policy
from autoprec.applying import compiling
from autoprec.applying.compiling import is_compiled, note_compiled
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.applying.test_compiling import BF16, _Block, _Odd, _Odds, _policy, _ran, _Stack, policies
from tests.warm import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # torch 2.13 itself looks at it
]


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def _odds(*widths: int) -> list[nn.Module]:
    return [_Odd(width) for width in widths]


BLOCKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "a list of them": (_Stack, 3, 3),
    "one Sequential with layers around them": (lambda: nn.Sequential(nn.Linear(4, 16), *_odds(8, 8, 8)), 3, 3),
    "a Sequential of a Sequential and a head": (
        lambda: nn.Sequential(nn.Sequential(*_odds(8, 8)), nn.Sequential(nn.Linear(16, 4), nn.ReLU())),
        2,
        2,
    ),
    "a dictionary": (lambda: nn.ModuleDict({str(k): _Odd(8) for k in range(5)}), 5, 5),
    "two classes in turn": (lambda: nn.ModuleList([_Odd(8), _Block(), _Odd(8), _Block(), _Odd(8)]), 5, 3),
    "one that is alone in its class": (lambda: nn.ModuleList([*_odds(8, 8), _Block()]), 2, 2),
    "blocks whose sizes differ": (lambda: nn.ModuleList(_odds(8, 9, 9)), 3, 2),
    "stages of blocks": (lambda: nn.ModuleList(nn.Sequential(*_odds(8, 8)) for _ in range(2)), 2, 2),
    "stages of different lengths": (
        lambda: nn.ModuleList([nn.Sequential(*_odds(8, 8)), nn.Sequential(*_odds(8, 8, 8))]),
        5,
        5,
    ),
    "an encoder and a decoder": (lambda: nn.ModuleDict({"a": nn.ModuleList(_odds(8, 8)), "b": _Stack()}), 5, 3),
    "one block in all places": (lambda: nn.ModuleList([_Odd(8)] * 6), 0, 1),
    "layers alone": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), 0, 1),
    "a layer": (lambda: nn.Linear(4, 4), 0, 1),
}


@pytest.mark.parametrize(("make", "blocks", "alike"), BLOCKS.values(), ids=BLOCKS)
def test_which_modules_are_blocks_and_how_many_share_what_is_compiled(
    make: Callable[[], nn.Module], blocks: int, alike: int
) -> None:
    model = make()
    assert len(compiling.repeated_blocks(model)) == blocks
    assert compiling.most_alike(model) == alike


@policies
@pytest.mark.parametrize("by", ["the policy", "the script"])
@pytest.mark.parametrize("kind", ["in one Sequential", "of two classes"])
def test_blocks_beside_other_modules_are_compiled_by_block(kind: str, by: str, more: dict[str, object]) -> None:
    torch.manual_seed(0)
    many = [_Odd(8), _Odd(8), _Block(), _Block()]
    model = (
        nn.Sequential(nn.Linear(16, 16), *many[:2], nn.LayerNorm(16)) if kind == "in one Sequential" else _Odds(*many)
    )
    call = torch.compile(model, backend="eager") if by == "the script" else None
    row = _ran(model, _policy("compile", **more), [torch.randn(4, 16)], call)
    assert row == {"requested": "compile", "executed": "compile", "ok": True, "reason": ""}
    assert compiling.compiled_blocks(model) == len(compiling.repeated_blocks(model)) > 1


class _Forward(_Stack):
    @torch.compile(backend="eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def _class() -> nn.Module:
    @torch.compile(backend="eager")
    class Whole(_Stack):
        pass

    return Whole()


def _attribute() -> nn.Module:
    model = _Stack()
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def _part(call: Callable[[nn.Module], Any]) -> nn.Module:
    model = _Stack()
    model.blocks[0].forward = call(model.blocks[0].forward)
    return model


COMPILED: dict[str, tuple[Callable[[], Any], bool]] = {
    "its forward": (_Forward, True),
    "its class": (_class, True),
    "the forward of one model": (_attribute, True),
    "the forward of a part": (lambda: _part(torch.compile(backend="eager")), True),
    "a part that is kept from it": (lambda: _part(torch.compiler.disable), False),
    "disable=True": (lambda: torch.compile(_Stack(), backend="eager", disable=True), False),
}


@pytest.mark.parametrize(("make", "compiled"), COMPILED.values(), ids=COMPILED)
def test_what_a_script_compiles_is_seen_and_kept(make: Callable[[], Any], compiled: bool) -> None:
    model, x = make(), torch.randn(4, 16)
    assert is_compiled(model) is compiled
    expected, policy = model(x), _policy("compile")
    policy.apply(model)
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    row = policy.audit(model).operators["execution"]
    assert row["ok"], row
    assert ("the script" in row["reason"]) is compiled
    policy.remove(model)
    assert is_compiled(model) is compiled


def test_a_model_that_is_kept_from_being_compiled_is_not_compiled_in_the_same_way() -> None:
    """Its blocks would be "compiled" by what keeps Dynamo out, and run as eager code without a word."""
    model = _Stack()
    call = torch.compiler.disable(model)
    assert not is_compiled(model)
    policy, before = _policy("compile"), compiling.compiled_graphs()
    policy.apply(call)
    call(torch.randn(4, 16)).sum().backward()
    row = policy.audit(model).operators["execution"]
    assert row["ok"] is (compiling.compiled_graphs() > before), row
    in_place = _Stack()
    in_place.compile(backend="eager", disable=True)
    assert not is_compiled(in_place)


def test_a_function_that_calls_the_model_is_no_part_of_it_and_has_to_be_told() -> None:
    model, other = _Stack(), _Stack()
    function = torch.compile(lambda x: model(x).sum(), backend="eager")
    assert not is_compiled(model)
    note_compiled(model)
    assert is_compiled(model)
    assert not is_compiled(other)
    policy = _policy("compile")
    policy.apply(model)
    function(torch.randn(4, 16)).backward()
    assert policy.audit(model).operators["execution"]["reason"] == "the script compiles it itself"


@pytest.mark.parametrize("suppressed", [False, True])
def test_what_no_compiler_could_compile_is_not_called_compiled(suppressed: bool) -> None:
    """A script may tell Dynamo to go on as eager code where its compiler fails; nothing but a warning says so."""

    def backend(*_graph: Any) -> Any:
        raise RuntimeError("no compiler here")

    model = _Stack()
    call = torch.compile(model, backend=backend)
    policy = _policy("compile")
    policy.apply(call)
    with torch._dynamo.config.patch(suppress_errors=suppressed):
        if suppressed:
            call(torch.randn(4, 16)).sum().backward()
            row = policy.audit(call).operators["execution"]
            assert (row["executed"], row["ok"]) == ("eager", False)
            assert "suppress_errors" in row["reason"]
        else:
            with pytest.raises(RuntimeError, match="no compiler here"):
                call(torch.randn(4, 16))


@pytest.mark.parametrize("how", ["TORCHDYNAMO_DISABLE", "force_eager", "forward"])
def test_where_nothing_is_compiled_the_audit_says_why(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **more: plain(call, **{"backend": "eager", **more}))
    if how == "force_eager":
        torch.compiler.set_stance(how)
    elif how != "forward":
        monkeypatch.setenv(how, "1")
    model, policy = _Stack(), _policy("compile_whole")
    policy.apply(model)
    (model.forward if how == "forward" else model)(torch.randn(4, 16)).sum().backward()
    row = policy.audit(model).operators["execution"]
    assert (row["executed"], row["ok"]) == ("eager", False)
    assert (how if how != "forward" else "model(x)?") in row["reason"]


def _of_a_rank(folder: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found, x = {}, torch.randn(4, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    for how in ("eager", "around it", "in place", "inside it"):
        torch.manual_seed(0)
        model = _Stack()
        call: Any = torch.compile(model, backend="eager") if how == "inside it" else model
        call = DistributedDataParallel(call)
        call = torch.compile(call, backend="eager") if how == "around it" else call
        if how == "in place":
            call.compile(backend="eager")
        assert is_compiled(model) is (how != "eager")
        policy = _policy("keep" if how == "eager" else "compile", **BF16)
        policy.apply(call)
        out = call(x)
        out.sum().backward()
        row = policy.audit(call).operators.get("execution", {"ok": True, "executed": "keep"})
        grads = [p.grad for p in model.parameters()]
        found[how] = (compiling.compiled_blocks(model), row["ok"], row["executed"], out.detach(), grads)
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    # the process ends here: where the group is destroyed first, freeing DDP's reducer after it hangs one time in ten


def test_blocks_inside_of_ddp_are_compiled_whatever_the_script_compiled_around_it(tmp_path: Path) -> None:
    ended = run_ranks(lambda _rank: _of_a_rank(tmp_path), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        *_, expected, grads = found.pop("eager")
        for how, (blocks, ok, executed, out, own) in found.items():
            assert (blocks, ok, executed) == (3, True, "compile"), how
            assert torch.equal(out, expected)
            assert all(torch.equal(a, b) for a, b in zip(own, grads, strict=True)), how


DYNAMIC = ["fp8_tensorwise", "fp8_rowwise", "fp8_block_fp32_scales", "mxfp8", "nvfp4_plain", "int8"]


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_script_that_compiles_with_dynamic_shapes_runs_scaled_layers(name: str) -> None:
    """Dynamo makes inputs of the graph of the numbers it reads then, and fails where two layers read the same."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    policy = Policy.model_validate({"default": "r", "recipes": {"r": BUILTIN_RECIPES[name]}})
    policy.apply(model)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, dynamic=True, backend="eager")
    for length in (16, 24):
        x = torch.randn(4, length, 32)
        found, expected = compiled(x), eager(x)
        for out in (found, expected):
            out.square().mean().backward()
        torch.testing.assert_close(found, expected)
    assert policy.audit(model).ok
