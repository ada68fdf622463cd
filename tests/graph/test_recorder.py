"""The recorder: exact FLOPs on the right layers, no trace left in the step, whatever the script does."""

import functools
import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec.applying.compiling import compiled_graphs
from autoprec.cost import CostModel
from autoprec.graph.recorder import StepRecorder, record_step
from autoprec.graph.report import GraphReport
from autoprec.precision.hardware import target
from tests.graph.models import BATCH, TOKENS, WIDTH, Decoder, decoder_step, token_batch
from tests.warm import run_ranks

ROWS = BATCH * TOKENS


def shapes(report, name):
    return {g.role: (g.m, g.k, g.n, g.calls, g.batch) for g in report.layer(name).gemms}


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    model = Decoder()
    return record_step(model, lambda: decoder_step(model), optimizers=[torch.optim.AdamW(model.parameters())])


def test_every_linear_has_its_three_gemms(report):
    assert shapes(report, "blocks.0.gate") == {
        "fprop": (ROWS, WIDTH, 64, 1, 1),
        "dgrad": (ROWS, 64, WIDTH, 1, 1),
        "wgrad": (64, ROWS, WIDTH, 1, 1),
    }
    for layer in report.layers:
        once = 2 * ROWS * layer.parameters if layer.name == "head" else None
        assert set(layer.flops) == {"fprop", "dgrad", "wgrad"}
        assert len(set(layer.flops.values())) == 1
        assert once is None or layer.flops["fprop"] == once


def test_layers_are_those_a_policy_names_in_model_order(report):
    from autoprec.applying.units import tunable_units

    assert [layer.name for layer in report.layers] == list(tunable_units(Decoder()))
    assert all(layer.tunable and layer.dtype == "fp32" for layer in report.layers)


def test_first_and_head_are_flagged_and_batch_is_seen(report):
    assert report.layer("blocks.0.attn.q_proj").flags == ("first",)
    assert report.layer("head").flags == ("head",)
    assert report.batch == {"samples": BATCH, "tokens": ROWS}


def test_total_is_layers_plus_attention(report):
    attention = sum(o.flops for o in report.operators if o.cls == "attention")
    assert report.total_flops == sum(layer.total_flops for layer in report.layers) + attention
    assert report.tunable_flops_share == pytest.approx(1 - attention / report.total_flops)
    # scores and values in forward, five products in fused backward, two blocks
    assert attention == 2 * (2 + 5) * 2 * BATCH * 4 * TOKENS * TOKENS * (WIDTH // 4)


def test_no_operator_without_a_class_and_no_backward_without_a_forward(report):
    assert not [o.op for o in report.operators if o.cls == "opaque"]
    assert report.notes == ()
    assert {o.phase for o in report.operators} == {"forward", "backward"}


def test_json_round_trip(report):
    assert GraphReport.from_json(report.to_json()) == report


def test_recording_changes_no_bit():
    def gradients(record):
        torch.manual_seed(3)
        model = Decoder(fused=False)
        ids, targets = token_batch()
        if record:
            record_step(model, lambda: decoder_step(model, ids, targets))
        else:
            decoder_step(model, ids, targets)
        return [p.grad for p in model.parameters()], torch.rand(1)

    (plain, after), (recorded, after_recorded) = gradients(False), gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert torch.equal(after, after_recorded)


def test_the_collector_hardly_walks_what_is_recorded_and_is_as_it_was_afterwards() -> None:
    model, before = nn.Sequential(*(nn.Linear(4, 4) for _ in range(300))), gc.get_threshold()
    walks: list[str] = []

    def walked(phase: str, _info: object) -> None:
        walks.append(phase)

    gc.callbacks.append(walked)
    try:
        record_step(model, lambda: model(torch.randn(2, 4)).sum().backward())
    finally:
        gc.callbacks.remove(walked)
    assert len(walks) <= 24  # 134 with the collector as it was
    assert gc.get_threshold() == before
    assert gc.isenabled()


def test_tensors_are_not_kept_alive():
    import weakref

    model = nn.Linear(4, 4)
    with StepRecorder(model) as recorder:
        out = model(torch.ones(2, 4))
        alive = weakref.ref(out)
        out.sum().backward()
        del out
        assert alive() is None
    assert recorder.report().layer("").total_flops > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_recomputed_not_counted_twice(reentrant):
    model = Decoder(reentrant=reentrant)
    report = record_step(model, lambda: decoder_step(model))
    roles = shapes(report, "blocks.1.gate")
    assert roles["fprop"][3] == roles["dgrad"][3] == roles["wgrad"][3] == 1
    assert roles["recompute"][:3] == roles["fprop"][:3]
    assert "recompute" not in shapes(report, "head")
    assert report.notes == ()


class Inside(nn.Module):
    """Checkpoints a function of its own, with operators and a product between its modules."""

    def __init__(self, reentrant):
        super().__init__()
        self.up, self.down, self.weight = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.randn(8, 8))
        self.reentrant = reentrant

    def body(self, x):
        return x + self.down(torch.relu(self.up(F.linear(x, self.weight))).square())

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_runs_again_between_modules_is_recomputed_in_the_module_around_it(reentrant):
    """It was taken for a backward pass that is differentiated, so that a layer behind it was offered no 8 bits."""
    model = nn.Sequential(nn.Linear(8, 8), Inside(reentrant), Inside(reentrant))
    report = record_step(model, lambda: model(torch.randn(4, 8)).sum().backward())
    again = [(row.module, row.op) for row in report.operators if row.phase == "recompute" and row.cls != "view"]
    names = ("aten::mm", "aten::relu", "aten::pow", *(("aten::add",) if reentrant else ()))
    assert [found for found in again if "." not in found[0]] == [(block, name) for block in "21" for name in names]
    assert not any("double_backward" in layer.flags for layer in report.layers)
    calls = {gemm.role: gemm.calls for gemm in report.layer("1").gemms}
    assert calls == {"fprop": 1, "dgrad": 1, "wgrad": 1, "recompute": 1}


