"""Pieces of Python that several exported modules share, and how they are filled in."""

from __future__ import annotations

__all__ = ["CONTEXT", "PLAN_OF", "RUN_IN", "fill"]

PLAN_OF = '''
def plan_of(name):
    """The plan of a layer by its module name."""
    return next((plan for pattern, plan in RULES if re.fullmatch(pattern, name, re.DOTALL)), "keep")
'''

RUN_IN = '''
def run_in(module, dtype):
    """Make one linear layer compute in dtype, and return what the rest of the model expects."""

    def forward(x):
        kind = x.device.type
        under = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with torch.autocast(kind, enabled=False):
            bias = None if module.bias is None else module.bias.to(dtype)
            out = nn.functional.linear(x.to(dtype), module.weight.to(dtype), bias)
        return out if under and dtype is torch.float32 else out.to(under or x.dtype)

    module.precision_dtype = dtype
    module.forward = forward
'''

CONTEXT = '''
def autocast(device_type="cuda"):
    """The policy's activations: run the forward pass and the loss inside."""
    return torch.autocast(device_type, ACTIVATIONS or torch.bfloat16, enabled=ACTIVATIONS is not None)
'''


def fill(template: str, **values: str) -> str:
    """Replace every ``@NAME@`` of a template; sections are kept two blank lines apart."""
    for name, value in values.items():
        template = template.replace(f"@{name}@", value)
    return template
