"""``autoprec schema``."""

import pytest

from tests.cli.helpers import autoprec


@pytest.mark.parametrize(("kind", "key"), [("policy", "layers"), ("space", "choices")])
def test_the_schema_describes_every_key_and_refuses_others(kind: str, key: str) -> None:
    document = autoprec("schema", kind).json()
    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert key in document["properties"]
    assert "schema" in document["properties"], "keys are spelled as in files"
    assert document["additionalProperties"] is False


def test_an_unknown_kind_is_a_usage_error() -> None:
    found = autoprec("schema", "polcy")
    assert found.code == 2
    assert "policy" in found.err
