"""Pieces of Python that several exported modules share, and how they are filled in."""

from __future__ import annotations

from collections.abc import Mapping

from autoprec.export.base import Request
from autoprec.export.naming import TORCH_DTYPES
from autoprec.policy import LayerPlan

#: Who casts the model's output to FP32: :data:`ATTEND`.
CASTS_OUTPUT = "the exported module casts the model's output"

PLAN_OF = '''
def plan_of(name):
    """The plan of a layer by its module name."""
    return next((plan for pattern, plan in RULES if re.fullmatch(pattern, name, re.DOTALL)), "keep")
'''

LEFT_OUT = '''
def warn_of_left_out(model):
    """Say which layers a rule is about and are not nn.Linear: nothing is changed in them."""
    left = []
    for name, module in model.named_modules():
        kinds = (nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
        if isinstance(module, kinds) or type(module).__name__ == "Conv1D":
            attends = isinstance(module, nn.MultiheadAttention)
            plan = plan_of(f"{name}.in_proj_weight" if attends else name)
            if plan != "keep" and (ACTIVATIONS is None or DTYPES.get(plan) is not ACTIVATIONS):
                left.append(name)
    if left:
        shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        warnings.warn(f"only nn.Linear is converted, and a rule is about {shown}: left as they are", stacklevel=3)
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

ATTEND = '''
class Attention(torch.overrides.TorchFunctionMode):
    """Runs scaled_dot_product_attention in ATTENTION, whatever autocast says."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query = args[0] if args else kwargs["query"]
        kind = query.device.type

        def cast(value):
            return value.to(ATTENTION) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        under = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False):
            out = func(*[cast(value) for value in args], **{key: cast(value) for key, value in kwargs.items()})
        return out if under else out.to(query.dtype)


def widened(value):
    """Floating-point tensors in a nest of lists, tuples and dictionaries, in float32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        changed = {key: widened(item) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, (tuple, list)):
        items = [widened(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def attend(model):
    """Wrap the model's forward: attention inside it runs in ATTENTION, and WIDE_OUTPUT returns float32."""
    if (ATTENTION is None and not WIDE_OUTPUT) or hasattr(model, "precision_attention"):
        return model
    inner = model.forward

    def forward(*args, **kwargs):
        with contextlib.nullcontext() if ATTENTION is None else Attention():
            out = inner(*args, **kwargs)
        return widened(out) if WIDE_OUTPUT else out

    model.precision_attention = ATTENTION
    model.forward = forward
    return model
'''

CONTEXT = '''
def autocast(device_type="cuda"):
    """The policy's activations: run the forward pass and the loss inside."""
    return torch.autocast(device_type, ACTIVATIONS or torch.bfloat16, enabled=ACTIVATIONS is not None)
'''


#: What is written of the policy at the top of a module that converts a model, beside its rules.
SETTINGS = """# plans in a plain floating-point format
DTYPES = @DTYPES@
ACTIVATIONS = @ACTIVATIONS@  # autocast dtype of the training step
ATTENTION = @ATTENTION@  # dtype of scaled_dot_product_attention, None: as autocast says
WIDE_OUTPUT = @WIDE@  # the model returns float32"""


def shared(request: Request) -> dict[str, str]:
    """Return what every exported module is filled in with: the snippets above, and the policy's settings."""
    policy = request.policy
    return {
        "SETTINGS": SETTINGS,
        "PLAN_OF": PLAN_OF,
        "MECHANICS": "\n".join((LEFT_OUT, RUN_IN, ATTEND, CONTEXT)),
        "CONTEXT": CONTEXT,
        "ACTIVATIONS": TORCH_DTYPES.get(policy.activations, "None"),
        "ATTENTION": TORCH_DTYPES.get(policy.operators.attention, "None"),
        "WIDE": str(wide_output(request)),
    }


def dtype_table(names: Mapping[LayerPlan, str], runs: Mapping[LayerPlan, LayerPlan]) -> str:
    """Return the source of a mapping from the names of plans that run in one plain dtype to torch's."""
    plain = {names[plan]: one.fprop.format for plan, one in runs.items() if not one.scaled and one.fprop}
    return "{" + ", ".join(f'"{name}": {TORCH_DTYPES[form]}' for name, form in plain.items()) + "}"


def wide_output(request: Request) -> bool:
    """Say whether the exported module casts the model's output to float32."""
    return request.policy.operators.output == "fp32" and request.policy.activations != "keep"


def fill(template: str, **values: str) -> str:
    """Replace every ``@NAME@`` of a template; sections are kept two blank lines apart."""
    for name, value in values.items():
        template = template.replace(f"@{name}@", value)
    return template
