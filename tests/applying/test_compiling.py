"""``execution``: compiled or eager, whatever the script wrote, and what the audit says of it."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.applying import compiling
from autoprec.applying.compiling import is_compiled, run_eagerly
from autoprec.applying.prepared import Prepared

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # torch 2.13 itself looks at it
]


@pytest.fixture(autouse=True)
def _no_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ``torch.compile`` stop at the traced graph: what C++ makes of it is not tested here."""
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, backend="eager", **more: plain(model, backend=backend, **more))
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def _policy(execution: str, **more: object) -> Policy:
    return Policy.model_validate({"execution": execution, **more})


BF16 = {"recipes": {"bf16": {"format": "bf16"}}, "default": "bf16", "activations": "bf16"}


@pytest.mark.parametrize("more", [{}, BF16], ids=["as written", "bf16"])
def test_a_model_is_compiled_in_place_and_given_back(more: dict[str, object]) -> None:
    model, x = _model(), torch.randn(3, 8)
    eager = copy.deepcopy(model)
    _policy("keep", **more).apply(eager)
    policy = _policy("compile", **more)
    policy.apply(model)
    assert torch.equal(model(x), eager(x))
    model(x).sum().backward()
    row = policy.audit(model).operators["execution"]
    why = "the model has no repeated blocks: it is compiled as a whole"
    assert row == {"requested": "compile", "executed": "compile", "ok": True, "reason": why}
    assert list(model.state_dict()) == list(eager.state_dict())
    policy.remove(model)
    assert not is_compiled(model)
    assert set(model.__dict__) == set(_model().__dict__)


def test_every_model_has_compiled_code_and_evidence_of_its_own() -> None:
    policy, x = _policy("compile", **BF16), torch.randn(3, 8)
    for _ in range(3):
        model = _model()
        for _ in range(2):
            policy.apply(model)
            model(x).sum().backward()
            assert policy.audit(model).ok, policy.audit(model).operators["execution"]


def test_a_compiled_graph_that_never_ran_fails_the_audit() -> None:
    model, policy = _model(), _policy("compile")
    policy.apply(model)
    model.forward(torch.randn(3, 8)).sum().backward()
    report = policy.audit(model)
    assert not report.ok
    assert "compiled no graph" in report.operators["execution"]["reason"]
    assert not policy.audit(_model()).ok


def test_copies_and_pickles_leave_the_compiled_code_behind() -> None:
    model, x = _model(), torch.randn(3, 8)
    _policy("compile", **BF16).apply(model)
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    with pytest.warns(UserWarning, match="without its policy"):
        assert type(pickle.loads(pickle.dumps(model))) is nn.Sequential


def test_what_the_script_compiled_runs_eagerly_and_is_given_back() -> None:
    model, x = _model(), torch.randn(3, 8)
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        calls.append(1)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    policy = _policy("eager")
    policy.apply(compiled)
    compiled(x).sum().backward()
    assert not calls
    assert policy.audit(compiled).operators["execution"]["executed"] == "eager"
    policy.remove(compiled)
    compiled(x)
    assert calls == [1]


def test_a_script_that_compiles_is_not_compiled_twice() -> None:
    model = _model()
    compiled = torch.compile(model, backend="eager")
    assert is_compiled(model)
    assert not is_compiled(_model())
    policy = _policy("compile")
    policy.apply(compiled)
    compiled(torch.randn(3, 8)).sum().backward()
    assert "_compiled_call_impl" not in model.__dict__
    assert "the script compiles it itself" in policy.audit(compiled).operators["execution"]["reason"]


def test_parts_that_are_compiled_are_seen() -> None:
    model = _model()
    model[0].compile()
    assert is_compiled(model)
    model = _model()
    model[2] = torch.compile(model[2], backend="eager")
    assert is_compiled(model)


def test_a_scan_compiles_nothing() -> None:
    model, x, calls = _model(), torch.randn(3, 8), []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        calls.append(1)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    run_eagerly()
    compiled(x)
    assert not calls


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(x)


