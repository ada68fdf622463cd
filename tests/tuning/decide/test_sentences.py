"""Every reason as people read it: the one place where wording is tested."""

from __future__ import annotations

import json
from pathlib import Path

from autoprec.tuning.decide.sentences import SENTENCES, Reason, sentence, statements

NOISY = Reason("noise_beyond_budget", {"floor": 0.02, "noise_floor_upper": 0.03, "budget": 0.0025})
BEYOND = Reason("divergence", {"mean": 0.0055, "upper": 0.0096, "limit": 0.0025})
ADOPTED = {"name": "trial 3", "objective": "throughput", "speedup": 1.5, "divergence": 0.001, "budget": 0.0025}
ADOPTED |= {"sixteen_bit": None, "caveat": None, "merit": 1.5, "tied": 1}
FAULT = {
    "code": "updates-lost",
    "place": "train.py:9",
    "message": "96 % of the updates are lost",
    "fix": "keep fp32 masters",
}
MENDED = {
    "settings": {"optimizer.weights": "bf16_kahan"},
    "cures": ["updates-lost"],
    "left": [],
    "name": "the script, mended",
    "step_ms": 11.0,
    "reference": "script",
    "reference_ms": 10.0,
    "memory": 4e6,
    "source": "measured",
}
REASONS = [
    NOISY,
    Reason("noise_beyond_budget", {"floor": 0.0019, "noise_floor_upper": 0.003, "budget": 0.0025}),
    Reason("noise_beyond_budget", NOISY.data | {"runs": 3}),
    Reason("noise_beyond_budget", {"floor": 0.0019, "noise_floor_upper": 0.003, "budget": 0.0025, "runs": 4}),
    Reason("loss_flat"),
    Reason("loss_flat", {"cause": "train.py:9: updates are lost [updates-lost]"}),
    Reason("judged_by_gradient", {"loss": Reason("incomplete"), "error": 0.04, "limit": 0.1, "ratio": 1.5}),
    BEYOND,
    Reason("divergence", BEYOND.data | {"upper": 0.0055, "least": 0.0029, "most": 0.0081, "seeds": 2}),
    Reason("beyond_rounding", {"mean": 0.4, "ratio": 21.0}),
    Reason("worse_loss", {"excess": 0.05, "limit": 0.0025}),
    Reason("gradient_error", {"error": 0.1111, "limit": 0.1108, "noise": 0.9233333333333333}),
    Reason("memory_bytes", {"memory": 2147483648, "limit": 1073741824}),
    Reason("few_seeds", {"seeds": 1, "needed": 4}),
    Reason("compiled_apart", {"compiled": [1.25], "precision": 1.2, "low": 1.15, "high": 1.25}),
    Reason("compiled_apart", {"compiled": [1.25, 1.2, 1.3], "precision": 1.2}),
    Reason("by_parts", {"parts": [["layers", 1.5, 1.45, 1.55], ["implementation.loss", 1.2, 1.15, 1.25]]}),
    Reason("only_blocks", {"name": "a", "speedup": 1.5, "low": 1.4, "high": 1.6}),
    Reason("tied", {"noise": 0.05}),
    Reason("tied", {"noise": 0.05, "timed": True}),
    Reason("tied", {"noise": 0.05, "also": Reason("incomplete")}),
    Reason("none_acceptable", {"first": "a", "why": Reason("incomplete"), "more": 2}),
    Reason("none_acceptable", {"first": "a", "why": Reason("few_seeds", {"seeds": 1, "needed": 2}), "more": 1}),
    Reason("no_gain", {"name": "a", "merit": 0.984, "noise": 0.01}),
    Reason("no_gain", {"name": "a", "merit": 1.0002, "noise": 0.005}),
    Reason("no_gain", {"name": "a", "merit": 1.008, "noise": 0.01}),
    Reason("no_gain", {"name": "a", "merit": 1.008, "noise": 0.01, "low": 0.99, "high": 1.02}),
    Reason("adopted", ADOPTED),
    Reason("adopted", ADOPTED | {"sixteen_bit": 1.25, "tied": 2, "so_far": True}),
    Reason("adopted", ADOPTED | {"sixteen_bit": 1.499}),
    Reason("adopted", ADOPTED | {"untimed": True}),
    Reason("adopted", ADOPTED | {"unproved": True}),
    Reason("adopted", ADOPTED | {"objective": "balanced", "caveat": Reason("loss_flat")}),
    Reason("faster_not_taken", {"name": "fp8", "speedup": 1.5, "why": BEYOND, "more": 1}),
    Reason("over_preset", {"name": "all bf16", "gain": 0.04, "measured": True}),
    Reason("over_preset", {"name": "all bf16", "gain": 0.04, "measured": True, "noise": 0.05}),
    Reason("over_preset", {"name": "all bf16", "gain": 0.001, "measured": False}),
    Reason("over_preset", {"name": "int8", "gain": 0.07, "measured": True, "noise": 0.1, "low": 1.03, "high": 1.1}),
    Reason("over_preset", {"name": "int8", "gain": 0.02, "measured": True, "noise": 0.1, "low": 0.99, "high": 1.04}),
    Reason("over_preset", {"name": "int8", "gain": 0.0, "measured": True, "itself": True}),
    Reason("over_preset", {"name": "int8", "gain": 0.62, "measured": True, "noise": 0.01, "by_trials": True}),
    Reason("taken_back", {"groups": ["h.0.mlp", "h.1.mlp", "wte", "head"], "error": 0.173, "saving": 0.005}),
    Reason("holds", {"divergence": 0.001, "limit": 0.0025, "caveat": None, "speedup": 1.5}),
    Reason("holds", {"divergence": 0.001, "limit": 0.0025, "caveat": Reason("loss_flat")}),
    Reason("failed", {"runs": 2, "first": "oom: no memory"}),
    Reason("too_few_seeds", {"why": BEYOND}),
    Reason("slower_than_script", {"speedup": 0.8}),
    Reason("preset_faster", {"name": "all bf16", "speedup": 1.5, "own": 1.2}),
    Reason("cost_model", {"text": "nothing could gain more than 1.01x"}),
    Reason("does_not_fit", {"text": "a step needs 90 GiB"}),
    Reason("cut_short", {"what": ["no duel", "after 2 of 30 trials"]}),
    Reason("gradient_unknown", {"loss": Reason("loss_flat")}),
    Reason("incomplete"),
    Reason("interrupted"),
    Reason("none_measured", {"first": "all bf16: crashed", "more": 2}),
    Reason("only_sixteen_bit", {"bound": 1.02, "cause": "casts"}),
    Reason("under_variant", {"chosen": {}, "adopted": {"name": "whole", "arguments": "--micro 32"}}),
    Reason("doubtful_reference", {"faults": [FAULT]}),
    Reason("unsound_reference", {"faults": [FAULT], "still": False, "reference": "script"}),
    Reason("unsound_reference", {"faults": [FAULT], "still": False, "reference": "script", "fp32": True}),
    Reason("unsound_reference", {"faults": [FAULT], "still": False, "reference": "fp32", "short": True}),
    Reason("unsound_reference", {"faults": [], "still": True, "reference": "script", "short": True}),
    Reason("unsound_reference", {"faults": [], "still": True, "reference": "fp32"}),
    Reason("mended", MENDED),
    Reason("mended", MENDED | {"reference": "fp32"}),
    *(Reason(one.code, one.data | {"metric": "eval_loss"}) for one in (NOISY, BEYOND)),
    Reason("divergence", BEYOND.data | {"upper": 0.0055, "least": 0.0029, "most": 0.0081, "seeds": 2, "metric": "f1"}),
    Reason("loss_flat", {"metric": "f1"}),
    Reason("beyond_rounding", {"mean": 0.4, "ratio": 21.0, "metric": "f1"}),
    Reason("worse_loss", {"excess": 0.05, "limit": 0.0025, "metric": "f1"}),
    Reason("adopted", ADOPTED | {"metric": "eval_loss"}),
    Reason("adopted", ADOPTED | {"metric": "rollout_kl", "excess": -0.98, "tied": 2}),
    Reason("adopted", ADOPTED | {"metric": "rollout_kl", "excess": 0.01}),
    Reason("holds", {"divergence": 0.001, "limit": 0.0025, "caveat": None, "speedup": 1.5, "metric": "eval_loss"}),
    Reason("mended", MENDED | {"divergence": 0.01, "metric": "f1"}),
]
GOLDEN = Path(__file__).with_name("sentences.txt")


