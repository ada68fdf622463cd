"""A reference that does not train proves nothing, and the verdict says so first."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.errors import NothingAcceptableError, ScriptError
from autoprec.graph.census import Judged, Observation
from autoprec.graph.report import GraphReport
from autoprec.trial.command import ScriptCommand
from autoprec.trial.protocol import HostInfo
from autoprec.tuning.decide.decision import Decision
from autoprec.tuning.decide.noise import Baseline, uninformative
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.sentences import Reason, statements
from autoprec.tuning.engine import Search
from autoprec.tuning.lint.rules import Finding
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.phases.soundness import (
    MENDED,
    Mend,
    Soundness,
    faults,
    is_still,
    mend_of,
    mended_params,
    sound_in_fp32,
    soundness_of,
    with_mend,
    with_price,
)
from autoprec.tuning.setup import Setup, reference_policy
from autoprec.tuning.sixteen_bit import by_hand
from autoprec.tuning.study.run import Run, metrics_of
from benchmarks.cost.decoder import PRESETS, decoder_report
from benchmarks.precision.running import FAULTY, found_in
from benchmarks.precision.running import judged as judged_step

GPT = decoder_report(PRESETS["gpt2"], batch=1, seq=64)
LOST = {"unchanged": 0.96, "at_peak": 0.96, "arrives": 0.05, "half_ulp": 1e-4, "update": 1e-5, "rate": 1e-5}
LOST |= {"elements": 19210, "tensors": 4, "optimizer": "AdamW", "to": "bf16", "compensated": "", "rising": False}
LOSS = {"error": 0.01, "gradient": 0.001, "classes": 50257, "to": "bf16", "autocast": False}


@pytest.mark.parametrize(
    ("code", "figures", "count"),
    [
        ("updates-lost", LOST, 1),
        ("updates-lost", LOST | {"unchanged": 0.01, "at_peak": 0.01, "arrives": 1.0}, 0),
        ("stale-casts", {}, 1),
        ("loss-16bit", LOSS, 1),
        ("loss-16bit", LOSS | {"autocast": True}, 1),
        ("loss-16bit", LOSS | {"error": 0.0, "gradient": 0.0}, 0),
        ("scaler-bf16", {"scale": 1.0}, 1),
        ("recurrent-fp32", {}, 0),  # a note
    ],
)
def test_errors_and_warnings_count_and_notes_do_not(
    tmp_path: Path, code: str, figures: dict[str, Any], count: int
) -> None:
    (tmp_path / "train.py").write_text("")
    command = ScriptCommand.parse(["train.py"], cwd=tmp_path)
    seen = Judged(observations=(Observation(code, f"{tmp_path}/train.py:5", figures=figures),))
    found = faults(replace(GPT, judged=seen), command)
    assert [one.place for one in found] == ["train.py:5"] * count
    assert faults(GPT, command) == []


def test_the_verdict_begins_with_it_and_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    seen = Judged(
        observations=(Observation("updates-lost", "train.py:5", figures=LOST), Observation("stale-casts", "train.py:9"))
    )
    found = faults(replace(GPT, judged=seen), ScriptCommand.parse(["train.py"], cwd=tmp_path))
    stay = Decision("stay", (Reason("cost_model", {"text": "nothing gains"}),))
    answer = _qualified(stay, found, (), "script", fp32=True)
    first, second = statements([Reason.from_json(one.to_json()) for one in answer.reasons])
    assert first.startswith(
        'The reference is at fault, so no comparison with the script as written is evidence, neither "stay"'
    )
    assert "train.py:9: weights are updated inside an autocast" in first
    assert first.endswith("--reference fp32 compares with a run in fp32, whose own step shows no such fault")
    assert (second, answer.verdict) == ("nothing gains", "stay")
    assert _qualified(stay, [], (1.0, 0.9, 0.8), "script") is stay


def _found(tmp_path: Path, *seen: Observation) -> tuple[Finding, ...]:
    (tmp_path / "train.py").write_text("")
    command = ScriptCommand.parse(["train.py"], cwd=tmp_path)
    return tuple(faults(replace(GPT, judged=Judged(observations=seen)), command))


def _qualified(
    answer: Decision, found: Sequence[Finding], losses: Sequence[float], reference: str, *, fp32: bool = False
) -> Decision:
    return Soundness(reference, tuple(found), fp32=fp32).qualify(answer, _searched(reference), (), losses)


@pytest.mark.parametrize(
    ("code", "figures", "says"),
    [
        ("stale-casts", {}, "it uses the casts of the old weights [stale-casts]"),
        ("updates-lost", LOST, "[updates-lost]"),
        ("rate-below-half-ulp", LOST, "[rate-below-half-ulp]"),
        ("fp16-unscaled", {"flushed": 0.9}, "[fp16-unscaled]"),
        ("loss-16bit", LOSS, ""),  # what is computed is off, and the weights move all the same
        ("updates-lost", LOST | {"unchanged": 0.4, "at_peak": 0.4, "arrives": 0.9}, ""),  # a warning
        ("recurrent-fp32", {}, ""),
    ],
)
def test_a_loss_that_does_not_fall_has_the_cause_that_the_step_shows(
    tmp_path: Path, code: str, figures: dict[str, Any], says: str
) -> None:
    """Neither a warm-up nor too few steps is to blame where updates never reach the forward."""
    cause = Soundness("script", _found(tmp_path, Observation(code, "train.py:7", figures=figures))).why_flat()
    assert cause.startswith("train.py:7: ") == bool(says)
    assert cause.endswith(says)
    why = str(uninformative(0.0025, Baseline(learnt=False, flat_because=cause)))
    assert ("raise --steps" in why, why.endswith(f": {cause}")) == (not says, bool(says))


@pytest.mark.parametrize(
    ("code", "figures"),
    [
        ("loss-16bit", LOSS | {"autocast": True}),
        ("updates-lost", LOST | {"unchanged": 0.4, "at_peak": 0.4, "arrives": 0.9}),
        ("scaler-bf16", {"scale": 1.0}),
        ("gradients-reduced-16bit", {"to": "bf16"}),
        ("norm-16bit", {"error": 0.004, "gradient": 0.001, "to": "bf16", "what": "rms norm"}),
    ],
)
def test_a_warning_is_said_behind_the_verdict(tmp_path: Path, code: str, figures: dict[str, Any]) -> None:
    found = _found(tmp_path, Observation(code, "train.py:7", figures=figures))
    stay = Decision("stay", (Reason("cost_model", {"text": "nothing gains"}),))
    first, second = statements(
        [Reason.from_json(one.to_json()) for one in _qualified(stay, found, (), "script").reasons]
    )
    assert first == "nothing gains"
    assert second.startswith("The script's own precision is in doubt: train.py:7: ")
    assert second.endswith(f"[{code}]")
    assert Soundness("script", found).told() is None


def test_each_fault_of_a_reference_is_named_at_least_by_its_line_and_code() -> None:
    """Of a model in bf16 with three faults the line of the third was said nowhere."""
    rows = [
        {"place": f"train.py:{line}", "code": code, "message": f"fault {line}", "fix": "mend it"}
        for line, code in ((64, "decay-lost"), (65, "moment-16bit"), (61, "loss-16bit"))
    ]
    others = "(and train.py:61 [loss-16bit]: `autoprec check` says more)"
    data = {"faults": rows, "still": False, "reference": "script"}
    assert others in str(Reason("unsound_reference", data))
    assert others in str(Reason("doubtful_reference", {"faults": rows}))
    assert "train.py:61 [loss-16bit]" in str(Reason("unsound_reference", data | {"short": True}))
    assert "(and" not in str(Reason("doubtful_reference", {"faults": rows[:2]}))


def test_a_reference_that_cannot_be_measured_names_what_may_be_the_cause(tmp_path: Path) -> None:
    found = _found(tmp_path, Observation("eps-zero", "train.py:3", figures={"eps": 1e-8, "to": "fp16", "what": "Adam"}))
    with pytest.raises(NothingAcceptableError) as caught, Soundness("script", found).naming():
        raise NothingAcceptableError("its loss is not finite", fix="make it train first")
    assert "train.py:3: the epsilon of Adam" in caught.value.what
    assert caught.value.fix.startswith("make it train first; as for its precision: ")
    doubtful = _found(tmp_path, Observation("scaler-bf16", "train.py:4", figures={"scale": 1.0}))
    with (
        pytest.raises(NothingAcceptableError, match=r"in doubt: train\.py:4: .* \[scaler-bf16\]"),
        Soundness("script", doubtful).naming(),
    ):
        raise NothingAcceptableError("the script ended after 4 steps")
    with pytest.raises(NothingAcceptableError, match=r"^not finite$"), Soundness("script").naming():
        raise NothingAcceptableError("not finite")


def test_gradients_that_cannot_be_compared_name_what_may_be_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scaler made anew in each step skips them all, and the search named nothing."""

    def failing(*_: Any) -> None:
        raise NothingAcceptableError("the sensitivity scan failed", fix="look")

    monkeypatch.setattr("autoprec.tuning.engine.measure_table", failing)
    found = _found(tmp_path, Observation("eps-zero", "train.py:3", figures={"eps": 1e-8, "to": "fp16", "what": "Adam"}))
    made: Any = object.__new__(Search)
    made.listener = SimpleNamespace(phase=lambda _: None)
    bound: Any = SimpleNamespace(setup=None, soundness=Soundness("script", found))
    with pytest.raises(NothingAcceptableError, match=r"scan failed\. The script's own precision .*train\.py:3"):
        made._measure_errors(bound, None, None)