@pytest.mark.parametrize("limited", [False, True])
def test_every_kind_of_block_is_compiled_or_the_audit_fails(limited: bool) -> None:
    """Past its limit of versions Dynamo runs further kinds of blocks as eager code, without a word."""
    torch.manual_seed(0)
    model = nn.Sequential(*[_Block() for _ in range(3)])
    for block in model:
        block.compile(backend="eager")
    recipes = {name: {"format": name} for name in ("fp32", "bf16")}
    recipes["fp8"] = {"format": "fp8", "scaling": {"granularity": "tensor"}}
    layers = [{"match": f"{k}.up", "recipe": name} for k, name in enumerate(recipes)]
    policy = _policy("keep", recipes=recipes, layers=layers)
    with torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy.apply(model, backend="emulated")
        assert torch._dynamo.config.recompile_limit == 24
        if limited:
            torch._dynamo.config.recompile_limit = 2
        model(torch.randn(4, 16)).sum().backward()
    report = policy.audit(model)
    assert report.ok is not limited, report
    assert [row.name for row in report.mismatches] == ["2.up"] * limited
    assert ("recompile_limit" in str(report)) is limited


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("more", [{}, BF16], ids=["as written", "bf16"])
@pytest.mark.parametrize("execution", ["compile", "compile_whole"])
def test_blocks_of_one_kind_are_compiled_once(execution: str, more: dict[str, object]) -> None:
    model, x = _Stack(), torch.randn(4, 16)
    _policy("keep", **more).apply(model)
    expected = model(x)
    policy, before = _policy(execution, **more), compiling.compiled_graphs()
    policy.apply(model)
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    assert compiling.compiled_graphs() - before == 1  # three blocks, one graph; or the whole model
    assert compiling.compiled_blocks(model) == (3 if execution == "compile" else 0)
    assert ("_compiled_call_impl" in model.__dict__) is (execution == "compile_whole")
    row = policy.audit(model).operators["execution"]
    assert row == {"requested": execution, "executed": execution, "ok": True, "reason": ""}
    policy.remove(model)
    assert not is_compiled(model)
    assert compiling.compiled_blocks(model) == 0


def _counting(graphs: list[int]) -> object:
    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    return backend


@pytest.mark.parametrize("more", [{}, BF16], ids=["as written", "bf16"])
@pytest.mark.parametrize("how", ["a wrapper", "in place"])
def test_what_the_script_compiles_as_a_whole_is_compiled_by_block_in_its_way(how: str, more: dict[str, object]) -> None:
    graphs: list[int] = []
    model, x = _Stack(), torch.randn(4, 16)
    _policy("keep", **more).apply(model)
    expected = model(x)
    call: nn.Module = model
    if how == "a wrapper":
        call = torch.compile(model, backend=_counting(graphs))  # type: ignore[call-overload]
    else:
        torch.nn.Module.compile(model, backend=_counting(graphs))
    policy = _policy("compile", **more)
    policy.apply(call)
    assert is_compiled(model)
    assert compiling.compiled_blocks(model) == 3
    assert torch.equal(call(x), expected)
    call(x).sum().backward()
    assert len(graphs) == 1  # by the script's own backend, once for three blocks
    report = policy.audit(model)
    assert report.ok, report
    assert report.operators["execution"]["reason"] == ""
    policy.remove(call)
    torch._dynamo.reset()
    plain = _Stack()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(call(x), plain(x))
    assert len(graphs) == 2  # and is the whole model again
    assert graphs[1] > graphs[0]


@pytest.mark.parametrize("how", ["a wrapper", "in place"])
def test_blocks_and_the_whole_model_are_exchanged_and_nothing_is_compiled_twice(how: str) -> None:
    graphs: list[int] = []
    model, x = _Stack(), torch.randn(4, 16)
    call: nn.Module = model
    if how == "a wrapper":
        call = torch.compile(model, backend=_counting(graphs))  # type: ignore[call-overload]
    else:
        torch.nn.Module.compile(model, backend=_counting(graphs))
    whole = Prepared(model)
    _policy("compile").apply(model)
    blocks = Prepared(model)
    for _ in range(3):
        whole.put()
        call(x).sum().backward()
        blocks.put()
        call(x).sum().backward()
    assert len(graphs) == 2
    whole.put()
    assert compiling.compiled_blocks(model) == 0


