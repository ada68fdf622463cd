"""GPUs that have grouped GEMMs, pretended on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autoprec.backends.experts import products
from tests.backends.experts.helpers import reference


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the CPU for a Hopper GPU: torch's operator has a stand-in there, its meta function is its own."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_grouped_mm", reference, "CPU")
    monkeypatch.setattr(products, "_on_gpu", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    yield
    library._destroy()


@pytest.fixture
def blackwell(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take it for a Blackwell GPU, and this torch for one that is built with MSLK."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    monkeypatch.setattr(torch.__config__, "show", lambda: "CXX_FLAGS= -DUSE_FBGEMM -DUSE_MSLK")
