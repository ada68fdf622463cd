"""A pretended Hopper (or Blackwell) GPU, for tracing and code generation only: nothing is computed, nothing is timed.

``pretend()`` must run before torch is imported. It builds a device guard that does nothing (g++, seconds, kept in the
temporary folder) and answers torch's questions about the device. ``Generated`` then collects what Inductor would run:
Triton kernels and library calls are counted in the source it writes, bytes by its own scheduler. Needs the ``triton``
package of this torch (``pip install triton`` works without a GPU). Kernels are counted; time is not.
"""

from __future__ import annotations

import collections
import ctypes
import importlib
import importlib.util
import os
import re
import subprocess
import tempfile
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Generated", "counter", "pretend"]

_GUARD = Path(__file__).with_name("fake_cuda_guard.cpp")
#: What moves no data and starts no kernel.
_FREE = frozenset(
    (
        *("view", "t", "reshape", "_unsafe_view", "expand", "detach", "alias", "unsqueeze", "squeeze", "transpose"),
        *("permute", "slice", "select", "as_strided", "empty", "empty_like", "_reshape_alias", "unbind", "lift_fresh"),
        *("empty_strided", "is_same_size", "new_empty", "split"),
    )
)


def pretend(capability: tuple[int, int] = (9, 0), *, caches: bool = False) -> None:
    """Make torch believe in one GPU of a compute capability; call it before torch is imported.

    ``caches``: let torch keep what it compiles on disk; what it finds there can be loaded, and not be run.
    """
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": str(int(not caches))}
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    root = Path(spec.origin).parent
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(str(root / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    guard = ctypes.CDLL(str(_built(root)))
    importlib.import_module("torch")
    guard.take_guard()
    _answers(capability)


def _built(root: Path) -> Path:
    from importlib.metadata import version

    out = Path(tempfile.gettempdir()) / f"autoprec-fake-cuda-{version('torch')}.so"
    if not out.exists():
        include = root / "include"
        made = out.with_suffix(f".{os.getpid()}")
        words = ["g++", "-shared", "-fPIC", "-std=c++20", "-O1", f"-I{include}"]
        words += [f"-I{include / 'torch/csrc/api/include'}", str(_GUARD), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run([*words, "-o", str(made)], check=True)
        made.rename(out)
    return out


class _Device:
    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: Any) -> None: ...


def _answers(capability: tuple[int, int]) -> None:
    import torch
    import torch.cuda.amp.common
    import torch.cuda.random

    properties = types.SimpleNamespace(
        name="pretended GPU", major=capability[0], minor=capability[1], multi_processor_count=132,
        total_memory=80 << 30, warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20, uuid="x", gcnArchName="", type="cuda",
        is_integrated=0,
    )  # fmt: skip
    cuda: Any = torch.cuda
    cuda.amp.common.amp_definitely_not_available = lambda: False
    for name, value in {
        "is_bf16_supported": True, "is_available": True, "device_count": 1, "current_device": 0,
        "is_initialized": False, "is_current_stream_capturing": False,
        "_lazy_init": None, "get_device_capability": capability, "synchronize": None,
        "get_device_properties": properties, "get_device_name": properties.name,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
    }.items():  # fmt: skip
        setattr(cuda, name, lambda *_, value=value, **__: value)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.device = cuda._DeviceGuard = _Device
    torch.version.cuda = "13.0"
    torch.__config__.show = lambda: "-DUSE_MSLK"  # as torch's own wheels for CUDA are built
    torch._C._cuda_getCurrentRawStream = lambda _: 0  # type: ignore[attr-defined]
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", lambda size, dtype=None, **_: torch.empty(size, dtype=dtype), "CUDA")
    strided = lambda size, stride, dtype=None, **_: torch.empty_strided(size, stride, dtype=dtype)  # noqa: E731
    library.impl("empty_strided", strided, "CUDA")
    globals()["_library"] = library  # its registrations end with it
    _triton(capability)


def _triton(capability: tuple[int, int]) -> None:
    import torch
    import torch.utils._triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Driver:
        is_active = staticmethod(lambda: True)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

        def get_current_device(self) -> int:
            return 0

        def get_device_interface(self) -> Any:
            return torch.cuda

        def get_benchmarker(self) -> None:
            return None

    driver.set_active(Driver())
    torch.utils._triton.triton_hash_with_backend = lambda: "pretended"


@dataclass
class Generated:
    """What Inductor generated: kernels by kind, the bytes its scheduler counts, and graphs."""

    kernels: collections.Counter[str] = field(default_factory=collections.Counter)
    bytes: int = 0
    graphs: int = 0

    def clear(self) -> None:
        self.kernels, self.bytes, self.graphs = collections.Counter(), 0, 0

    def install(self) -> None:
        """Collect from now on; generated code is not run, its graph is interpreted on fake tensors instead."""
        import torch
        import torch._inductor.config as config
        import torch._inductor.fx_passes.fuse_attention as attention
        import torch._inductor.fx_passes.pad_mm as pad
        import torch._inductor.graph as inductor

        config.shape_padding, config.compile_threads = False, 1
        empty = Path(tempfile.gettempdir()) / "autoprec-fake-cuda.py"
        empty.write_text("")
        made = self

        class Interpreter(torch.fx.Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                out = super().call_function(target, args, kwargs)
                return [torch.empty_like(x) for x in args[0]] if out is None and "foreach" in str(target) else out

        def to_module(self: Any) -> Any:
            code, _ = self.codegen()
            made.graphs += 1
            made.kernels += _calls(code.value if hasattr(code, "value") else code)
            made.bytes += sum(node.get_read_write_buffers_sizes() for node in self.scheduler.nodes)
            graph = getattr(self, "orig_gm", self.module)
            self.cache_key, self.cache_path, self.cache_linemap = "k", str(empty), []
            run = lambda values: Interpreter(graph).run(*values)  # noqa: E731
            return types.SimpleNamespace(call=run, __file__=str(empty), __name__="x", benchmark_compiled_module=None)

        inductor.GraphLowering.compile_to_module = to_module
        attention._sfdp_init = pad._pad_mm_init = lambda *_, **__: None
        for name in ("misc_patterns",):
            module: Any = importlib.import_module(f"torch._inductor.fx_passes.{name}")
            module._misc_patterns_init = lambda *_, **__: None


def _calls(source: str) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for line in source[source.index("def call(") :].splitlines():
        kernel = re.match(r"\s*(triton_[a-z0-9]+)_\w*\.run\(", line)
        extern = re.search(r"(extern_kernels\.\w+|torch\.ops\.[\w.]+?)\(", line)
        if kernel:
            found[kernel[1]] += 1
        if extern and "alloc" not in line:
            found[extern[1]] += 1
    return found


def counter() -> Any:
    """Return a dispatch mode that counts eager operators which start a kernel, and the bytes they move."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.operators: collections.Counter[str] = collections.Counter()
            self.bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func._schema.name.split("::")[1]
            if name not in _FREE and "prim" not in func._schema.name:
                self.operators[name] += 1
                every = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
                self.bytes += sum(x.numel() * x.element_size() for x in {id(x): x for x in every}.values())
            return out

    return Count()
