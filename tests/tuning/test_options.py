from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

import pytest

from autoprec.cli.scripts.search import search
from autoprec.errors import StudyError, UnknownNameError, UsageError
from autoprec.tuning.options import OPTIONS, SearchOptions, check_signature, fewer_steps


@pytest.mark.parametrize("field", ["trials", "steps", "warmup", "seeds"])
def test_zero_is_refused_by_the_name_of_its_option(field: str) -> None:
    with pytest.raises(UsageError, match=f"--{field} 0"):
        SearchOptions(command=("train.py",), **{field: 0})  # type: ignore[arg-type]


def test_an_option_is_one_entry_of_the_table() -> None:
    """Field, type and default are the dataclass's; the rest is what the field says about itself."""
    assert [one.name for one in fields(SearchOptions)] == ["command", *OPTIONS]
    for name, about in OPTIONS.items():
        assert (about.name, about.flag[:2]) == (name, "--")
        assert about.help.endswith(".")
        assert about.is_flag or about.choices or about.metavar
        assert about.default == getattr(SearchOptions(command=("train.py",)), name)


@pytest.mark.parametrize("size", [60, 2**20 - 1])
def test_so_little_memory_lacks_its_unit(size: int) -> None:
    with pytest.raises(UsageError, match="--max-memory"):
        SearchOptions(command=("train.py",), max_memory=size)


def test_the_devices_memory_is_no_limit_until_the_device_is_known_and_is_resumed_as_it_was_asked_for() -> None:
    asked = SearchOptions(command=("train.py",), study="s", max_memory="auto")
    assert asked.memory_limit is None
    assert "--max-memory auto" in asked.resume_command()


def test_the_resume_command_repeats_every_option_that_was_changed() -> None:
    options = SearchOptions(
        command=("my train.py", "--lr", "0.1"), study="s 1", trials=50, budget_s=90.0, target="h100", force=True
    )
    words = shlex.split(options.resume_command())
    assert words[:3] == ["autoprec", "search", "--resume"]
    assert words[-3:] == ["my train.py", "--lr", "0.1"]
    for pair in (["--study", "s 1"], ["--trials", "50"], ["--budget", "90s"], ["--target", "h100"]):
        assert pair[1] == words[words.index(pair[0]) + 1]
    assert "--force" in words
    assert "--steps" not in words
    assert "--no-mlflow" not in words


def test_the_resume_command_of_a_search_that_tracks_nothing_or_from_python_is_one_that_the_command_takes() -> None:
    asked = SearchOptions(command=("train.py",), study="s", track=False)
    words = shlex.split(asked.resume_command())[2:]
    assert "--no-mlflow" in words
    known = {name for option in search.params for name in option.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_the_signature_covers_what_changes_the_answer_and_nothing_else() -> None:
    base = SearchOptions(command=("train.py",))
    sign = base.signature("space", "model")
    assert SearchOptions(command=("train.py",), trials=99, workers=3, output="x").signature("space", "model") == sign
    for change in ({"steps": 21}, {"reference": "fp32"}, {"target": "h100"}, {"cost_scale": "width=2"}):
        assert SearchOptions(command=("train.py",), **change).signature("space", "model") != sign  # type: ignore[arg-type]
    assert base.signature("other", "model") != sign
    with pytest.raises(StudyError, match="model: was 'model', is 'new'"):
        check_signature(sign, base.signature("space", "new"), where="study")


@pytest.mark.parametrize(
    ("seen", "warmup", "advice"),
    [
        (20, 3, "--steps 17"),
        (7, 3, "--steps 4"),
        (6, 3, "--steps 4 --warmup 2"),
        (5, 1, "--steps 4"),
        (4, 3, "at least 5 steps"),
    ],
)
def test_advice_for_a_short_script_can_be_followed(seen: int, warmup: int, advice: str) -> None:
    assert advice in fewer_steps(seen, warmup)


def test_an_edited_script_is_named_and_another_model_is_another_setup() -> None:
    def sign(**sources: str) -> dict[str, Any]:
        return SearchOptions(command=("train.py",)).signature("space", "model", sources=sources)

    check_signature(sign(a="1"), sign(a="1"), where="study")
    with pytest.raises(StudyError, match="edited since: b, c\n"):
        check_signature(sign(a="1", b="1"), sign(a="1", b="2", c="1"), where="study")
    other = SearchOptions(command=("train.py",)).signature("space", "another", sources={"a": "2"})
    with pytest.raises(StudyError, match="another setup"):
        check_signature(sign(a="1"), other, where="study")


def test_trials_under_another_torch_or_autoprec_do_not_join_a_study(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SearchOptions(command=("train.py",)).signature("space", "model")
    monkeypatch.setattr("autoprec.tuning.options.metadata.version", lambda _: "1.0")
    now = SearchOptions(command=("train.py",)).signature("space", "model")
    with pytest.raises(StudyError, match="versions: was"):
        check_signature(before, now, where="study")


def test_a_budget_that_was_too_short_is_replaced_by_one_that_is_enough() -> None:
    asked = SearchOptions(command=("train.py",), budget_s=40.0, study="x")
    assert "--budget 240s" in asked.with_budget_for(150.0).resume_command()
    for needed_s in (0.0, 10.0, 39.0, 40.0, 41.0, 1e4):
        longer = asked.with_budget_for(needed_s).budget_s
        assert longer is not None
        assert longer > max(40.0, needed_s), "the same budget would end it in the same place"
    assert SearchOptions(command=("train.py",)).with_budget_for(150.0).budget_s is None


def test_a_word_that_stands_for_another_is_taken_and_not_shown() -> None:
    assert SearchOptions(command=("train.py",), sampler="ours").sampler == "knapsack"
    with pytest.raises(UnknownNameError) as refused:
        SearchOptions(command=("train.py",), sampler="our")
    assert "ours" not in refused.value.fix


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"max_change": 0.01}, "--max-change is of a metric"),
        ({"better": "higher"}, "--better is of a metric"),
        ({"metric": "eval_loss", "max_divergence": 0.01}, "--metric takes its place"),
        ({"metric": "eval_loss", "max_change": 1.5}, "between 0 and 100 %"),
        ({"metric": "eval_loss", "better": "more"}, "unknown better 'more'"),
        ({"metric": "eval_accuracy"}, "--better does not say so"),
    ],
)
def test_what_cannot_be_meant_of_a_metric_is_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        SearchOptions(command=("train.py",), **asked)