def test_a_loss_that_is_one_number_is_no_training() -> None:
    assert is_still((2.0, 2.0, 2.0))
    assert not is_still((2.0, 2.0))
    assert not is_still((2.0, 2.0, 1.9))
    why = Soundness("fp32").told((2.0, 2.0, 2.0))
    assert why is not None
    assert "the same number at every step" in str(why)
    assert "--reference" not in str(why)


@pytest.mark.filterwarnings("ignore")  # the scripts' own
@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("variance_by_difference_in_bfloat16", {"reduction-16bit"}),
        ("sum_of_squares_in_float16", {"overflow-16bit", "reduction-16bit"}),
        ("adamw_on_bfloat16_weights", {"updates-lost", "moment-16bit"}),
        ("log_softmax_by_hand_in_bfloat16", {"loss-16bit"}),
        ("float16_autocast_without_a_scaler", set()),
        ("float16_model_without_a_scaler", set()),
    ],
)
def test_a_reference_in_fp32_has_the_faults_that_its_recipes_do_not_reach(name: str, left: set[str]) -> None:
    assert {one.code for one in found_in(FAULTY / f"{name}.py", policy=reference_policy("fp32"))} == left


def _searched(reference: str = "script", target: str = "cpu") -> Setup:
    host = HostInfo("fork", {"class": "GPT"}, (), ("AdamW",), "cpu")
    return Setup.of(SearchOptions(command=("train.py",), reference=reference, target=target), host, GPT)


