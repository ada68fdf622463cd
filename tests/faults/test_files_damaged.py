"""Truncated and flipped files of a search: refused with what, where and how to go on, or read as they were written."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.errors import StudyError
from tests.faults.damage import Kept, Outcome, StudyOpen, cut_everywhere, flip_at_random, kept_files, read_study

KINDS = {"study database": (997, 60), "policy with evidence": (3, 300), "sensitivity table": (1, 400),
         "space (no checksum)": (7, 200), "policy by hand (no checksum)": (7, 200)}  # fmt: skip
GOOD = {"refused", "same value", "another valid value"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kept]:
    """One file of each kind, for all tests: each writes the bytes anew."""
    return {file.name: file for file in kept_files(tmp_path_factory.mktemp("kept"), trials=3)}


@pytest.fixture
def kept(request: pytest.FixtureRequest, written: dict[str, Kept], tmp_path: Path) -> Kept:
    file = written[request.param]
    return replace(file, path=tmp_path / file.path.name)


def judge(outcome: Outcome, name: str, fault: str) -> None:
    print(f"{name}, {fault}: {dict(outcome.counts)}")
    assert set(outcome.counts) <= GOOD, outcome.faults[:3]
    assert outcome.counts["refused"] > 0


@pytest.mark.parametrize("kept", KINDS, indirect=True)
def test_truncation(kept: Kept) -> None:
    judge(cut_everywhere(kept, step=KINDS[kept.name][0]), kept.name, "truncated")


@pytest.mark.parametrize("kept", KINDS, indirect=True)
def test_flipped_bits(kept: Kept) -> None:
    judge(flip_at_random(kept, KINDS[kept.name][1], seed=3), kept.name, "flipped")


@pytest.fixture
def study(written: dict[str, Kept], tmp_path: Path) -> Path:
    file = written["study database"]
    path = tmp_path / file.path.name
    path.write_bytes(file.raw)
    return path


def edit(path: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute(statement, values).rowcount > 0
    connection.commit()
    connection.close()


def test_a_changed_number_in_a_record_names_the_study_and_the_trial(study: Path) -> None:
    edit(study, "update trial_user_attributes set value_json = replace(value_json, '11.0', '10.0') where trial_id = 2")
    before = study.read_bytes()
    with pytest.raises(StudyError, match="checksum does not match") as caught:
        read_study(study)
    assert "study study, trial 1" in caught.value.where
    assert "--study NEW" in caught.value.fix
    assert study.read_bytes() == before


@pytest.mark.parametrize(
    "statement",
    [
        "delete from trial_user_attributes where trial_id = 2",
        "update trial_user_attributes set key = 'recosd' where trial_id = 2 and key = 'record'",
        "update trials set number = 7 where trial_id = 2",
        "update trials set state = 'RUNNING' where trial_id = 3",
        "update trials set state = 'COMPLEUE' where trial_id = 3",
        "update trials set study_id = 9 where trial_id = 3",
        "delete from trials where trial_id = 1",
        "update studies set study_name = 'studz'",
        "delete from study_user_attributes",
    ],
)
def test_a_row_that_is_gone_or_astray_is_refused(study: Path, statement: str) -> None:
    edit(study, statement)
    with pytest.raises(Exception, match=r"fix:|no setup") as caught:
        read_study(study)
    assert getattr(caught.value, "what", "")


def test_one_record_that_lost_its_checksum_is_refused(study: Path) -> None:
    edit(study, "update trial_user_attributes set value_json = replace(value_json, 'checksum', 'chfcksum') "
                "where trial_id = 1")  # fmt: skip
    with pytest.raises(StudyError, match="damaged"):
        read_study(study)


def test_a_changed_setup_is_damage_and_not_another_setup(study: Path) -> None:
    edit(study, "update study_user_attributes set value_json = replace(value_json, 'train.py', 'trbin.py')")
    with pytest.raises(StudyError, match="checksum does not match") as caught:
        read_study(study)
    assert caught.value.where.endswith("study study, setup")


def test_an_emptied_database_is_not_begun_anew(study: Path) -> None:
    study.write_bytes(b"")
    with pytest.raises(StudyError, match="it is empty"), StudyOpen(study.parent):
        pass
    assert study.read_bytes() == b""
