"""A stand-in for Transformer Engine's compiled extension, so that TE's real Python runs on a CPU.

Only what ``te.Linear`` calls is here: quantise, multiply, update delayed scales. "Quantised data" is the float32
values left of a tensor in one direction, computed by AutoPrec's own quantiser from the options of TE's quantizer;
every product is logged. Whatever else TE asks of the extension raises when it is called. Patches torch for good:
run it in a process of its own. TE's Python is not part of this repository: see :func:`find_te`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from autoprec.numerics.operand import QuantizerState, ScaleRule, Spec
from autoprec.numerics.quantize import dequantize, quantize

#: Names a folder that holds the ``transformer_engine`` package (its Python is enough) and its ``dist-info``.
VARIABLE = "AUTOPREC_TE_PYTHON"
#: What TE imports and does not need for a linear layer.
_NOT_NEEDED = ("triton", "onnx", "onnxscript", "einops", "nvdlfw_inspect")
#: Every product: format of A, format of B, layout, split accumulator.
GEMMS: list[tuple[str, str, str, bool]] = []
#: Every delayed update: direction ("forward", "backward") by the number of histories, algorithm, margin.
UPDATES: list[dict[str, Any]] = []


def find_te() -> list[Path]:
    """Return folders that hold TE's Python: those the variable names, else what is installed."""
    named = os.environ.get(VARIABLE)
    if named:
        return [Path(one) for one in named.split(os.pathsep) if (Path(one) / "transformer_engine").is_dir()]
    try:
        spec = importlib.util.find_spec("transformer_engine")
    except (ImportError, ValueError):
        return []
    found = None if spec is None or spec.origin is None else Path(spec.origin).parent.parent
    return [found] if found is not None and (found / "transformer_engine" / "pytorch").is_dir() else []


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "3.5.0"
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def refuse(self) -> None:
        """From now on, calling what is not written here raises."""
        for name, value in vars(self).items():
            if isinstance(value, MagicMock):
                value.side_effect = NotImplementedError(f"the stand-in extension has no {name}")


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes packages that TE imports, and this machine lacks, importable."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        del path, target
        if fullname.split(".")[0] in _NOT_NEEDED:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        made = _Module(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: Any) -> None:
        del module


class DType(enum.IntEnum):
    kByte = 0  # noqa: N815 - TE's own names
    kInt32 = 2  # noqa: N815
    kFloat32 = 4  # noqa: N815
    kFloat16 = 5  # noqa: N815
    kBFloat16 = 6  # noqa: N815
    kFloat8E4M3 = 7  # noqa: N815
    kFloat8E5M2 = 8  # noqa: N815
    kFloat4E2M1 = 10  # noqa: N815


_DTYPES = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
_FORWARD = [f"GEMM{i}_{x}" for i in (1, 2, 3) for x in ("INPUT", "WEIGHT", "OUTPUT")]
_BACKWARD = [f"GRAD_{x}{i}" for i in (1, 2, 3) for x in ("OUTPUT", "INPUT")]


def _enums(folder: Path, module: Any) -> None:
    """Define the extension's enumerations with the members that TE's Python reads from them."""
    members: dict[str, list[str]] = {}
    sources = [file.read_text() for file in (folder / "transformer_engine" / "pytorch").rglob("*.py")]
    for text in sources:
        for name, member in re.findall(r"int\(\s*(?:tex\.)?([A-Z]\w+)\.(\w+)\s*\)", text):
            members.setdefault(name, []).append(member)
        for name, member in re.findall(r"\b(NVTE_\w+)\.(NVTE_\w+)\b", text):
            members.setdefault(name, []).append(member)
    members |= {"FP8FwdTensors": _FORWARD, "FP8BwdTensors": _BACKWARD}
    for name, listed in members.items():
        if name != "DType":
            setattr(module, name, enum.IntEnum(name, [(member, i) for i, member in enumerate(dict.fromkeys(listed))]))
    module.DType = DType


def _format(quantizer: Any) -> str:
    return {DType.kFloat8E5M2: "e5m2", DType.kFloat4E2M1: "e2m1"}.get(DType(int(quantizer.dtype)), "e4m3")


