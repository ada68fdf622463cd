"""The spool survives torn lines at every byte and says how far a store has been told."""

from __future__ import annotations

from pathlib import Path

from autoprec.tracking.spool import Spool, State, default_uri


def _events(spool: Spool, offset: int = 0) -> list[int]:
    return [event["n"] for event, _ in spool.read(offset)]


def test_a_line_torn_anywhere_spoils_nothing_else(tmp_path: Path) -> None:
    spool = Spool.of(tmp_path)
    for n in range(3):
        spool.append("x", n=n)
    whole = spool.path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole) + 1):
        spool.path.write_bytes(whole[:cut])
        kept = sum(end <= cut for end in ends)
        assert _events(spool) == list(range(kept))
        spool.append("x", n=99)
        # a line cut right before its newline is complete again once the next one begins
        assert _events(spool) in ([*range(kept), 99], [*range(kept + 1), 99])


def test_reading_from_an_offset(tmp_path: Path) -> None:
    spool = Spool.of(tmp_path)
    for n in range(4):
        spool.append("x", n=n)
    offsets = [offset for _, offset in spool.read()]
    assert offsets[-1] == spool.size
    assert _events(spool, offsets[1]) == [2, 3]


def test_identity_and_state_persist(tmp_path: Path) -> None:
    spool = Spool.of(tmp_path)
    assert Spool.of(tmp_path).uid == spool.uid
    uri = "http://me:pw@host"
    spool.save_state(uri, State(tracking_uri=uri, offset=7))
    assert spool.load_state(uri).offset == 7
    assert spool.load_state("http://other").offset == 0
    spool.state_path(uri).write_text("{", encoding="utf-8")
    assert spool.load_state(uri).offset == 0


def test_what_json_cannot_hold_is_spooled_as_null_or_text(tmp_path: Path) -> None:
    spool = Spool.of(tmp_path)
    spool.append("x", a=float("nan"), b=(1, float("inf")), c=Path("x"))
    ((event, _),) = spool.read()
    assert event == {"kind": "x", "a": None, "b": [1, None], "c": "x"}


def test_the_default_store_is_beside_the_studies(tmp_path: Path) -> None:
    assert default_uri(tmp_path) == f"sqlite:///{tmp_path.resolve()}/mlflow.db"


def test_files_are_sent_from_the_study_alone(tmp_path: Path) -> None:
    outside, study = tmp_path / "policy.yaml", tmp_path / "runs" / "s"
    spool = Spool.of(study)
    outside.write_text("a: 1")
    (study / "report.html").write_text("x")
    assert spool.keep(study / "report.html") == "report.html"
    name = spool.keep(outside)
    outside.write_text("a: 2")
    kept = spool.kept(name)
    assert kept is not None
    assert (kept.name, kept.read_text()) == ("policy.yaml", "a: 1")
    (study / "link").symlink_to(outside)
    for hostile in ("../../policy.yaml", str(outside), "/etc/passwd", "link", "tracking/../../../policy.yaml"):
        assert spool.kept(hostile) is None
