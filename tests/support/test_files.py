"""Files: atomic writes, locks, and reading that neither runs code nor eats memory, whatever the bytes are."""

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoprec.errors import FileError, NoSpaceError, StudyError
from autoprec.support import files
from autoprec.support.files import (
    MAX_BYTES,
    MAX_DEPTH,
    cache_folder,
    canonical_json,
    check_writable,
    file_lock,
    keep_earlier,
    parse_document,
    read_document,
    with_checksum,
    without_checksum,
    write_atomic,
    write_json,
)

DATA = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(st.text(max_size=8), DATA, max_size=5)


# ------------------------------------------------------------------ writing
def test_a_write_replaces_the_whole_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    write_atomic(path, "one\n" * 1000)
    write_atomic(path, "two\n")
    assert path.read_text() == "two\n"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_a_write_keeps_the_mode_of_a_file_and_follows_the_umask_for_a_new_one(tmp_path: Path) -> None:
    kept = tmp_path / "kept.yaml"
    kept.write_text("old")
    kept.chmod(0o600)
    write_atomic(kept, "new")
    assert (kept.read_text(), kept.stat().st_mode & 0o777) == ("new", 0o600)
    before = os.umask(0o027)
    try:
        assert write_atomic(tmp_path / "new.yaml", "x").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_a_write_goes_through_a_link_and_into_what_is_not_a_regular_file(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    real.write_text("old")
    link.symlink_to("real.yaml")
    (tmp_path / "new.yaml").symlink_to("made.yaml")
    for name in ("link.yaml", "new.yaml"):
        check_writable(tmp_path / name)
        write_atomic(tmp_path / name, "text")
        assert (tmp_path / name).is_symlink()
    assert real.read_text() == (tmp_path / "made.yaml").read_text() == "text"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(fifo)
    write_atomic(fifo, "text")
    assert os.read(reader, 10) == b"text"
    assert fifo.is_fifo()
    write_atomic("/dev/null", "text")
    assert Path("/dev/null").is_char_device()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fifo", "link.yaml", "made.yaml", "new.yaml", "real.yaml"]
    os.close(reader)


def test_an_open_descriptor_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("w") as stream:
        write_atomic(f"/proc/self/fd/{stream.fileno()}", "text")
    assert (tmp_path / "out.txt").read_text() == "text"
    assert [p.name for p in tmp_path.iterdir()] == ["out.txt"]


def test_a_circle_of_links_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for write in (check_writable, lambda path: write_atomic(path, "x")):
        with pytest.raises(FileError, match="cannot write"):
            write(tmp_path / "a")


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomic(tmp_path / "a.txt", "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    path = write_atomic(tmp_path / "a.txt", "old")

    def full(_handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpaceError) as caught:
        write_atomic(path, "new")
    assert caught.value.exit_code == 6
    assert path.read_text() == "old"


def test_json_refuses_what_json_cannot_say(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"loss": math.nan})
    assert not (tmp_path / "a.json").exists()


@given(DOCUMENTS)
def test_canonical_json_does_not_depend_on_the_order_of_keys(document: dict[str, Any]) -> None:
    shuffled = dict(reversed(document.items()))
    assert canonical_json(shuffled) == canonical_json(document)
    assert json.loads(canonical_json(document)) == document


def test_writability_is_found_out_without_touching_the_file(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "policy.yaml", "old")
    before = path.stat().st_mtime_ns
    assert check_writable(path) == path
    assert path.read_text() == "old"
    assert path.stat().st_mtime_ns == before
    assert list(tmp_path.iterdir()) == [path]


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="directory, not a file"):
        check_writable(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError):
        check_writable(tmp_path / "file" / "policy.yaml")
    with pytest.raises(FileError):
        write_atomic(tmp_path / "file" / "policy.yaml", "text")
    with pytest.raises(FileError, match="cannot write"):
        write_atomic(tmp_path / ("n" * 300), "text")
    missing = tmp_path / "mistyped" / "policy.yaml"
    for path in (missing, Path("/proc/nowhere/policy.yaml")):
        with pytest.raises(FileError) as error:
            check_writable(path)
        assert error.value.code == "no-folder"
    assert not missing.parent.exists()