def _fault(code: str, to: str = "bf16", grade: str = "error") -> Finding:
    figures = LOST | {"to": to, "kept": 1.0, "name": "exp_avg_sq", "beta": 0.999, "dtype": "bf16"}
    return Finding(
        code,
        "train.py:5",
        data=figures | {"measured": "", "at": "", "policy": ""},
        grade=grade,
        seen=Observation(code, "train.py:5", figures=figures),
    )


def _seen(*codes: str, unseen: tuple[str, ...] = ()) -> Any:
    asked: list[dict[str, Any]] = []

    def judged(policy: dict[str, Any]) -> GraphReport:
        asked.append(policy)
        found = tuple(Observation(code, "train.py:5", figures=LOST) for code in codes)
        return replace(GPT, judged=Judged(observations=found, unseen=unseen))

    return judged, asked


KAHAN, SCALED = {"optimizer.weights": "bf16_kahan"}, {"optimizer.exp_avg_sq": "fp16_scaled"}


@pytest.mark.parametrize(
    ("found", "settings"),
    [
        ([_fault("updates-lost")], KAHAN),
        ([_fault("moment-16bit")], SCALED),
        ([_fault("updates-lost"), _fault("moment-16bit")], KAHAN | SCALED),
        ([_fault("loss-16bit")], {"activations": "bf16"}),
        ([_fault("updates-lost"), _fault("norm-16bit")], KAHAN | {"activations": "bf16"}),
        ([_fault("softmax-16bit")], {"activations": "bf16"}),
        ([_fault("router-16bit")], {"activations": "bf16"}),
        ([_fault("fp16-unscaled", to="")], {"activations": "fp16"}),
        ([_fault("overflow-16bit", to="fp16"), _fault("fp16-unscaled", to="")], {"activations": "fp16"}),
        ([_fault("updates-lost", to="fp16")], None),  # a pair of bf16 values is coarser than fp16 in the forward pass
        ([_fault("updates-lost", grade="warning")], None),
        ([_fault("loss-16bit", to="rounded fp32")], None),
        ([_fault("stale-casts")], None),
        ([], None),
    ],
)
@pytest.mark.parametrize(("reference", "target"), [("script", "cpu"), ("script", "h100"), ("fp32", "cpu")])
def test_what_a_policy_can_mend_becomes_a_choice_of_the_study(
    found: list[Finding], settings: dict[str, str] | None, reference: str, target: str
) -> None:
    setup, (judged, asked) = _searched(reference, target), _seen()
    state = {"updates-lost", "moment-16bit", "fp16-unscaled"}
    if settings and target == "cpu" and any(one.code not in state for one in found):
        settings = {**settings, "norm": "fp32", "softmax": "fp32"}  # of which that space decides
    mend = mend_of(found, setup, judged)
    assert (None if mend is None else dict(mend.settings)) == settings
    if mend is None:
        assert not asked
        return
    assert mend.cures == tuple(one.code for one in found)
    document, wider = asked[0], with_mend(setup, mend.settings)
    for name, value in mend.settings.items():
        section, _, key = name.rpartition(".")
        assert (document[section][key] if section else document.get(key, document["operators"].get(key))) == value
    if "activations" in mend.settings:
        assert document["operators"]["output"] == "fp32"
        fp16 = mend.settings["activations"] == "fp16"
        assert document["loss_scaling"] == ("dynamic" if fp16 else "none")
    assert set(mend.settings) - {"activations"} <= wider.problem.parameters.keys()
    known = presets(wider.problem)
    assert any(MENDED in name for name, _ in by_hand(known)[:2]), [name for name, _ in known]
    assert not wider.problem.is_script(mended_params(wider, mend.settings))
    assert not any(name.startswith(MENDED) for name, _ in presets(setup.problem))


