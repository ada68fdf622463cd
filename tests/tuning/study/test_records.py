"""A result survives JSON, with the keys that programs read, and is a table for people."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.errors import AutoPrecError
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.study import StudyStore, default_storage
from tests.tracking.conftest import make_records, make_result

RESULT = make_result(make_records())


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


def test_a_result_is_a_table_for_people_and_the_same_document_for_programs() -> None:
    result = make_result(make_records())
    assert "verdict: adopt. 2.50x faster" in str(result)
    assert str(result).splitlines()[0] == "demo on cpu"
    assert "<td" in result._repr_html_()
    assert repr(result) == "SearchResult(adopt, 2.50x over the script, policy='policy.yaml', study_name='demo')"
    assert json.loads(json.dumps(result.to_json())) == json.loads(
        json.dumps(replace(result, _address="x:secret@y").to_json())
    )
    assert result.to_json()["study"] == "demo"


def test_the_study_and_the_trials_of_a_result(tmp_path: Path) -> None:
    store = StudyStore(default_storage(tmp_path), "demo", ("step_time_ms", "divergence"), resume=False)
    for record in make_records():
        store.add(record)
    result = replace(RESULT, storage="sqlite:///where/it/is/shown.db", _address=default_storage(tmp_path))
    assert result.study.metric_names == ["step_time_ms", "divergence"]
    frame = result.to_pandas()
    assert list(frame["kind"][:3]) == ["reference", "noise", "preset"]
    assert frame["speedup"].dtype == float
    assert "record" not in frame
    gone = replace(RESULT, study_name="another", _address=default_storage(tmp_path))
    with pytest.raises(AutoPrecError, match="the study 'another' cannot be opened"):
        _ = gone.study