@pytest.mark.parametrize("execution", ["compile", "compile_whole"])
def test_a_script_that_compiles_its_blocks_or_functions_keeps_them(execution: str) -> None:
    model = _Stack()
    for block in model.blocks:
        block.compile(backend="eager")
    before = [block.__dict__["_compiled_call_impl"] for block in model.blocks]
    policy = _policy(execution)
    policy.apply(model)
    assert [block.__dict__["_compiled_call_impl"] for block in model.blocks] == before
    model(torch.randn(4, 16)).sum().backward()
    assert policy.audit(model).operators["execution"]["reason"] == "the script compiles it itself"
    policy.remove(model)
    assert [block.__dict__["_compiled_call_impl"] for block in model.blocks] == before


@pytest.mark.usefixtures("whole_heap")
def test_what_was_compiled_before_a_fork_is_found_after_it() -> None:
    model = _Stack()
    compiled = torch.compile(model, backend="eager")
    gc.freeze()
    try:
        assert is_compiled(model)
        _policy("compile").apply(model)
        assert compiling.compiled_blocks(model) == 3
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    assert compiled is not None


def test_a_model_that_was_compiled_as_a_whole_is_not_kept_alive() -> None:
    model = _Stack()
    compiled = torch.compile(model, backend="eager")
    _policy("compile").apply(model)
    gone = weakref.ref(model)
    del model, compiled
    gc.collect()
    assert gone() is None


