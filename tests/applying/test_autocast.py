"""The preset "bf16 autocast" is torch.autocast as a person writes it: the same bits, the same operators and dtypes.

A person puts model and loss under it. A policy surrounds the model's forward and widens what comes out: torch's losses
are on autocast's FP32 list, so they see the same numbers. Arithmetic that a script writes between the two by hand runs
in FP32 where autocast would leave it in 16 bits.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.applying.policy import apply_policy
from autoprec.policy import Policy
from autoprec.policy.space import load_space
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.problem import Problem
from tests.loops import LOOPS
from tests.tuning.models import gpt

STEPS = 4
#: Operators that compute nothing: where a cast stands among them is not what is compared.
MOVES = re.compile(
    r"aten\.(_to_copy|view|_unsafe_view|t|transpose|squeeze|unsqueeze|expand|detach|select|slice|permute)\b"
)
#: The loss does arithmetic of its own on what the model returns.
OWN_ARITHMETIC = "vae"
SPACE = load_space("cpu")


class Operators(TorchDispatchMode):
    """Notes every operator that runs, with the dtypes of what it takes and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flat = [*args, *(out if isinstance(out, (tuple, list)) else [out])]
        if not MOVES.match(str(func)):
            self.seen.append((str(func), *(x.dtype for x in flat if isinstance(x, torch.Tensor))))
        return out


def train(name: str, policy: Policy | None) -> tuple[list[float], list[tuple[Any, ...]]]:
    """Return the losses of a few steps and the operators of the last one, by hand or under a policy."""
    torch.manual_seed(0)
    model, batch, loss_of = LOOPS[name]()
    if policy is not None:
        apply_policy(policy, model)
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.05), torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        given, operators = batch(generator), Operators()
        by_hand = torch.autocast("cpu", torch.bfloat16) if policy is None else contextlib.nullcontext()
        with operators:
            with by_hand:
                loss = loss_of(model, given)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses, operators.seen


def preset() -> Policy:
    problem = Problem.build(gpt(), SPACE)  # the preset is the same for every model: no layer is named
    found = problem.policy(dict(presets(problem))["bf16 autocast"]).to_dict() | {"model": None}
    return Policy.model_validate({key: value for key, value in found.items() if key != "model"})


@pytest.mark.parametrize("name", [name for name in LOOPS if name != OWN_ARITHMETIC])
def test_the_preset_is_what_a_person_writes(name: str) -> None:
    try:
        by_hand, theirs = train(name, None)
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip("torch has no LSTM in bfloat16 on a CPU without bf16 units")
    losses, operators = train(name, preset())
    assert losses == by_hand
    assert operators == theirs


def test_arithmetic_between_model_and_loss_is_in_fp32() -> None:
    losses, _ = train(OWN_ARITHMETIC, preset())
    assert losses == pytest.approx(train(OWN_ARITHMETIC, None)[0], rel=1e-3)


def test_norms_forced_into_fp32_are_something_else() -> None:
    """What the preset was before."""
    forced = Policy.model_validate({"activations": "bf16"})
    assert train("conv_net", forced)[1] != train("conv_net", None)[1]
