"""Execute what a policy says about activations and about operators: softmax, norms, embeddings, losses, attention.

Inside the root model's forward, and only there: ``activations`` is ``torch.autocast``; softmax, norms, embeddings and
losses are computed in float32, whether a module, a function or a hand-written ``exp``/``sum``/``rsqrt`` chain computes
them (the float32 list of CUDA autocast, on every device); SDPA, and the products of an attention written by hand, run
in the dtype ``operators.attention`` names. A torch-function mode sees all of it without touching the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoprec.applying.around.functions import FLOAT32_FUNCTIONS, PAIRS, PRODUCTS, RUNNING, WRAPPED
from autoprec.applying.around.layout import BY_LAYOUT, Viewed, as_written, channels_last
from autoprec.applying.around.logits import Logits, chunked_cross_entropy, is_chunkable, is_widening
from autoprec.applying.around.lookups import LOOKUPS, look_up, table_of
from autoprec.applying.around.outputs import each_tensor, holds_low, unwidened, widened, widest
from autoprec.applying.around.recompute import carry_into_recomputation
from autoprec.applying.around.unfused import may_be_unfused, unfused_attention
from autoprec.applying.compiling import only_in_graphs
from autoprec.backends import Backend
from autoprec.errors import UnsupportedError
from autoprec.numerics.delayed.steps import DelayedReduction
from autoprec.numerics.plan import DTYPE_NAMES, NATIVE
from autoprec.numerics.rounding import SIXTEEN_BIT, cast_values, fast_bf16_gemm
from autoprec.policy import ImplementationPolicy, OperatorPolicy

#: Autograd nodes between a weight and what a product multiplies by: casts and views.
_VIEWS = (
    "ToCopy",
    "View",
    "Transpose",
    "Permute",
    "TBackward",
    "Expand",
    "Squeeze",
    "Clone",
    "Select",
    "Slice",
    "Split",
)


def _is_weight(value: Tensor) -> bool:
    """Say whether a tensor is a Parameter, or a view or cast copy of one."""
    if isinstance(value, nn.Parameter) or isinstance(value._base, nn.Parameter):
        return True
    node: Any = value.grad_fn
    while node is not None and any(name in node.name() for name in _VIEWS):
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in SIXTEEN_BIT else value
    if isinstance(value, (tuple, list)):
        return type(value)(_wide(item) for item in value)
    return value


def _narrow(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype is torch.float32 else value
    if isinstance(value, tuple):
        return tuple(_narrow(item, dtype) for item in value)
    return value


def _low_dtype(args: tuple[Any, ...]) -> torch.dtype | None:
    for value in args:
        if isinstance(value, Tensor) and value.dtype in SIXTEEN_BIT:
            return value.dtype
    return None


@only_in_graphs
class OperatorMode(TorchFunctionMode):
    """Runs operators in float32, and attention in its own dtype, for the duration of a forward.

    Args:
        share: of the gradient that reaches the tables of embeddings; ``looked_up`` are the ids of those that were seen.
    """

    def __init__(
        self,
        operators: OperatorPolicy,
        device: str,
        executed: dict[str, str],
        autocast: bool,
        *,
        share: float = 1.0,
        implementation: ImplementationPolicy,
    ) -> None:
        super().__init__()
        self.chunked = implementation.loss == "chunked"
        self.unfused = implementation.attention == "unfused"
        self.viewed = Viewed() if implementation.layout == "channels_last" else None
        self.share, self.looked_up = share, set[int]()
        self.in_float32 = {
            function: entry
            for function, entry in FLOAT32_FUNCTIONS.items()
            if getattr(operators, entry[0]) == "fp32" and (autocast or not entry[1])
        }
        self.device, self.executed, self.autocast = device, executed, autocast
        self.attention = NATIVE.get(operators.attention)
        self.slow: set[torch.dtype] = set()  # dtypes whose products are computed in float32
        self.emulated: torch.dtype | None = None  # products under autocast in this dtype are computed in float32
        self.lstm: torch.dtype | None = None  # the same of those that oneDNN has no kernel for

    def does_nothing(self) -> bool:
        """Say whether the mode would change no call: then it is left out, and autocast is torch's own alone."""
        asked = self.in_float32 or self.attention or self.emulated or self.lstm
        return not (asked or self.chunked or self.viewed or self.unfused) and self.share == 1.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.share != 1.0 and func in LOOKUPS:
            self._note_lookup(table_of(func, args, kwargs))
            return look_up(lambda given, named: self._run(func, given, named), func, args, kwargs, self.share)
        return self._run(func, args, kwargs)

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function in the precision that the policy asks of its class."""
        if self.chunked and (found := self._in_slices(func, args, kwargs)) is not None:
            return found
        if self.viewed is not None and func in BY_LAYOUT and not torch.compiler.is_compiling():
            return self.viewed.ask(func, args, kwargs)
        entry = self.in_float32.get(WRAPPED.get(getattr(func, "__name__", ""), func))
        if kwargs.get("out") is not None:  # writes into a tensor whose dtype is what it is
            if entry is not None and (low := _low_dtype((*args, *kwargs.values()))) is not None:
                self._note(entry[0], DTYPE_NAMES[low])
            return func(*args, **kwargs)
        if entry is not None:
            return self._float32(func, entry[0], args, kwargs)
        if self.attention is not None and self._attends(func, args):
            return self._attend(func, args, kwargs, self.attention)
        if self.unfused and func is F.scaled_dot_product_attention and (low := self._runs_in(args, kwargs)):
            return self._attend(func, args, kwargs, low)
        emulated = self.lstm if func is torch.lstm else self.emulated
        if emulated is not None and func in PRODUCTS and torch.is_autocast_enabled(self.device):
            return self._emulate(func, args, kwargs, emulated)
        if func is Tensor.unflatten:  # its body calls super(), which Dynamo traces in a method's call alone
            return args[0].unflatten(*args[1:], **kwargs)
        return func(*args, **kwargs)

    def _in_slices(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a loss that is computed in slices, or logits that are widened for one; None of any other call."""
        if func is F.cross_entropy:
            given: Any = args[0] if args else kwargs.get("input")
            if isinstance(given, Logits) or not is_chunkable(given):
                return None
            found = chunked_cross_entropy(*args, **{"logits" if k == "input" else k: v for k, v in kwargs.items()})
            if found is not None:
                self.note_slices()
            return found
        if args and is_widening(func, args[1:], kwargs) and args[0].dtype in SIXTEEN_BIT and is_chunkable(args[0]):
            return Logits.of(args[0], self.note_slices)
        return None

    def note_slices(self) -> None:
        """Write down that a loss was computed in slices."""
        self.executed["implementation.loss"] = "chunked"
        self._note("loss", "fp32")

    def _emulate(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
    ) -> Any:
        """Narrow values, float32 arithmetic, narrow result; layers under a plan have autocast off: not seen here."""

        def rounded(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return cast_values(value, dtype)
            return type(value)(rounded(item) for item in value) if isinstance(value, (tuple, list)) else value

        with torch.autocast(self.device, enabled=False):
            out = func(*rounded(args), **{key: rounded(value) for key, value in kwargs.items()})
        if isinstance(out, tuple):  # of a recurrent layer, with its states
            return tuple(one.to(dtype) for one in out)
        return out.to(dtype) if out.is_floating_point() else out  # complex numbers stay as they are

    def _float32(self, func: Callable[..., Any], kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: tuple[Any, ...] = (*args, *kwargs.values())
        if not torch.compiler.is_compiling():
            self._note(kind, "fp64" if widest(given) is torch.float64 else "fp32")
        if kind == "embedding":
            # looking a row up is exact in any dtype: only the result is widened
            out = func(*args, **kwargs)
            return _wide(out) if self.autocast else out
        low = _low_dtype(given)
        if low is None:
            return func(*args, **kwargs)
        autocast = self.autocast or torch.is_autocast_enabled(self.device)
        wide = [_wide(value) for value in args]
        kwargs = {key: _wide(value) for key, value in kwargs.items()}
        if kwargs.get("dtype") in SIXTEEN_BIT:
            kwargs["dtype"] = torch.float32
        with torch.autocast(self.device, enabled=False):
            out = func(*wide, **kwargs)
        if func in RUNNING:  # running statistics are written in place, and what was written is the copy's
            for held, used in zip(given, (*wide, *kwargs.values()), strict=True):
                if isinstance(held, Tensor) and held is not used and held is not given[0] and not held.requires_grad:
                    held.copy_(used)
        # outside autocast the script's own layers expect the dtype that torch would return: the first operand's of a
        # norm, whose weights may be wider, else the widest
        dtypes = [value.dtype for value in given if isinstance(value, Tensor) and value.is_floating_point()]
        narrow = dtypes[0] in SIXTEEN_BIT and (kind == "norm" or all(dtype in SIXTEEN_BIT for dtype in dtypes))
        return _narrow(out, low) if narrow and not autocast else out

    def _note(self, kind: str, what: str) -> None:
        """Write down what ran; of a class that ran in several dtypes, one of 16 bits."""
        if not torch.compiler.is_compiling() and (what != "fp32" or self.executed.get(kind) in (None, "fp32")):
            self.executed[kind] = what

    def _note_lookup(self, table: Tensor) -> None:
        if table.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.executed["embedding_gradient"] = f"{self.share:g}"
            self.looked_up.add(id(table))

    def _attends(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Say whether this is attention: SDPA, or a product of two activations (the graph's scores and values)."""
        if func is F.multi_head_attention_forward:  # its own products are not seen from here
            runs = torch.get_autocast_dtype(self.device) if self.autocast else args[0].dtype
            self._note("attention", DTYPE_NAMES.get(runs, str(runs)))
        if func is F.scaled_dot_product_attention:
            return True
        operands = [value for value in args if isinstance(value, Tensor)][-2:]
        if func not in PAIRS or len(operands) < 2 or min(x.ndim for x in operands) < 2:
            return False
        if not all(x.is_floating_point() for x in operands):  # complex numbers or integers: no dtype of ours fits
            return False
        return not any(_is_weight(x) for x in operands)

    def _runs_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        """Return the dtype of 16 bits that attention runs in as the script has it, where the device multiplies it."""
        if torch.is_autocast_enabled(self.device):
            dtype = torch.get_autocast_dtype(self.device)
        else:
            dtype = (args[0] if args else kwargs["query"]).dtype
        return dtype if dtype in SIXTEEN_BIT and dtype not in self.slow else None

    def _attend(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
    ) -> Any:
        """Call what attends in a dtype; torch's attention in 16 bits perhaps written out."""
        original = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).dtype

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        if dtype in self.slow:
            out = self._emulate(func, args, kwargs, dtype)
        else:
            if self.unfused and func is F.scaled_dot_product_attention and dtype in SIXTEEN_BIT:
                func = self._written_out(args, kwargs)
            with torch.autocast(self.device, enabled=False):
                out = func(*[cast(a) for a in args], **{key: cast(value) for key, value in kwargs.items()})
        self._note("attention", DTYPE_NAMES[dtype])
        return out if self.autocast or self.attention is None else out.to(original)

    def _written_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Tensor]:
        """Return what computes a call of torch's attention in its products, or torch's own where that may not be."""
        if not may_be_unfused(args, kwargs):
            return F.scaled_dot_product_attention
        if not torch.compiler.is_compiling():
            self.executed["implementation.attention"] = "unfused"
        return unfused_attention


def refuse_export() -> NoReturn:
    """Say how a model under a policy is exported.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "a model under a policy cannot be traced, scripted or exported to ONNX",
        fix="policy.remove(model) first: weights and results are then those of the script's own model",
    )


@dataclass(slots=True)
class RootExecution:
    """What surrounds the root model's forward under a policy.

    Attributes:
        activations: autocast dtype, or None for keep.
        operators: what runs in float32, and the dtype of attention.
        device: device type of the model (cpu, cuda).
        held: the parameters of each module; the script may cast the model after the policy was applied.
        emulates_casts: bfloat16 products are emulated where a CPU has no units for them.
        embedding_gradient: share of their gradient that the tables of embeddings get.
        context: what a backend needs around the whole forward, if anything.
        first: called before the first forward, outside of compiled graphs, if anything.
        before: begins each forward for delayed scales, where the policy has any.
        after_step: called when an optimizer has stepped, if anything.
        backends: what runs the layers; the next phase's layers are theirs as well.
        executed: what ran: activations, softmax, norm, embedding, loss, output, attention.
        replaced: the forward is one that a library stored on the instance (accelerate does), which may begin autocast.
        narrowed: the model's output was rounded to 16 bits before it was widened to FP32.
        unwidened: the class of an output whose tensors stay in 16 bits.
        scales: a layer runs below 16 bits, which TorchScript and ONNX have no words for.
        implementation: whether losses are in slices, attention is written out, and images have their channels last.
    """

    activations: torch.dtype | None
    operators: OperatorPolicy
    device: str = "cpu"
    held: Sequence[Mapping[str, Tensor | None]] = ()
    emulates_casts: bool = False
    embedding_gradient: float = 1.0
    executed: dict[str, str] = field(default_factory=dict)
    replaced: bool = False
    called: bool = False
    traced: bool = False
    narrowed: bool = False
    unwidened: str = ""
    modes: dict[bool, OperatorMode] = field(init=False, default_factory=dict)
    idle: dict[bool, bool] = field(init=False, default_factory=dict)
    context: Callable[[], AbstractContextManager[Any]] | None = None
    first: Callable[[], None] | None = None
    before: DelayedReduction | None = None
    after_step: Callable[[], None] | None = None
    backends: tuple[Backend, ...] = ()
    scales: bool = False
    implementation: ImplementationPolicy = field(default_factory=ImplementationPolicy)

    def __post_init__(self) -> None:
        carry_into_recomputation(OperatorMode)
        slow = {torch.float16} if self.device == "cpu" else set()
        if self.emulates_casts and not fast_bf16_gemm(self.device):
            slow.add(torch.bfloat16)
        # all from the start: one made during a traced call would make Dynamo compile that call twice
        for autocast in (False, True):
            mode = self.modes[autocast] = OperatorMode(
                self.operators,
                self.device,
                self.executed,
                autocast,
                share=self.embedding_gradient,
                implementation=self.implementation,
            )
            mode.slow = slow
            mode.emulated = self.activations if self.activations in slow else None
            without_units = self.device == "cpu" and not fast_bf16_gemm("cpu")
            mode.lstm = self.activations if without_units else mode.emulated
            self.idle[autocast] = mode.does_nothing()

    @property
    def emulates_activations(self) -> bool:
        """Whether products under autocast are computed in float32, of operands that are rounded to its dtype."""
        return self.modes[True].emulated is not None

    @property
    def low_precision(self) -> bool:
        """Whether the model holds bfloat16 or float16 parameters now."""
        return any(p is not None and p.dtype in SIXTEEN_BIT for held in self.held for p in held.values())

    def needed(self, device: str, given: Any = ()) -> bool:
        """Say whether anything of low precision can reach the operators at all; ``given``: the forward's inputs."""
        return (
            self.activations is not None
            or self.low_precision
            or self.operators.attention != "keep"
            or self.embedding_gradient != 1.0
            or self.implementation.loss != "keep"
            or self.implementation.attention != "keep"
            or self.implementation.layout != "keep"
            or torch.is_autocast_enabled(device)
            or self.replaced
            or holds_low(given)
        )

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model's forward under the policy.

        Args:
            forward: the model's own.
            args, kwargs: of the call.
        """
        if self.scales and (
            torch._C._get_tracing_state() is not None
            or (torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export())
        ):
            refuse_export()
        self.called = True
        if torch.compiler.is_compiling():
            self.traced = True
        elif self.first is not None:
            self.first()
            self.first = None
        device = self.device
        if self.before is not None:
            self.before()
        if self.context is not None:
            with self.context():
                return self._run(forward, args, kwargs, device)
        return self._run(forward, args, kwargs, device)

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any, device: str) -> Any:
        if not self.needed(device, (args, kwargs)):
            return forward(*args, **kwargs)
        turned: list[int] = []
        if self.implementation.layout == "channels_last":
            args, kwargs = channels_last((args, kwargs), turned)
            if turned:
                self._note("implementation.layout", "channels_last")
        if self.activations is None:
            output = self._guarded(forward, args, kwargs, torch.is_autocast_enabled(device))
        else:
            self._note("activations", DTYPE_NAMES[self.activations])
            with torch.autocast(device, self.activations):
                output = self._guarded(forward, args, kwargs, True)
        return self.finish(each_tensor(output, as_written) if turned else output)

    def _guarded(self, forward: Callable[..., Any], args: Any, kwargs: Any, autocast: bool) -> Any:
        if self.idle[autocast]:
            return forward(*args, **kwargs)
        with (mode := self.modes[autocast]):
            output = forward(*args, **kwargs)
        if mode.viewed is not None:
            mode.viewed.check()
        return output

    def _note(self, kind: str, what: str) -> None:
        # Dynamo guards on a dictionary that a traced call writes to, and would compile every model twice
        if not torch.compiler.is_compiling():
            self.executed[kind] = what

    @property
    def ran(self) -> dict[str, str]:
        """What ran, by operator class; of a traced forward, what it was traced with."""
        traced: dict[str, str] = {}
        if self.traced and self.activations is not None:
            traced["activations"] = DTYPE_NAMES[self.activations]
            if self.operators.output == "fp32":
                traced["output"] = "fp32"
        return traced | self.executed

    @property
    def looked_up(self) -> set[int]:
        """The ids of the tables whose gradient was shrunk, as far as that was seen: not inside compiled graphs."""
        return {found for mode in self.modes.values() for found in mode.looked_up}

    def finish(self, output: Any) -> Any:
        """Widen the model's output (any nesting of tensors) to float32 if the policy says so."""
        widens = self.activations is not None and self.operators.output == "fp32"
        if widens and not torch.compiler.is_compiling():
            self._note("output", "fp64" if widest(output) is torch.float64 else "fp32")
            self.narrowed, self.unwidened = holds_low(output), unwidened(output)
        if self.implementation.loss == "keep":
            return each_tensor(output, widened) if widens else output
        said = self.modes[widens].note_slices

        def handed_out(value: Tensor) -> Tensor:
            wide = widens or value.dtype is torch.float32
            if wide and is_chunkable(value) and not isinstance(value, Logits):
                return Logits.of(value, said)
            return widened(value) if widens else value

        return each_tensor(output, handed_out)