def test_gradient_accumulation_adds_up():
    model = Decoder()

    def step():
        decoder_step(model)
        decoder_step(model)

    report = record_step(model, step)
    assert {g.calls for g in report.layer("head").gemms} == {2}
    assert report.batch["samples"] == 2 * BATCH


def test_autocast_shows_in_the_layers_dtype():
    model = Decoder()

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            out = model(token_batch()[0])
        out.float().sum().backward()

    report = record_step(model, step)
    assert {layer.dtype for layer in report.layers} == {"bf16"}
    assert all(layer.roles() == ("fprop", "dgrad", "wgrad") for layer in report.layers)


def test_a_compiled_model_is_seen_through():
    model = Decoder(layers=1)
    compiled = torch.compile(model, backend="eager")
    ids, targets = token_batch()
    report = record_step(compiled, lambda: F.cross_entropy(compiled(ids).flatten(0, 1), targets).backward())
    assert report.layer("blocks.0.up").roles() == ("fprop", "dgrad", "wgrad")
    assert {layer.name for layer in report.layers} == {name for name in report.groups for name in report.groups[name]}


class _Normed(nn.Module):  # Dynamo does not begin in torch's own modules
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + F.gelu(self.up(self.norm(x)))


class _Stack(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        self.blocks, self.head = nn.ModuleList([_Normed(), _Normed()]), nn.Linear(8, 2)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.inside or torch.is_autocast_enabled("cpu")):
            for block in self.blocks:
                x = block(x)
            return self.head(x).float()


