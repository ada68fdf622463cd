"""What a policy says beside its layers: what is refused, and what is written to its file."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from autoprec.policy import ImplementationPolicy, OptimizerPolicy, Policy, policy_from_dict
from autoprec.policy.sections import REFUSED_STATE, STEPPING


@pytest.mark.parametrize(("part", "value"), sorted(REFUSED_STATE))
def test_storage_that_breaks_training_is_refused_with_its_reason(part: str, value: str) -> None:
    with pytest.raises(ValidationError, match="is refused: ") as caught:
        OptimizerPolicy.model_validate({part: value})
    assert REFUSED_STATE[part, value] in str(caught.value)


@pytest.mark.parametrize("how", STEPPING)
def test_how_it_steps_is_not_what_it_stores(how: str) -> None:
    other = OptimizerPolicy.model_validate({how: {"update": "fused", "products": "bf16"}[how]})
    assert not other.stores
    assert other != OptimizerPolicy()


def test_a_way_to_compute_is_written_where_one_was_chosen() -> None:
    chunked = Policy(implementation=ImplementationPolicy(loss="chunked"))
    assert chunked.to_dict()["implementation"] == {"loss": "chunked"}
    assert policy_from_dict(chunked.to_dict()) == chunked
    assert "implementation" not in Policy().to_dict()
