from __future__ import annotations

import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from autoprec.errors import ScriptError, StudyError
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.base import Runner
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.study.naming import free_name, is_numbered
from autoprec.tuning.study.study import StudyStore, default_storage


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptCommand:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my train.py").write_text("")
    return ScriptCommand.parse(("my train.py", "--lr", "1"))


def fails(_seed: int, _folder: Path) -> Runner:
    raise ScriptError("the script failed", where="my train.py", fix="mend it")


def taken(*names: str) -> None:
    for name in names:
        folder = Path("autoprec-runs") / name
        folder.mkdir(parents=True)
        (folder / "study.db").write_text("")


def name(command: ScriptCommand, **changes: object) -> str:
    return free_name(SearchOptions(command=("my train.py",), **changes), command)  # type: ignore[arg-type]


def test_a_name_is_a_safe_file_name_and_says_the_target(command: ScriptCommand) -> None:
    assert "/" not in name(command)
    assert " " not in name(command)
    assert name(command, target="h100").endswith("-h100")


def test_a_launched_script_gives_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where `make demo` was run there is a study of that name
    launched = ScriptCommand.parse(["--", "torchrun", "--nproc-per-node", "2", "train_gpt.py"], cwd=tmp_path)
    assert name(launched, target="h100") == "train_gpt-h100"
    for words in ("-m torch.distributed.run --nproc-per-node 2 train_gpt.py", "-- torchrun -m pack.train_gpt --lr 1"):
        assert name(ScriptCommand.parse(words.split(), cwd=tmp_path)).removeprefix("pack.") == "train_gpt"


def resumed(study: str = "train", storage: str = "", words: tuple[str, ...] = ("my train.py",)) -> SearchOptions:
    return SearchOptions(command=words, study=study, storage=storage, resume=True)


def begun(study: str, storage: str = "", script: str | None = "'my train.py'") -> None:
    """Begin a study as a search does, or as one does that is killed before it is signed."""
    folder = Path("autoprec-runs") / study
    folder.mkdir(parents=True, exist_ok=True)
    store = StudyStore(storage or default_storage(folder), study, ("step_time_ms",), resume=False)
    if script is not None:
        store.set_signature({"script": script})
    store.close()


def test_a_mistyped_name_cannot_be_resumed_and_leaves_no_folder(command: ScriptCommand) -> None:
    taken("train-h100", "other")  # of which nothing says which script they are of
    with pytest.raises(StudyError, match=r"did you mean 'train-h100'. there are: other, train-h100"):
        Search(resumed(), command, Listeners()).run()
    assert not Path("autoprec-runs/train").exists()


@pytest.mark.parametrize("storage", ["", "sqlite:///all.db"])
@pytest.mark.parametrize(
    ("typed", "script"),
    [("trian", "'my train.py'"), ("train-2", "'my train.py'"), ("Train", None), ("trai", None)],
)
def test_a_name_like_that_of_a_study_of_the_same_script_is_mistyped(
    command: ScriptCommand, storage: str, typed: str, script: str | None
) -> None:
    begun("train", storage, script)
    begun("vit", storage)
    with pytest.raises(StudyError, match=r"did you mean 'train'\? there are: train, vit"):
        Search(resumed(typed, storage), command, Listeners(), fails).run()


def begins(search: Search) -> str:
    """Return what is said of a study that begins, and is ended as soon as its script is started."""
    said: list[str] = []
    search.listener.note = said.append  # type: ignore[method-assign]
    with pytest.raises(ScriptError, match="the script failed"):
        search.run()
    return " ".join(said)


def killed(study: str, *, at: str) -> None:
    """Leave what a search leaves that is killed before its study was written."""
    folder = Path("autoprec-runs") / study
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    if at == "database":
        (folder / "study.db").touch()
    elif at == "tables":
        with closing(sqlite3.connect(folder / "study.db")) as half:
            half.execute("create table studies (study_id integer primary key, study_name text)")


@pytest.mark.parametrize("storage", ["", "sqlite:///all.db"])
@pytest.mark.parametrize("others", [(), ("vit",), ("train-1", "trains")], ids=["none", "unlike", "of other arguments"])
def test_a_job_script_that_always_resumes_begins_at_its_first_start(
    command: ScriptCommand, storage: str, others: tuple[str, ...]
) -> None:
    for other in others:
        begun(other, storage, "'my train.py' --lr 2")
    assert "there is no study train to resume yet: it begins" in begins(
        Search(resumed(storage=storage), command, Listeners(), fails)
    )


