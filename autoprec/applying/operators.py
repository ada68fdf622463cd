"""Execute what a policy says about activations and about operators: softmax, norms, embeddings, losses, attention.

Inside the root model's forward, and only there: ``activations`` is ``torch.autocast``; softmax, norms, embeddings and
losses are computed in float32, whether a module, a function or a hand-written ``exp``/``sum``/``rsqrt`` chain computes
them (the float32 list of CUDA autocast, on every device); SDPA runs in the dtype ``operators.attention`` names. A
torch-function mode sees all of it without touching the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoprec.numerics.plan import DTYPE_NAMES
from autoprec.numerics.rounding import cast_values, fast_bf16_gemm
from autoprec.policy import OperatorPolicy

__all__ = ["FLOAT32_FUNCTIONS", "OperatorMode", "RootExecution"]

#: Operator classes that a policy can ask to be computed in float32.
_FLOAT32_CLASSES = ("softmax", "norm", "embedding", "loss")
_LOW = (torch.bfloat16, torch.float16)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _table() -> dict[Callable[..., Any], tuple[str, bool]]:
    """Return function -> (operator class, written by hand?)."""
    softmax: list[Any] = [F.softmax, F.log_softmax, F.softmin, F.gumbel_softmax, torch.softmax, torch.log_softmax]
    softmax += [Tensor.softmax, Tensor.log_softmax, torch.logsumexp, Tensor.logsumexp]
    norm: list[Any] = [F.layer_norm, F.batch_norm, F.group_norm, F.instance_norm, F.rms_norm, F.local_response_norm]
    norm += [F.normalize, F.cosine_similarity, torch.layer_norm, torch.group_norm, torch.rms_norm]
    loss: list[Any] = [
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.kl_div,
        F.ctc_loss,
    ]
    loss += [F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.gaussian_nll_loss]
    loss += [F.cosine_embedding_loss, F.hinge_embedding_loss, F.margin_ranking_loss, F.triplet_margin_loss]
    loss += [F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.soft_margin_loss]
    exp = [torch.exp, Tensor.exp, torch.expm1, Tensor.expm1]
    chain = [
        "pow",
        "square",
        "rsqrt",
        "mean",
        "var",
        "std",
        "norm",
        "var_mean",
        "sum",
        "cumsum",
        "prod",
        "log",
        "log1p",
    ]
    found: dict[Any, tuple[str, bool]] = dict.fromkeys(softmax, ("softmax", False))
    found |= dict.fromkeys(norm, ("norm", False)) | dict.fromkeys(loss, ("loss", False))
    found |= {F.embedding: ("embedding", False), F.embedding_bag: ("embedding", False)}
    found |= dict.fromkeys(exp, ("softmax", True))
    for name in chain:
        for owner in (torch, Tensor):
            if hasattr(owner, name):
                found[getattr(owner, name)] = ("norm", True)
    found[torch.linalg.vector_norm] = found[torch.linalg.norm] = ("norm", True)
    found[Tensor.__pow__] = ("norm", True)
    return found


#: What is computed in float32, by operator class.
FLOAT32_FUNCTIONS = _table()


#: What multiplies. On a CPU the FP16 versions are 20 to 100 times slower than float32, and so may be the bfloat16 ones
#: (3 to 40 times without bfloat16 units): then they are emulated.
_PRODUCTS = frozenset(
    {
        *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.scaled_dot_product_attention, F.bilinear),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, torch.einsum),
        *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.mv),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm, Tensor.mv),
    }
)


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _LOW else value
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
        if isinstance(value, Tensor) and value.dtype in _LOW:
            return value.dtype
    return None


class OperatorMode(TorchFunctionMode):
    """Runs operators in float32, and attention in its own dtype, for the duration of a forward."""

    def __init__(self, operators: OperatorPolicy, device: str, executed: dict[str, str], autocast: bool) -> None:
        super().__init__()
        self.in_float32 = {
            function: entry
            for function, entry in FLOAT32_FUNCTIONS.items()
            if getattr(operators, entry[0]) == "fp32" and (autocast or not entry[1])
        }
        self.device, self.executed, self.autocast = device, executed, autocast
        self.attention = _DTYPES.get(operators.attention)
        self.slow: set[torch.dtype] = set()  # dtypes whose products are computed in float32
        self.emulated: torch.dtype | None = None  # products under autocast in this dtype are computed in float32

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        entry = self.in_float32.get(func)
        if entry is not None:
            return self._float32(func, entry[0], args, kwargs)
        if self.attention is not None and func is F.scaled_dot_product_attention:
            return self._attend(func, args, kwargs)
        if self.emulated is not None and func in _PRODUCTS and torch.is_autocast_enabled(self.device):
            return self._emulate(func, args, kwargs, self.emulated)
        return func(*args, **kwargs)

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
        return out.to(dtype)

    def _float32(self, func: Callable[..., Any], kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note(kind, "fp32")
        if kind == "embedding":
            # looking a row up is exact in any dtype: only the result is widened
            out = func(*args, **kwargs)
            return _wide(out) if self.autocast else out
        low = _low_dtype(args)
        if low is None:
            return func(*args, **kwargs)
        kwargs = {key: _wide(value) for key, value in kwargs.items()}
        if kwargs.get("dtype") in _LOW:
            kwargs["dtype"] = torch.float32
        with torch.autocast(self.device, enabled=False):
            out = func(*_wide(args), **kwargs)
        # outside autocast the script's own layers expect the dtype they were written for
        return out if self.autocast else _narrow(out, low)

    def _note(self, kind: str, what: str) -> None:
        if not torch.compiler.is_compiling():
            self.executed[kind] = what

    def _attend(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype: Any = self.attention
        query = args[0] if args else kwargs["query"]
        original = query.dtype

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        if dtype in self.slow:
            out = self._emulate(func, args, kwargs, dtype)
        else:
            with torch.autocast(self.device, enabled=False):
                out = func(*[cast(a) for a in args], **{key: cast(value) for key, value in kwargs.items()})
        self._note("attention", DTYPE_NAMES[dtype])
        return out if self.autocast else out.to(original)


@dataclass(slots=True)
class RootExecution:
    """What surrounds the root model's forward under a policy.

    Attributes:
        activations: autocast dtype, or None for keep.
        operators: what runs in float32, and the dtype of attention.
        device: device type of the model (cpu, cuda).
        low_precision: the model holds bfloat16 or float16 parameters.
        emulates_casts: bfloat16 products are emulated where a CPU has no units for them.
        context: what a backend needs around the whole forward, if anything.
        before: called before each forward, if anything.
        executed: what ran: activations, softmax, norm, embedding, loss, output, attention.
    """

    activations: torch.dtype | None
    operators: OperatorPolicy
    device: str = "cpu"
    low_precision: bool = False
    emulates_casts: bool = False
    executed: dict[str, str] = field(default_factory=dict)
    called: bool = False
    traced: bool = False
    modes: dict[bool, OperatorMode] = field(init=False, default_factory=dict)
    context: Callable[[], AbstractContextManager[Any]] | None = None
    before: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        slow = {torch.float16} if self.device == "cpu" else set()
        if self.emulates_casts and not fast_bf16_gemm(self.device):
            slow.add(torch.bfloat16)
        # both from the start: one made during a traced call would make Dynamo compile that call twice
        for autocast in (False, True):
            mode = self.modes[autocast] = OperatorMode(self.operators, self.device, self.executed, autocast)
            mode.slow = slow
            mode.emulated = self.activations if self.activations in slow else None

    def needed(self, device: str) -> bool:
        """Say whether anything of low precision can reach the operators at all."""
        return (
            self.activations is not None
            or self.low_precision
            or self.operators.attention != "keep"
            or torch.is_autocast_enabled(device)
        )

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model's forward under the policy."""
        self.called = True
        if torch.compiler.is_compiling():
            self.traced = True
        device = self.device
        if self.before is not None:
            self.before()
        if self.context is not None:
            with self.context():
                return self._run(forward, args, kwargs, device)
        return self._run(forward, args, kwargs, device)

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any, device: str) -> Any:
        if not self.needed(device):
            return forward(*args, **kwargs)
        if self.activations is None:
            return self._guarded(forward, args, kwargs, torch.is_autocast_enabled(device))
        self._note("activations", DTYPE_NAMES[self.activations])
        with torch.autocast(device, self.activations):
            output = self._guarded(forward, args, kwargs, True)
        return self.finish(output)

    def _guarded(self, forward: Callable[..., Any], args: Any, kwargs: Any, autocast: bool) -> Any:
        if self.device == "cuda" and autocast and not self.low_precision and self.operators.attention == "keep":
            # CUDA autocast has this very float32 list built in
            for name in _FLOAT32_CLASSES:
                if getattr(self.operators, name) == "fp32":
                    self._note(name, "fp32")
            return forward(*args, **kwargs)
        with self.modes[autocast]:
            return forward(*args, **kwargs)

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

    def finish(self, output: Any) -> Any:
        """Widen the model's output (any nesting of tensors) to float32 if the policy says so."""
        if self.activations is None or self.operators.output != "fp32":
            return output
        self._note("output", "fp32")
        return widen(output)


def widen(value: Any) -> Any:
    """Return nested containers with low-precision tensors cast to float32; other objects are returned as they are."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _LOW else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(widen(item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(widen(item) for item in value)
    if isinstance(value, dict):
        for key, item in value.items():
            changed = widen(item)
            if changed is not item:
                value[key] = changed
    return value