def test_a_policy_that_the_optimizer_refuses_still_mends_what_runs_around_the_layers() -> None:
    judged, asked = _seen()

    def refuses(policy: dict[str, Any]) -> GraphReport:
        if policy["optimizer"]["weights"] != "fp32":
            raise ScriptError("low-precision state is implemented for torch's Adam")
        return judged(policy)  # type: ignore[no-any-return]

    mend = mend_of([_fault("updates-lost"), _fault("loss-16bit")], _searched(), refuses)
    assert mend is not None
    assert (mend.cures, mend.left) == (("loss-16bit",), ("updates-lost",))
    assert len(asked) == 1


@pytest.mark.filterwarnings("ignore")  # the scripts' own
@pytest.mark.parametrize(
    "name",
    [
        "logits_of_a_bfloat16_model",
        "float16_autocast_without_a_scaler",
        "float16_model_without_a_scaler",
    ],
)
def test_a_step_under_the_mending_policy_has_the_fault_no_more(name: str) -> None:
    path = FAULTY / f"{name}.py"
    found = [one for one in found_in(path) if one.severity == "error"]

    def under(policy: dict[str, Any]) -> GraphReport:
        own = {key: value for key, value in policy.items() if key not in ("model", "evidence")}
        return judged_step(path, policy=own)

    mend = mend_of(found, _searched(), under)
    assert mend is not None
    assert (set(mend.cures), mend.left) == ({one.code for one in found}, ())


def test_what_no_policy_mends_is_said_to_be() -> None:
    why = Soundness("script", (_fault("stale-casts"),)).told()
    assert "nothing that a policy changes was found to mend it" in str(why)
    mended = Soundness("script", (_fault("updates-lost"),), Mend(KAHAN, ("updates-lost",), ())).told()
    assert "nothing that a policy changes" not in str(mended)


