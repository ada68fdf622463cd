"""A result survives JSON, with the keys that programs read."""

import json

from autoprec.tuning.study.records import SearchResult


def test_a_result_survives_and_has_the_keys_that_programs_read() -> None:
    result = SearchResult(
        "adopt",
        "because",
        "policy.yaml",
        {"speedup": 2.0},
        {},
        ({"name": "bf16"},),
        (),
        {"complete": 3},
        "s",
        "u",
        {},
        1.5,
    )
    document = json.loads(json.dumps(result.to_json()))
    assert SearchResult.from_json(document) == result
    documented = ("verdict", "reason", "policy", "best", "reference", "presets", "front", "trials", "study", "storage")
    assert set(document) >= {*documented, "mlflow", "seconds"}