def _values(x: Tensor, quantizer: Any, axis: int) -> Tensor:
    """Return what the quantizer leaves of a 2-D tensor that is summed over ``axis``, as float32."""
    kind, name = type(quantizer).__name__, _format(quantizer)
    if kind == "Float8Quantizer":  # delayed: the scale is given, the amax is kept for the update
        quantizer.amax.copy_(torch.maximum(quantizer.amax, x.abs().amax().float()))
        limit = 57344.0 if name == "e5m2" else 448.0
        dtype = torch.float8_e5m2 if name == "e5m2" else torch.float8_e4m3fn
        return (x.float() * quantizer.scale).clamp(-limit, limit).to(dtype).float() / quantizer.scale
    scaling = ScaleRule(
        power_of_2=getattr(quantizer, "force_pow_2_scales", False), amax_epsilon=getattr(quantizer, "amax_epsilon", 0.0)
    )
    if kind == "Float8CurrentScalingQuantizer":
        spec = Spec("tensor", name, -1, scaling)
    elif kind == "Float8BlockQuantizer":
        square = quantizer.block_scaling_dim == 2
        spec = Spec("block", name, -1 if square else axis, dataclasses.replace(scaling, granularity="block"), square)
    elif kind == "MXFP8Quantizer":
        spec = Spec("mx", name, axis)
    elif kind == "NVFP4Quantizer":
        square = bool(quantizer.with_2d_quantization)
        spec = Spec("nvfp4", name, -1 if square else axis, square=square)
    else:
        raise NotImplementedError(f"the stand-in extension quantises nothing by {kind}")
    return dequantize(quantize(x, spec, state=QuantizerState()))


def _storage(quantizer: Any, row: Tensor | None, column: Tensor | None, dtype: torch.dtype) -> Any:
    import transformer_engine.pytorch as te

    kind, one = type(quantizer).__name__, torch.ones(1)
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        return te.Float8TensorStorage(
            data=row,
            fp8_scale_inv=one,
            fp8_dtype=quantizer.dtype,
            fake_dtype=dtype,
            data_transpose=None if column is None else column.t().contiguous(),
            quantizer=quantizer,
        )
    parts: dict[str, Any] = {
        "rowwise_data": row,
        "rowwise_scale_inv": None if row is None else one,
        "columnwise_data": column,
        "columnwise_scale_inv": None if column is None else one,
        "quantizer": quantizer,
        "fake_dtype": dtype,
    }
    if kind == "Float8BlockQuantizer":
        parts |= {"is_2D_scaled": quantizer.block_scaling_dim == 2, "fp8_dtype": quantizer.dtype}
        if "data_format" in te.Float8BlockwiseQTensorStorage.__new__.__code__.co_varnames:  # until 2.11
            parts["data_format"] = sys.modules["transformer_engine_torch"].Float8BlockScaleTensorFormat.GEMM_READY
        return te.Float8BlockwiseQTensorStorage(**parts)
    if kind == "MXFP8Quantizer":
        return te.MXFP8TensorStorage(**parts, fp8_dtype=quantizer.dtype, with_gemm_swizzled_scales=False)
    parts |= {"amax_rowwise": one, "amax_columnwise": one, "fp4_dtype": quantizer.dtype}
    return te.NVFP4TensorStorage(**parts, with_gemm_swizzled_scales=False)


def _quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    if output is not None or noop is not None:
        raise NotImplementedError("the stand-in extension fills no tensor in place")
    x = tensor.detach().reshape(-1, tensor.shape[-1])
    row = _values(x, quantizer, 1) if quantizer.rowwise_usage else None
    column = _values(x, quantizer, 0) if quantizer.columnwise_usage else None
    return _storage(quantizer, row, column, tensor.dtype)


def _operand(x: Any, rowwise: bool) -> tuple[str, Tensor]:
    if isinstance(x, Tensor):
        return str(x.dtype).removeprefix("torch."), x.reshape(-1, x.shape[-1]).float()
    name = f"{type(x._quantizer).__name__.removesuffix('Quantizer')}:{_format(x._quantizer)}"
    if hasattr(x, "_transpose"):
        data = x._data if x._data is not None else x._transpose.t()
    else:
        data = x._rowwise_data if rowwise else x._columnwise_data
    if data is None:
        raise RuntimeError(f"{name} was not quantised in the direction this product needs")
    return name, data.reshape(-1, data.shape[-1])