def test_only_what_a_judged_step_shows_to_be_cured_is_said_to_be() -> None:
    setup, both = _searched(), [_fault("updates-lost"), _fault("stale-casts")]
    mend = mend_of(both, setup, _seen("stale-casts")[0])
    assert mend is not None
    assert (mend.cures, mend.left) == (("updates-lost",), ("stale-casts",))
    assert mend_of(both, setup, _seen("updates-lost")[0]) is None
    assert mend_of(both[:1], setup, _seen(unseen=("updates were not judged",))[0]) is None

    def refused(_: dict[str, Any]) -> GraphReport:
        raise ScriptError("low-precision state is implemented for torch's Adam")

    assert mend_of(both, setup, refused) is None


def test_the_price_of_mending_is_measured_where_it_ran_and_else_modelled() -> None:
    setup, stay = _searched(), Decision("stay", (Reason("cost_model", {"text": "nothing gains"}),))
    mend = Mend(KAHAN, ("updates-lost",), ("stale-casts",))
    wider = with_mend(setup, mend.settings)
    assert with_price(stay, None, wider, []) is stay
    first, modelled = statements([Reason.from_json(one.to_json()) for one in with_price(stay, mend, wider, []).reasons])
    assert first == "nothing gains"
    assert "mends updates-lost, as a step judged under it shows; it leaves stale-casts" in modelled
    assert "ms as written (modelled)" in modelled
    metrics = metrics_of({"step_time_ms": 3.0, "speedup": 0.8, "divergence": 0.01})
    run = Run(1, "preset", MENDED, {}, {}, "ok", metrics=metrics)
    (_, measured) = with_price(stay, mend, wider, [run]).reasons
    assert "takes 3 ms, 2.4 ms as written (measured)" in str(measured)
    assert "its losses are 1.000% from those of the script, which is at fault, says nothing against it" in str(measured)


def test_in_fp32_the_price_is_beside_the_fp32_reference() -> None:
    stay = Decision("stay", (Reason("cost_model", {"text": "nothing gains"}),))
    mend = Mend(KAHAN, ("updates-lost",), ())
    metrics = metrics_of({"step_time_ms": 3.0, "speedup": 2.0, "divergence": 0.01})
    run = Run(1, "preset", MENDED, {}, {}, "ok", metrics=metrics)
    for records, time in (([run], "6 ms in the fp32 reference (measured)"), ([], "in the fp32 reference (modelled)")):
        wider = with_mend(_searched("fp32"), mend.settings)
        told_last = str(with_price(stay, mend, wider, records).reasons[-1])
        assert time in told_last
        assert "as written" not in told_last
        assert "those of the script" not in told_last


_FASTEST = {"name": "trial 3", "objective": "throughput", "speedup": 2.9, "divergence": 0.0, "budget": 0.0025}
_FASTEST |= {"sixteen_bit": None, "caveat": None, "merit": 2.9, "tied": 1}


@pytest.mark.parametrize(
    ("found", "losses", "reference"),
    [
        ([_fault("updates-lost")], (2.0, 1.9, 1.8), "fp32"),
        ([_fault("updates-lost"), _fault("moment-16bit")], (), "fp32"),
        ([_fault("rate-below-half-ulp")], (), "bf16"),
        ([_fault("updates-lost")], (), "script"),
        ([_fault("stale-casts")], (2.0, 1.9, 1.8), "script"),
        ([], (2.0, 2.0, 2.0), "fp32"),
    ],
)
def test_nothing_is_adopted_beside_a_reference_that_is_at_fault(
    found: list[Finding], losses: tuple[float, ...], reference: str
) -> None:
    run = Run(3, "search", "trial 3", {}, {}, "ok", metrics=metrics_of({"speedup": 2.9}))
    adopt = Decision("adopt", (Reason("adopted", _FASTEST), Reason("cut_short", {"what": ["time"]})), run=run)
    answer = _qualified(adopt, found, losses, reference)
    first, second, third = statements(answer.reasons)
    assert (answer.verdict, answer.run, answer.explanation) == ("undecided", run, {})
    assert first.startswith("The reference is at fault")
    assert second.startswith("trial 3 would be the fastest acceptable policy")
    assert third == "cut short: time"
    assert "--reference" not in first
    # what only warns is said, and what was adopted stays adopted
    doubtful = _qualified(adopt, [replace(one, grade="warning") for one in found], (2.0, 1.9, 1.8), reference)
    assert doubtful.verdict == "adopt"