def test_beside_the_mismatch_of_training_and_rollout_the_loss_keeps_its_limit() -> None:
    asked = SearchOptions(command=("train.py",), metric="rollout_kl", max_change=0.5, max_divergence=0.01)
    assert asked.compared == {"metric": "rollout_kl", "better": "lower", "max_change": 0.5, "max_divergence": 0.01}
    assert "max_divergence" not in SearchOptions(command=("train.py",), metric="eval_loss").compared


SCORES = (
    "accuracy",
    "acc",
    "val/acc",
    "eval_accuracy",
    "top1_acc",
    "Acc@1",
    "f1",
    "f1_macro",
    "roc_auc",
    "rocauc",
    "bleu",
)
MORE_SCORES = ("bleu4", "rouge1", "rougeL", "reward", "rewards", "evalScore")


@pytest.mark.parametrize("name", [*SCORES, *MORE_SCORES])
def test_a_score_asks_which_values_are_better(name: str) -> None:
    with pytest.raises(UsageError, match="--better does not say so") as caught:
        SearchOptions(command=("train.py",), metric=name)
    assert caught.value.code == "better"
    assert SearchOptions(command=("train.py",), metric=name, better="higher").better == "higher"


@pytest.mark.parametrize("name", ["eval_loss", "perplexity", "acceleration", "fact", "val/mse", "underscored"])
def test_of_others_lower_is_better(name: str) -> None:
    asked = SearchOptions(command=("train.py",), metric=name)
    assert asked.compared == {"metric": name, "better": "lower", "max_change": 0.005}


def test_the_limit_is_that_of_what_is_compared() -> None:
    assert SearchOptions(command=("train.py",), max_divergence=0.001).tolerance == 0.001
    assert SearchOptions(command=("train.py",), max_divergence=0.001).compared == {"max_divergence": 0.001}
    asked = SearchOptions(command=("train.py",), metric="f1", better="higher", max_change=0.02, study="s")
    assert asked.tolerance == 0.02
    again = search.make_context("search", shlex.split(asked.resume_command())[2:])
    assert (again.params["metric"], again.params["better"], again.params["max_change"]) == ("f1", "higher", 0.02)
    with pytest.raises(StudyError, match="metric: was '', is 'f1'"):
        check_signature(
            SearchOptions(command=("train.py",)).signature("", ""), asked.signature("", ""), where="a study"
        )