def _gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Any, _quantizer: Any, dtype: Any, *rest: Any, **_: Any
) -> Any:
    bias, split = rest[0], rest[8]
    (name_a, left), (name_b, right) = _operand(a, transa), _operand(b, not transb)
    if (":" in name_a) != (":" in name_b) or (":" not in name_a and name_a != name_b):
        raise RuntimeError(f"no kernel multiplies {name_a} by {name_b}")
    if {name_a[-4:], name_b[-4:]} == {"e5m2"}:
        raise RuntimeError("no kernel multiplies E5M2 by E5M2")
    GEMMS.append((name_a, name_b, ("T" if transa else "N") + ("T" if transb else "N"), bool(split)))
    product = (right.t() if transb else right) @ (left.t() if transa else left)
    product = product if bias is None or rest[4] else product + bias.float()
    product = product.to(torch.bfloat16 if dtype is None else _DTYPES[DType(int(dtype))])
    if out is not None:
        out.copy_(product)
        product = out
    return product, None, None, None


def _update(
    amax: Tensor, histories: list[Tensor], scales: list[Tensor], algorithm: str, dtype: Any, margin: int
) -> None:
    """Delayed scaling's update, as ``common/recipe/delayed_scaling.cu`` does it."""
    limit = 57344.0 if DType(int(dtype)) is DType.kFloat8E5M2 else 448.0
    UPDATES.append({"histories": len(histories), "algorithm": algorithm, "margin": margin, "limit": limit})
    offset = 0
    for history, scale in zip(histories, scales, strict=True):
        history[0].copy_(amax[offset : offset + history.shape[1]])
        offset += history.shape[1]
        found = history.amax(0) if algorithm == "max" else history[0].clone()
        history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()
        fresh = limit / found / 2.0**margin
        scale.copy_(torch.where((found > 0) & found.isfinite(), fresh, scale))


def install(folder: Path, capability: tuple[int, int] = (9, 0)) -> Any:
    """Import ``transformer_engine.pytorch`` from ``folder`` against the stand-in, as on a GPU of ``capability``."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    sys.path.insert(0, str(folder))
    sys.meta_path.append(_Absent())  # last: what is installed is used
    extension = _Module("transformer_engine_torch")
    _enums(folder, extension)
    extension.quantize, extension.generic_gemm = _quantize, _gemm
    extension.fused_amax_and_scale_update_after_reduction = _update
    extension.get_cublasLt_version = lambda: 130100
    sys.modules["transformer_engine_torch"] = extension
    _pretend_cuda(capability)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.common as common

        common.load_framework_extension = lambda name: None
        import transformer_engine.pytorch as te
        import transformer_engine.pytorch.cpp_extensions.gemm as gemm
        import transformer_engine.pytorch.quantization as state
        import transformer_engine.pytorch.tensor.nvfp4_tensor as nvfp4

    extension.refuse()
    nvfp4.get_rht_matrix = nvfp4.get_random_sign_mask_for_rht = lambda *args, **kwargs: 0  # device tensors
    gemm.get_cublas_workspace = lambda *args: torch.empty(1)
    sys.modules["transformer_engine.pytorch.module.linear"].get_workspace = lambda: torch.empty(1)  # until 2.11
    create = state.RecipeState.create
    state.RecipeState.create = staticmethod(
        lambda recipe, **options: create(recipe, **{**options, "device": torch.device("cpu")})
    )
    return te


def _pretend_cuda(capability: tuple[int, int]) -> None:
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=1, name="stand-in"
    )
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: None
    torch.version.cuda = "13.0"
    torch.Tensor.is_cuda = property(lambda self: True)  # TE refuses what is not
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    # TE asks about CUDA's autocast, the layers here enter the CPU's
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    torch.is_autocast_enabled = lambda device="cpu": enabled("cpu" if device == "cuda" else device)
    torch.get_autocast_dtype = lambda device="cpu": dtype("cpu" if device == "cuda" else device)