@pytest.mark.parametrize("at", ["folder", "database"])
def test_a_search_that_was_killed_before_its_study_was_written_begins(command: ScriptCommand, at: str) -> None:
    begun("trains")  # the name was used before, and so is not mistyped
    killed("train", at=at)
    assert "there is no study train to resume yet: it begins" in begins(Search(resumed(), command, Listeners(), fails))


def test_a_study_whose_database_is_gone_is_not_begun_anew(command: ScriptCommand) -> None:
    begun("train")
    Path("autoprec-runs/train/graph.json").write_text("{}")
    Path("autoprec-runs/train/study.db").unlink()
    with pytest.raises(StudyError, match="the database of study 'train' is gone"):
        Search(resumed(), command, Listeners(), fails).run()


def test_a_study_that_another_storage_holds_is_not_begun_anew(command: ScriptCommand) -> None:
    begun("train", "sqlite:///all.db")
    Path("autoprec-runs/train/graph.json").write_text("{}")
    with pytest.raises(StudyError, match="no study named 'train'"):
        Search(resumed(storage="sqlite:///al.db"), command, Listeners(), fails).run()


def test_taken_names_are_numbered(command: ScriptCommand) -> None:
    first = name(command)
    taken(first)
    assert name(command) == f"{first}-2"
    taken(f"{first}-2")
    assert name(command) == f"{first}-3"
    assert is_numbered(f"{first}-3")
    assert not is_numbered(first)
    assert not is_numbered("gpt-2")  # a script of that name


def test_resume_takes_the_latest(command: ScriptCommand) -> None:
    first = name(command)
    assert name(command, resume=True) == first  # of which there is none yet
    taken(first)
    assert name(command, resume=True) == first


def test_a_name_that_another_search_holds_is_passed_over(command: ScriptCommand) -> None:
    options = SearchOptions(command=("my train.py",))
    first = free_name(options, command)
    assert free_name(options, command, [first, f"{first}-3"]) == f"{first}-2"
    assert free_name(options, command, [first, f"{first}-2"]) == f"{first}-3"


def test_searches_that_start_at_once_take_the_next_names(command: ScriptCommand) -> None:
    searches = [Search(SearchOptions(command=("my train.py",)), command, Listeners()) for _ in range(5)]
    assert len({search.study_dir for search in searches}) == 1  # nothing is written yet
    with ExitStack() as held:
        for number, search in enumerate(searches):
            search._claim(held)
            if number == 2:  # one has a database by now
                (search.study_dir / "study.db").touch()
        assert len({search.study_dir for search in searches}) == 5
        named = Search(SearchOptions(command=("my train.py",), study=searches[0].options.study), command, Listeners())
        with pytest.raises(StudyError, match="in use"):
            named._claim(held)
    again = Search(SearchOptions(command=("my train.py",)), command, Listeners())
    (searches[0].study_dir / "study.db").touch()  # finished since the name was chosen
    with ExitStack() as held:
        again._claim(held)
        assert again.study_dir == searches[1].study_dir


def test_the_folder_of_studies_keeps_itself_out_of_a_repository(command: ScriptCommand) -> None:
    def search() -> None:
        with ExitStack() as stack:
            Search(SearchOptions(command=("my train.py",)), command, Listeners())._claim(stack)

    search()
    mark = Path("autoprec-runs/.gitignore")
    assert mark.read_text() == "*\n"
    mark.unlink()  # by a person who wants the studies in it
    search()
    assert not mark.exists()


@pytest.mark.parametrize("mine", [False, True])
def test_a_search_that_cannot_begin_leaves_nothing_of_its_own_and_all_of_a_persons(
    command: ScriptCommand, mine: bool
) -> None:
    mark = Path("autoprec-runs/.gitignore")
    if mine:
        mark.parent.mkdir()
        mark.write_text("*.log\n")
    with pytest.raises(ScriptError):
        Search(SearchOptions(command=("my train.py",)), command, Listeners(), fails).run()
    assert mark.parent.exists() == mine
    assert not mine or mark.read_text() == "*.log\n"
