"""Exported Python is a text in ``templates/`` in which every ``@NAME@`` is filled in."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from autoprec.export.base import Request
from autoprec.export.naming import TORCH_DTYPES
from autoprec.policy import LayerPlan

#: Who casts the model's output to FP32: ``templates/mechanics.py.txt``.
CASTS_OUTPUT = "the exported module casts the model's output"
#: Templates that others name.
_SHARED = ("settings", "plan_of", "mechanics", "context")


def template(name: str) -> str:
    """Return a text of ``templates/``."""
    path = resources.files("autoprec.export") / "templates" / f"{name}.py.txt"
    return path.read_text(encoding="utf-8").removesuffix("\n")


def fill(name: str, request: Request, **values: str) -> str:
    """Return a template with the policy's settings and these values, and with the templates that it names."""
    policy, text = request.policy, template(name)
    values |= {
        "ACTIVATIONS": TORCH_DTYPES.get(policy.activations, "None"),
        "ATTENTION": TORCH_DTYPES.get(policy.operators.attention, "None"),
        "WIDE": str(wide_output(request)),
    }
    for other in _SHARED:
        text = text.replace(f"@{other.upper()}@", template(other))
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def dtype_table(names: Mapping[LayerPlan, str], runs: Mapping[LayerPlan, LayerPlan]) -> str:
    """Return the source of a mapping from the names of plans that run in one plain dtype to torch's."""
    plain = {names[plan]: one.fprop.format for plan, one in runs.items() if not one.scaled and one.fprop}
    return "{" + ", ".join(f'"{name}": {TORCH_DTYPES[form]}' for name, form in plain.items()) + "}"


def wide_output(request: Request) -> bool:
    """Say whether the exported module casts the model's output to float32."""
    return request.policy.operators.output == "fp32" and request.policy.activations != "keep"