def test_a_malformed_text_is_named_by_file_and_line() -> None:
    with pytest.raises(FileError) as error:
        parse_document("a: 1\nb: [1, 2\nc: 3\n", where="mine.yaml")
    assert error.value.where == "mine.yaml"
    assert "line 3" in error.value.what
    assert "unicode string" not in str(error.value)


# ------------------------------------------------------------------ locks
def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "study.lock"
    code = (
        "from autoprec.support.files import file_lock\n"
        f"with file_lock({str(path)!r}): print('held', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StudyError, match=f"pid {holder.pid}") as caught, file_lock(path):
            pass
        assert caught.value.exit_code == 5
    finally:
        holder.kill()
        holder.communicate()
    with file_lock(path):  # kill -9 freed it at once
        pass


def test_a_file_system_without_locks_is_not_called_a_study_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("autoprec.support.files.fcntl.flock", no_locks)
    with pytest.raises(FileError, match="cannot be locked: No locks available"), file_lock(tmp_path / "study.lock"):
        pass


# ------------------------------------------------------------------ reading
@given(DOCUMENTS)
def test_json_and_yaml_say_the_same(document: dict[str, Any]) -> None:
    assert parse_document(json.dumps(document)) == document
    clean = json.loads(json.dumps(document))
    text = yaml.safe_dump(clean, allow_unicode=True)
    assert parse_document(text) == yaml.safe_load(text)


@given(st.text(max_size=300))
def test_any_text_is_a_mapping_or_a_file_error(text: str) -> None:
    try:
        found = parse_document(text)
    except FileError:
        return
    assert isinstance(found, dict)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_any_bytes_are_a_mapping_or_a_file_error(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(raw)
    try:
        found = read_document(path)
    except FileError as error:
        named = error.where
    else:
        assert isinstance(found, dict)
        named = str(path)
    assert named == str(path)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "aliases are not accepted"),
        ("a: " + "[" * 1000 + "]" * 1000, f"deeper than {MAX_DEPTH}"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "cannot be read|deeper"),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", f"deeper than {MAX_DEPTH}"),
        ("a: !!python/object/apply:os.system ['echo pwned']", "is not plain data"),
        ("!!python/object/apply:os.getcwd []", "is not plain data"),
        ("a: !!binary aGVsbG8=", "not plain data"),
        ("a: !!set {x, y}", "not plain data|cannot be read"),
        ("a: 1\na: 2", "'a' appears twice"),
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ("a: {b: 1, b: 2}", "'b' appears twice"),
        ("1: a", "is not text"),
        ("a: .nan", "not a finite number"),
        ("a: [{b: -.inf}]", "not a finite number"),
        ('{"a": NaN}', "not a finite number"),
        ('{"a": 1e999}', "not a finite number"),
        ("a: " + "9" * 30, "64 bits"),
        ('{"a": "\\ud800"}', "not Unicode"),
        ("- a\n- b", "holds a list"),
        ("just text", "holds text, not a mapping"),
        ("", "is empty, not a mapping"),
        ("# only a comment", "is empty"),
        ("null", "is empty"),
        ("true", "holds a truth value"),
        ("1.5", "holds a number"),
        ("a: [1, 2", "cannot be read"),
        ("a: 'b", "cannot be read"),
        ("\x00", "cannot be read"),
    ],
)
def test_documents_that_are_refused(text: str, says: str) -> None:
    with pytest.raises(FileError, match=says):
        parse_document(text, where="x.yaml")


def test_the_code_in_a_yaml_tag_does_not_run(tmp_path: Path) -> None:
    target = tmp_path / "pwned"
    with pytest.raises(FileError):
        parse_document(f"a: !!python/object/apply:pathlib.Path.touch [{target}]")
    assert not target.exists()


def test_a_huge_file_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as stream:
        stream.truncate(50 * 2**30)  # sparse: reading it whole would not fit into memory
    with pytest.raises(FileError, match="larger than"):
        read_document(path)
    with pytest.raises(FileError, match="larger than"):
        parse_document("#" * (MAX_BYTES + 1))


