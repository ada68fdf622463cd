"""Names that MLflow accepts."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from autoprec.tracking.store import safe_key


@given(st.text(max_size=400))
def test_every_name_becomes_one_that_mlflow_accepts(name: str) -> None:
    key = safe_key(name)
    assert 0 < len(key) <= 250
    assert re.fullmatch(r"[/\w.\- :]+", key)
    assert ".." not in key
    assert not key.startswith("/")


def test_readable_names_stay() -> None:
    assert safe_key("layer/transformer.h.0.attn") == "layer/transformer.h.0.attn"
    assert safe_key("h.*.attn{q,k}") == "h._.attn_q_k_"