class _Odd(nn.Module):
    """A block of a width of its own, with what a trace cannot go through where asked."""

    def __init__(self, width: int, breaks: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(torch.relu(x))


class _Odds(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


POLICIES = {"as written": {}, "bf16": BF16}
policies = pytest.mark.parametrize("more", POLICIES.values(), ids=POLICIES)


def _ran(model: nn.Module, policy: Policy, batches: list[torch.Tensor], call: nn.Module | None = None) -> object:
    """Train under a policy as eager code does, and return the audit's row of how it was executed."""
    eager = copy.deepcopy(model)
    policy.model_copy(update={"execution": "keep"}).apply(eager, backend="emulated")
    called = model if call is None else call  # asking a compiled model whether it is true asks for its length
    policy.apply(called, backend="emulated")
    for batch in batches:
        expected, found = eager(batch), called(batch)
        assert torch.allclose(found, expected, rtol=1e-2, atol=1e-2)
        found.sum().backward()
    report = policy.audit(called)
    return report.operators["execution"] | {"ok": report.ok}


@policies
@pytest.mark.parametrize("by", ["the policy", "the script"])
def test_blocks_that_all_differ_are_all_compiled(by: str, more: dict[str, object]) -> None:
    """Nine versions are one more than Dynamo makes; the tenth block was eager code, without a word."""
    graphs: list[int] = []
    model = _Odds(*(_Odd(8 + k) for k in range(10)))
    call = torch.compile(model, backend=_counting(graphs)) if by == "the script" else None  # type: ignore[call-overload]
    before = compiling.compiled_graphs()
    row = _ran(model, _policy("compile", **more), [torch.randn(4, 16)], call)
    assert row == {"requested": "compile", "executed": "compile", "ok": True, "reason": ""}
    assert compiling.compiled_graphs() - before == 10
    assert len(graphs) == (10 if by == "the script" else 0)


def test_past_the_limit_of_versions_the_audit_fails() -> None:
    model = _Odds(*(_Odd(8 + k) for k in range(4)))
    policy = _policy("compile")
    with torch._dynamo.config.patch(recompile_limit=2):
        policy.apply(model)
        model(torch.randn(4, 16)).sum().backward()
    report = policy.audit(model)
    assert not report.ok
    row = report.operators["execution"]
    assert row["executed"] == "eager"
    assert "recompile_limit" in row["reason"]


@policies
@pytest.mark.parametrize("by", ["the policy", "the script"])
def test_a_break_inside_a_block_leaves_its_parts_compiled(by: str, more: dict[str, object]) -> None:
    model = _Odds(*(_Odd(8, breaks=True) for _ in range(3)))
    call = torch.compile(model, backend="eager") if by == "the script" else None
    row = _ran(model, _policy("compile", **more), [torch.randn(4, 16)] * 2, call)
    assert row == {"requested": "compile", "executed": "compile", "ok": True, "reason": ""}


@policies
@pytest.mark.parametrize("by", ["the policy", "the script"])
def test_batches_of_any_size_are_served(by: str, more: dict[str, object]) -> None:
    model = _Odds(*(_Odd(8) for _ in range(3)))
    call = torch.compile(model, backend="eager") if by == "the script" else None
    before = compiling.compiled_graphs()
    row = _ran(model, _policy("compile", **more), [torch.randn(rows, 16) for rows in range(4, 16)], call)
    assert row == {"requested": "compile", "executed": "compile", "ok": True, "reason": ""}
    assert compiling.compiled_graphs() - before <= 4  # of one size, then of any, for twelve sizes


@policies
def test_a_script_that_wants_one_graph_has_one_of_each_block(more: dict[str, object]) -> None:
    model = _Odds(*(_Odd(8) for _ in range(3)))
    call = torch.compile(model, backend="eager", fullgraph=True)  # type: ignore[call-overload]
    row = _ran(model, _policy("compile", **more), [torch.randn(4, 16)], call)
    assert row == {"requested": "compile", "executed": "compile", "ok": True, "reason": ""}


@pytest.mark.parametrize("execution", ["keep", "compile"])
def test_a_script_that_wants_one_graph_and_has_two_ends_with_torchs_own_word(execution: str) -> None:
    model = _Odds(*(_Odd(8, breaks=True) for _ in range(3)))
    call = torch.compile(model, backend="eager", fullgraph=True)  # type: ignore[call-overload]
    _policy(execution, **BF16).apply(call)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        call(torch.randn(4, 16))


@pytest.mark.parametrize("mode", ["default", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead"])
def test_blocks_are_compiled_in_the_scripts_own_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def compile_fx(graph: torch.fx.GraphModule, _inputs: object, config_patches: Any, **_more: Any) -> object:
        asked.append(dict(config_patches or {}))
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    model, x = _Odds(*(_Odd(8) for _ in range(3))), torch.randn(4, 16)
    call = torch.compile(model, backend="inductor", mode=mode)  # type: ignore[call-overload]
    call(x)
    policy = _policy("compile", **BF16)
    policy.apply(call)
    call(x).sum().backward()
    assert policy.audit(call).ok
    whole, *blocks = asked  # the first block's input needs no gradient
    assert len(blocks) in (1, 2)
    assert all(block == whole for block in blocks)
    assert bool(whole.get("triton.cudagraphs")) is (mode in ("reduce-overhead", "max-autotune"))
    assert bool(whole.get("max_autotune")) is mode.startswith("max-autotune")


class Breaking(nn.Module):
    """A block whose graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return x + hidden.relu()


class Looped(nn.Module):
    """A loop over blocks that break, a raw weight, and functions of one signature with results of other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(16, 16) * 0.2)
        self.blocks = nn.ModuleList(Breaking() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.mix
        for block in self.blocks:
            x = block(x)
        return x.sigmoid().tanh().exp().square().mean()


@pytest.mark.parametrize(
    "policy",
    [
        {"default": "r"},
        {"layers": [{"match": "blocks.*", "recipe": "r"}], "activations": "bf16"},
        {"activations": "bf16"},
    ],
    ids=["raw weights", "activations and layers", "activations"],
)
def test_a_break_in_a_loop_changes_no_result(policy: dict[str, Any]) -> None:
    """``mean`` gave what ``square`` gives: the loss of such a compiled script was not even a number."""
    torch.manual_seed(0)
    model, x = Looped(), torch.randn(2, 8, 16)
    Policy.model_validate({"recipes": {"r": {"format": "bf16"}}} | policy).apply(model)
    eager = model(x)
    compiled = torch.compile(model)
    for _ in range(2):
        loss = compiled(x)
        assert loss.shape == eager.shape
        assert torch.allclose(loss, eager, rtol=1e-2)
        loss.backward()