def test_dates_stay_text() -> None:
    assert parse_document("date: 2026-11-21") == {"date": "2026-11-21"}


@pytest.mark.parametrize(("make", "says"), [(lambda p: None, "no such file"), (lambda p: p.mkdir(), "cannot be read")])
def test_files_that_cannot_be_opened(tmp_path: Path, make: Any, says: str) -> None:
    path = tmp_path / "a.yaml"
    make(path)
    with pytest.raises(FileError, match=says):
        read_document(path)


def test_a_missing_file_names_the_nearest_of_its_kind(tmp_path: Path) -> None:
    for name in ("policies.py", "policy.yaml", "zzz"):
        (tmp_path / name).touch()
    meant = {"polici.yaml": "policy.yaml", "policys.py": "policies.py", "policie": "policies.py"}
    for name, fix in {**meant, "policy.yml": "policy.yaml"}.items():
        with pytest.raises(FileError) as caught:
            read_document(tmp_path / name)
        assert caught.value.fix == f"did you mean '{tmp_path / fix}'?"
    for missing in (tmp_path / "other.yaml", tmp_path / "no-folder" / "policy.yaml"):
        with pytest.raises(FileError) as caught:
            read_document(missing)
        assert caught.value.fix == "check the path"


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(FileError, match="not UTF-8"):
        read_document(path)


def test_nothing_but_json_and_yaml_is_ever_loaded() -> None:
    """The promise of the module: no pickle, no eval, anywhere in the package."""
    for path in (Path(files.__file__).parent).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name in ("import pickle", "pickle.load", "yaml.unsafe", "yaml.full_load", "marshal.load"):
            assert name not in text, f"{path.name} uses {name}"


# ------------------------------------------------------------------ checksums
@given(DOCUMENTS)
def test_a_checksum_comes_off_again_and_notices_a_change(document: dict[str, Any]) -> None:
    document.pop("checksum", None)
    sealed = json.loads(json.dumps(with_checksum(document)))
    assert without_checksum(sealed, where="x") == document
    with pytest.raises(FileError, match="x: is damaged"):
        without_checksum({**sealed, "added": 1}, where="x")
    with pytest.raises(FileError, match="damaged"):
        without_checksum(document, where="x")


def test_a_file_is_kept_aside_before_it_is_overwritten_unless_it_is_ours(tmp_path: Path) -> None:
    path, ours = tmp_path / "policy.yaml", tmp_path / "own.yaml"
    assert keep_earlier(path, ours) is None  # there is none
    path.write_text("by hand")
    assert keep_earlier(path, ours) == tmp_path / "policy.yaml.1"
    path.write_text("by another study")
    assert keep_earlier(path, ours) == tmp_path / "policy.yaml.2"
    assert (tmp_path / "policy.yaml.1").read_text() == "by hand"
    ours.write_text("by another study")
    assert keep_earlier(path, ours) is None


@given(
    st.recursive(
        st.none() | st.floats() | st.text(max_size=3),
        lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=3), x, max_size=4),
        max_leaves=12,
    )
)
def test_what_is_finite_stays_and_the_rest_is_null(value: Any) -> None:
    def null(_name: str) -> None:
        return None

    # json's own writer spells NaN and the infinities, and its reader takes what stands for each
    expected = json.loads(json.dumps(value), parse_constant=null)
    assert json.loads(json.dumps(files.finite(value), allow_nan=False)) == expected


def test_finite_copies_of_mappings_and_tuples() -> None:
    assert files.finite({1: (math.nan, -math.inf, 2.5), "a": {"b": [math.inf]}}) == {
        "1": [None, None, 2.5],
        "a": {"b": [None]},
    }


@pytest.mark.parametrize("name", ["plain", "a b", "q?x", "p%41", "b{0}", "h#h", "ü+&="])
def test_a_database_lies_in_its_folder_whatever_that_is_called(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    url = files.sqlite_url(folder / "study.db").format(SCHEMA_VERSION=1)  # as Optuna does
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("create table a (b)"))
    engine.dispose()
    assert (folder / "study.db").stat().st_size
    assert os.listdir(tmp_path) == [name]


def test_a_cache_lies_somewhere_for_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nobody(_number: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / "autoprec"