def _blocks(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


_COMPILES = {
    "whole": lambda model: torch.compile(model, backend="aot_eager"),
    "in place": lambda model: model.compile(backend="aot_eager") or model,
    "blocks": _blocks,
    "function": lambda model: torch.compile(lambda x: model(x), backend="aot_eager"),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo hides it by another way than a filter
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("compiles", _COMPILES.values(), ids=_COMPILES)
def test_a_compiled_step_under_autocast_is_recorded_as_its_eager_operators(compiles, inside):
    """Autocast is the script's, or inside the model as a policy has it; what a norm saved fits its backward."""

    def recorded(compiles):
        torch.compiler.reset()
        model = _Stack(inside)
        called, x, before = compiles(model), torch.ones(3, 8), compiled_graphs()

        def step():
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
                out = called(x.bfloat16())
            out.square().sum().backward()

        step()
        compiled = compiled_graphs()
        return record_step(model, step), compiled - before, compiled_graphs() - compiled

    report, compiled, meanwhile = recorded(compiles)
    expected, none, _ = recorded(lambda model: model)
    assert (compiled > 0, none, meanwhile) == (True, 0, 0)
    assert {layer.dtype for layer in report.layers} == {"bf16"}
    assert report.operators == expected.operators


def test_a_root_that_was_already_running_is_recognised():
    from torch.nn.modules.module import register_module_forward_pre_hook

    model, started = Decoder(layers=1), []

    def begin(module, _args):
        if not started:
            started.append(StepRecorder(model))
            started[0].__enter__()

    handle = register_module_forward_pre_hook(begin)
    decoder_step(model)
    handle.remove()
    started[0].__exit__(None, None, None)
    report = started[0].report()
    assert {o.module for o in report.operators if o.op == "aten::embedding"} == {"embed"}
    assert report.batch["tokens"] == ROWS


def test_a_model_inside_a_module_that_is_not_its_own_is_called():
    """Fabric's wrapper, or a module that computes the loss beside the model: the optimizer has the inner one."""

    class WithLoss(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x, y):
            return nn.functional.mse_loss(self.model(x), y)

    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    with StepRecorder(model) as recorder:
        WithLoss(model)(torch.randn(4, 8), torch.randn(4, 4)).backward()
    report = recorder.report()
    assert report.root_called
    assert not [note for note in report.notes if "not called" in note]


def test_frozen_weights_have_no_wgrad_and_the_first_layer_no_dgrad():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].requires_grad_(False)
    report = record_step(model, lambda: model(torch.randn(3, 8)).sum().backward())
    assert report.layer("0").roles() == ("fprop", "wgrad")
    assert report.layer("1").roles() == ("fprop", "dgrad")
    assert "frozen" in report.layer("1").flags


def test_custom_functions_and_weights_used_outside_a_module():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w, grad.t() @ x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.w, self.v = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return F.linear(Product.apply(self.a(x), self.w), self.v)

    model = Net()
    report = record_step(model, lambda: model(torch.randn(2, 8)).sum().backward())
    for name, tunable in (("w", False), ("v", True)):
        layer = report.layer(name)
        assert (layer.kind, layer.tunable) == ("functional", tunable)
        assert layer.roles() == ("fprop", "dgrad", "wgrad")
    assert "custom autograd function" in report.layer("w").reason
    assert report.tunable_flops_share == pytest.approx(5 / 8)  # a has no dgrad: its input is the batch


def test_loss_only_backward_and_second_backward_do_not_stop_the_recorder():
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)

    def step():
        first = model(x).square().sum()
        first.backward(retain_graph=True)
        first.backward()
        model(x).sum().backward()

    report = record_step(model, step)
    counts = {g.role: g.calls for g in report.layer("").gemms}
    assert counts == {"fprop": 2, "wgrad": 3}


def test_double_backward_is_recorded():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(2, 4, requires_grad=True)

    def step():
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (grad.norm() - 1).square().backward()

    report = record_step(model, step)
    shapes = {(g.role, g.m, g.k, g.n): g.calls for g in report.layer("0").gemms}
    # the input's gradient, its own two derivatives, and the two of the forward product behind the activation
    assert shapes == {("fprop", 2, 4, 4): 1, ("dgrad", 2, 4, 4): 3, ("wgrad", 4, 2, 4): 2}
    assert not any("could not be mapped" in note for note in report.notes)
    assert all(o.cls != "opaque" for o in report.operators)


def test_an_exception_in_the_script_passes_through_and_hooks_are_gone():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("the script's own")

    with pytest.raises(ValueError, match="own"), StepRecorder(Broken()) as recorder:
        recorder.names.root(torch.ones(1))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_torch_func_runs_as_it_would_alone():
    model = nn.Linear(4, 4)
    original = torch.autograd.graph.disable_saved_tensors_hooks

    def step():
        torch.func.grad(lambda x: model(x).sum())(torch.randn(4))
        model(torch.randn(2, 4)).square().sum().backward()

    report = record_step(model, step)
    assert report.memory["saved_for_backward"] == report.memory["live_at_backward"]
    assert report.layer("").flops["fprop"] > 0
    assert torch.autograd.graph.disable_saved_tensors_hooks is original
    assert not torch._C._autograd._top_saved_tensors_default_hooks(False)


