"""What other tracers see of the same steps: coverage, names, backward attribution, for benchmarks/graph/graph.py."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.graph.truth import built, loss_of, truth

_GEMMS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "conv2d", "conv1d", "matmul")
#: torch.compile takes seconds per model: a third of the zoo, the hard cases in it.
COMPILED = (
    "gpt2",
    "llama",
    "llama checkpointed",
    "mixtral",
    "bert",
    "t5",
    "vit",
    "nn.Transformer",
    "LSTM",
    "GPT checkpointed",
    "control flow on data",
    "custom autograd function",
    "MoE over a ModuleList",
)


class Loss(nn.Module):
    """A model and its loss as one module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> torch.Tensor:
        return loss_of(self.model(**inputs))


def _named(model: nn.Module, inputs: dict[str, Any]) -> nn.Module:
    """A wrapper with plain arguments: symbolic_trace knows no keyword dictionary."""
    names = ", ".join(inputs)
    keywords = ", ".join(f"{name}={name}" for name in inputs)
    space: dict[str, Any] = {"loss_of": loss_of}
    exec(f"def forward(self, {names}):\n    return loss_of(self.model({keywords}))\n", space)
    return type("Named", (Loss,), {"forward": space["forward"]})(model)


def _layers(model: nn.Module) -> set[str]:
    return {n for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))}


def _stack_name(node: fx.Node, key: str) -> str:
    stack: Any = node.meta.get(key) or {}
    last = str(next(reversed(list(stack.values())), ("",))[0])
    return last.removeprefix("L['self'].").removeprefix("L__self___").removeprefix("model.")


def _is_gemm(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and str(node.target).split(".")[1:2] != []
        and (str(node.target).split(".")[1].removesuffix("_backward") in _GEMMS)
    )


def symbolic(model: nn.Module, inputs: dict[str, Any]) -> tuple[set[str], bool]:
    graph = fx.symbolic_trace(_named(model, inputs)).graph
    return {str(n.target).removeprefix("model.") for n in graph.nodes if n.op == "call_module"}, False


def exported(model: nn.Module, inputs: dict[str, Any]) -> tuple[set[str], bool]:
    graph = torch.export.export(Loss(model), (), inputs, strict=False).graph
    return {_stack_name(n, "nn_module_stack") for n in graph.nodes if _is_gemm(n)}, False


def compiled(model: nn.Module, inputs: dict[str, Any]) -> tuple[set[str], bool]:
    """Capture forward and backward graphs; attributed only if every layer's backward GEMM names it."""
    from torch._dynamo.backends.common import aot_autograd

    seen: set[str] = set()
    back: set[str] = set()

    def keep(into: set[str], key: str) -> Callable[..., Any]:
        def compiler(graph: fx.GraphModule, _inputs: Any) -> Any:
            into.update(_stack_name(n, key) for n in graph.graph.nodes if _is_gemm(n))
            return graph.forward

        return compiler

    backend = aot_autograd(fw_compiler=keep(seen, "nn_module_stack"), bw_compiler=keep(back, "fwd_nn_module_stack"))
    torch._dynamo.reset()
    torch.compile(Loss(model), backend=backend)(**inputs).backward()
    return seen, _layers(model) <= back


def counted(model: nn.Module, inputs: dict[str, Any]) -> tuple[set[str], bool]:
    """FlopCounterMode: a layer is right when its total is the closed form of forward plus backward."""
    with truth(model) as expected, FlopCounterMode(display=False) as mode:
        loss_of(model(**inputs)).backward()
    prefix = f"{type(model).__name__}."
    counts = {name.removeprefix(prefix): sum(ops.values()) for name, ops in mode.get_flop_counts().items()}
    right = {name for name, (forward, backward) in expected.items() if counts.get(name) == forward + backward}
    return right, set(expected) <= right


class TooLongError(Exception):
    pass


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLongError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def peer_table(models: dict[str, Callable[[], Any]]) -> list[str]:
    """Run every peer; one row each."""
    peers: dict[str, tuple[Callable[..., tuple[set[str], bool]], set[str]]] = {
        "torch.fx.symbolic_trace": (symbolic, set(models)),
        "torch.export (strict=False)": (exported, set(models)),
        "torch.compile capture": (compiled, set(COMPILED)),
        "FlopCounterMode (names: totals right)": (counted, set(models)),
    }
    lines = ["| peer | steps captured | layers named | steps with every layer's backward right | CPU time |"]
    lines += ["|---|---|---|---|---|"]
    failures: list[str] = []
    for title, (peer, chosen) in peers.items():
        ok = named = total = attributed = 0
        start = time.process_time()
        for name in sorted(chosen):
            model, inputs = built(models[name])
            layers = _layers(model)
            total += len(layers)
            try:
                with _limit(120), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    found, backward = peer(model, inputs)
            except Exception as error:
                failures.append(f"- {title}, {name}: {type(error).__name__}")
                continue
            ok, named, attributed = ok + 1, named + len(layers & found), attributed + backward
        seconds = time.process_time() - start
        lines.append(
            f"| {title} | {ok} / {len(chosen)} | {named} / {total} | {attributed} / {len(chosen)} | {seconds:.0f} s |"
        )
        print(lines[-1], file=sys.stderr)
    return [*lines, "", "Not captured:", "", *failures]