@pytest.mark.parametrize(
    ("reference", "errors", "in_fp32", "sound"),
    [
        ("script", ["updates-lost"], ["updates-lost"], False),  # fp32 recipes leave weights that are stored in bf16
        ("script", ["fp16-unscaled"], [], True),
        ("script", ["stale-casts", "updates-lost"], ["updates-lost"], False),
        ("script", ["loss-16bit"], None, False),  # it does not run in fp32
        ("fp32", ["updates-lost"], [], False),
        ("bf16", ["updates-lost"], [], False),
    ],
)
def test_a_run_in_fp32_is_advised_only_where_its_step_has_no_fault(
    reference: str, errors: list[str], in_fp32: list[str] | None, sound: bool
) -> None:
    def judged() -> list[Finding]:
        if in_fp32 is None:
            raise ScriptError("float and bfloat16 do not match")
        return list(map(_fault, in_fp32))

    assert sound_in_fp32(list(map(_fault, errors)), _searched(reference), judged) == sound
    assert not sound_in_fp32([_fault("updates-lost", grade="warning")], _searched(), judged)


@pytest.mark.parametrize(
    ("reference", "as_written", "under", "codes", "cures", "fp32", "recorded"),
    [
        ("script", ("updates-lost",), (), ["updates-lost"], ("updates-lost",), True, ["mended", "fp32"]),
        ("script", ("fp16-unscaled",), ("fp16-unscaled",), ["fp16-unscaled"], None, False, ["mended", "fp32"]),
        ("script", (), (), [], None, False, []),
        ("fp32", ("updates-lost",), (), [], None, False, ["fp32"]),
        ("fp32", (), ("updates-lost",), ["updates-lost"], None, False, ["fp32", "mended"]),
        ("bf16", ("fp16-unscaled",), (), [], None, False, ["bf16"]),
    ],
)
def test_the_reference_is_judged_as_it_runs_and_no_more_steps_are_recorded_than_the_answer_needs(
    tmp_path: Path,
    reference: str,
    as_written: tuple[str, ...],
    under: tuple[str, ...],
    codes: list[str],
    cures: tuple[str, ...] | None,
    fp32: bool,
    recorded: list[str],
) -> None:
    (tmp_path / "train.py").write_text("")
    command = ScriptCommand.parse(["train.py"], cwd=tmp_path)
    asked: list[str] = []

    def step(seen: tuple[str, ...]) -> GraphReport:
        found = tuple(Observation(code, "train.py:5", figures=LOST | {"flushed": 0.9}) for code in seen)
        return replace(GPT, judged=Judged(observations=found))

    def record(policy: dict[str, Any] | None) -> GraphReport:
        other = next((name for name in ("fp32", "bf16") if policy == reference_policy(name)), "mended")
        asked.append(other)
        return step(under)

    setup = replace(_searched(reference), graph=step(as_written))
    known = soundness_of(setup, command, record)
    assert [one.code for one in known.found] == codes
    assert (known.reference, known.fp32, asked) == (reference, fp32, recorded)
    assert (known.mend.cures if known.mend else None) == cures
    assert (known.mended(setup) is setup) == (known.mend is None)


def test_before_the_search_the_fault_is_named_briefly_and_the_verdict_says_it_all() -> None:
    known = Soundness("fp32", (_fault("updates-lost"), _fault("moment-16bit")))
    brief, whole = known.told(short=True), known.told()
    assert str(brief) == (
        "The reference is at fault, so no policy can be adopted by comparison with the fp32 reference: "
        "train.py:5 [updates-lost]; train.py:5 [moment-16bit]"
    )
    assert "stay as they are" not in str(brief)
    assert "stay as they are" in str(whole)
    assert len(str(whole)) > 2 * len(str(brief))