def test_nested_scripted_and_lazy_models():
    nested = nn.Linear(8, 4)

    def step():
        rows = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
        nested(rows).values().sum().backward()

    assert record_step(nested, step).layer("").flops["fprop"] == 2 * 5 * 8 * 4
    lazy = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4))
    report = record_step(lazy, lambda: lazy(torch.randn(2, 6)).sum().backward())
    assert {layer.name: layer.flops["fprop"] for layer in report.layers} == {"0": 2 * 2 * 6 * 8, "1": 2 * 2 * 8 * 4}
    sparse = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4))
    report = record_step(sparse, lambda: sparse(torch.tensor([[1, 2]])).sum().backward())
    assert report.layer("1").roles() == ("fprop", "dgrad", "wgrad")


def test_gradient_clipping_is_no_forward_operator():
    model = nn.Linear(4, 4)

    def step():
        model(torch.randn(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    report = record_step(model, step)
    assert "update" in {o.phase for o in report.operators}


def test_semi_private_torch_functions_are_there():
    assert torch.autograd._get_sequence_nr() >= 0
    assert torch._C._current_graph_task_id() == -1
    assert torch._C._current_autograd_node() is None


def test_what_autograd_saved_is_attributed_to_the_operator_that_filled_the_memory(report):
    forward = [row for row in report.operators if row.phase == "forward"]
    saved = sum(sum(row.out_saved) for row in forward)
    assert 0.9 * report.memory["saved_for_backward"] <= saved <= report.memory["saved_for_backward"]
    assert all(len(row.out_saved) == len(row.out_shapes) for row in report.operators)
    views = [row for row in forward if row.cls == "view"]
    assert views
    assert not any(any(row.out_saved) for row in views)


def test_every_tensor_input_names_its_maker(report):
    for row in report.operators:
        assert len(row.sources) == len(row.shapes)
        assert {index for index in row.sources if index >= 0} == set(row.inputs)
    again = GraphReport.from_json(report.to_json())
    assert again.operators == report.operators


def record_sharded(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    adam = torch.optim.Adam(model.parameters())
    report = record_step(model, lambda: model(torch.randn(2, 4, 16)).sum().backward(), optimizers=[adam])
    found = {name: shapes(report, name) for name in ("0", "2")}
    parameters = report.model["parameters"]
    cost = CostModel(report, target("h100"))
    held = report.memory["parameters"], report.memory["optimizer"], round(report.held * parameters), cost.parameters
    torch.save(found | {"flops": report.total_flops, "all": parameters, "held": held}, folder / f"out.{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_layer_sharded_by_tensor_parallelism_has_the_gemms_of_one_rank(tmp_path):
    ended = run_ranks(lambda rank: record_sharded(rank, tmp_path), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        found = torch.load(tmp_path / f"out.{rank}")
        assert found["0"] == {"fprop": (8, 16, 32, 1, 1), "wgrad": (32, 8, 16, 1, 1)}
        assert found["2"]["fprop"] == (8, 32, 32, 1, 1)
        assert found["2"]["dgrad"] == (8, 32, 32, 1, 1)
        # DTensor finds shapes of whole tensors by running operators on fake ones, which is not work of the step
        mine = 32 * 16 + 32 + 32 * 32 + 32  # the second bias is on both ranks
        assert found["all"] == 64 * 16 + 64 + 32 * 64 + 32
        assert found["held"] == (4 * mine, pytest.approx(8 * mine, abs=64), mine, pytest.approx(mine))
        assert found["flops"] == 2 * (2 * 8 * 16 * 32) + 3 * (2 * 8 * 32 * 32)


@pytest.mark.parametrize("root", ["linear", "raw"])
def test_tensors_that_stand_for_parameters_are_known_by_their_names(root: str) -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w

    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) if root == "linear" else Raw()
    held = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    step = functools.partial(torch.func.functional_call, model, held, (torch.randn(4, 16),))
    outside = record_step(model, lambda: torch.autograd.grad(step().sum(), list(held.values())))
    plain = record_step(model, lambda: model(torch.randn(4, 16)).sum().backward())
    assert [layer.name for layer in outside.layers] == [layer.name for layer in plain.layers]
    assert all(layer.tunable for layer in outside.layers)
    assert [layer.flops for layer in outside.layers] == [layer.flops for layer in plain.layers]
    assert "attention" not in {operator.cls for operator in outside.operators}