def test_reasons_in_words() -> None:
    assert [str(reason) for reason in REASONS] == GOLDEN.read_text(encoding="utf-8").splitlines()
    assert {reason.code for reason in REASONS} == SENTENCES.keys()


def test_reasons_are_joined_in_their_order() -> None:
    failed = {"first": "all bf16: crashed: RuntimeError: same dtype", "more": 2}
    assert str(Reason("none_measured", failed)).endswith(
        "all bf16: crashed: RuntimeError: same dtype; nor any of the 2 others"
    )
    cut, none = Reason("cut_short", {"what": ["no duel", "after 2 of 30 trials"]}), Reason("none_measured")
    assert sentence((none, cut)) == f"{none}; cut short: no duel; after 2 of 30 trials"
    assert statements((none, cut)) == [str(none), "cut short: no duel", "cut short: after 2 of 30 trials"]
    only = Reason("only_sixteen_bit", {"bound": 1.02, "cause": "casts"})
    assert sentence((none, only)).endswith(
        "measured. Only 16 bit was tried: by the cost model nothing else gains more than 1.02x over that: casts"
    )
    size = Reason("does_not_fit", {"text": ". It does not fit"})
    assert sentence((none, size)) == f"{none}. It does not fit"


def test_every_reason_is_read_back_as_it_was_written_and_data_that_is_no_reason_stays() -> None:
    """The caveats of a search under a variant were one line with its verdict: its row was taken for a reason."""
    chosen = {"chosen": {"name": "whole", "arguments": "--micro 32", "reason": "it is faster"}, "adopted": {}}
    for reason in (*REASONS, Reason("under_variant", chosen)):
        assert Reason.from_json(json.loads(json.dumps(reason.to_json()))).to_json() == reason.to_json()


def test_reasons_are_plain_data_for_programs() -> None:
    found = Reason("tied", {"noise": 0.05, "also": BEYOND}).to_json()
    assert found == {"code": "tied", "noise": 0.05, "also": {"code": "divergence", **BEYOND.data}}
