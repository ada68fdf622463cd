"""A policy of a small GPT on a large one: mapped, without what does not pay, with the room filled."""

import math

import pytest

from autoprec.cost import CostModel
from autoprec.cost.transformer import DecoderConfig, decoder_report
from autoprec.errors import PolicyMismatchError
from autoprec.graph.report import GraphReport
from autoprec.policy import resolve
from autoprec.precision.hardware import target
from autoprec.tuning.transfer.correction import Correction
from autoprec.tuning.transfer.evidence import with_evidence
from autoprec.tuning.transfer.plan import Transfer, transfer
from autoprec.tuning.transfer.proxy import Proxy
from tests.tuning.models import gpt, linear, report
from tests.tuning.transfer.test_proxy import policy, table

ROWWISE = (("h.0.*", "bf16"), ("*.mlp.*", "fp8_rowwise"))


def llama(hidden: int = 4096, layers: int = 16) -> GraphReport:
    return decoder_report(DecoderConfig(hidden, layers, 32, 4 * hidden, 32000), batch=1, seq=4096)


def moved(rules=ROWWISE, big: GraphReport | None = None, device: str = "h100", **options) -> Transfer:
    found, there = policy(*rules), big or llama()
    proxy = Proxy.of(found, gpt(), options.pop("errors", table()))
    return transfer(found, proxy, there, CostModel(there, target(device)), **options)


def test_rules_go_by_role_and_the_first_block_stays_the_first() -> None:
    found = moved(fill=False)
    plans = resolve(found.policy, [layer.name for layer in llama().layers])
    quantised = {name for name, plan in plans.items() if plan.scaled}
    assert quantised == {n for n in plans if ".mlp." in n and not n.startswith("model.layers.0.")}
    assert len(found.policy.layers) <= 4
    assert found.policy.activations == "bf16"
    assert found.speedup > 1.02


def test_where_nothing_pays_every_rule_is_dropped_with_its_reason() -> None:
    found = moved(big=llama(hidden=256, layers=4))
    assert set(found.choices.values()) == {"bf16"}
    assert found.speedup == pytest.approx(1.0)
    (lost,) = {(x.choice, x.reason[:16]) for x in found.lost}
    assert lost == ("fp8_rowwise", "below break-even")


def test_what_the_device_cannot_run_is_dropped() -> None:
    found = moved((("*.mlp.*", "mxfp8"),), fill=False)
    assert {x.choice for x in found.lost} == {"mxfp8"}
    assert "mxfp8" not in found.policy.recipes


def test_room_that_is_left_is_filled_within_the_budget() -> None:
    rules = (("*.mlp.*", "mxfp8"),)  # not on Hopper: its error may be spent on row-wise FP8
    mapped, found = moved(rules, fill=False), moved(rules)
    assert found.filled
    assert found.step is not None
    assert mapped.step is not None
    assert found.step.time_ms < 0.992 * mapped.step.time_ms
    assert found.predicted.error <= found.predicted.budget * (1 + 1e-9)


def test_the_limit_holds_whatever_the_proxy_was_allowed() -> None:
    found = moved(max_gradient_error=5e-3)
    assert found.predicted.error <= 5e-3 * found.predicted.noise
    assert not [choice for choice in found.choices.values() if choice != "bf16"]


def test_errors_of_a_role_stay_together_whatever_the_depth() -> None:
    one, other = moved(big=llama(layers=8), fill=False), moved(big=llama(layers=32), fill=False)
    alike = "model.layers.*.mlp.down_proj|fp8_rowwise"
    assert one.predicted.segments[alike] == pytest.approx(other.predicted.segments[alike], rel=0.2)


def test_without_a_table_nothing_is_predicted_and_nothing_filled() -> None:
    found = moved(errors=None)
    assert math.isnan(found.predicted.error)
    assert found.filled == ()
    assert "fp8_rowwise" in found.choices.values()


def test_a_list_of_names_is_mapped_and_not_costed() -> None:
    found = policy(*ROWWISE)
    there = transfer(found, Proxy.of(found, gpt(), table()), llama())
    assert there.step is None
    assert there.speedup == 1.0
    assert there.choices["model.layers.7.mlp.up_proj"] == "fp8_rowwise"


def test_models_of_another_kind_are_refused_with_the_nearest_guess() -> None:
    strange = report([linear(f"z.{i}.w_alpha", 64, 64, 256) for i in range(3)])
    with pytest.raises(PolicyMismatchError, match=r"z\.\*\.w_alpha.*mlp\.in.*\n.*--role 'z\.\*\.w_alpha=mlp\.in'"):
        moved(big=strange)
    found = moved(big=strange, hints=[("z.*.w_alpha", "mlp.in")], fill=False)
    assert set(found.matched.of.values()) <= {f"h.{i}.mlp.c_fc" for i in range(4)}


def test_a_few_strangers_are_kept_as_written() -> None:
    layers = [*llama(layers=4).layers, linear("model.layers.1.adapter", 4096, 512, 1024)]
    found = moved(big=report(layers), fill=False)
    assert found.matched.alone == ("model.layers.1.adapter",)
    assert found.choices["model.layers.1.adapter"] == "keep"


def test_every_phase_is_carried_over_at_its_boundary() -> None:
    found = policy(*ROWWISE)
    phases = [{"from": 0.5, "layers": [{"match": "h.1.mlp.*", "recipe": "fp8_rowwise"}]}, {"from": 0.8, "layers": []}]
    whole = type(found).model_validate({**found.model_dump(by_alias=True), "phases": phases})
    there = llama()
    proxy = Proxy.of(whole, gpt(), table())
    out = transfer(whole, proxy, there, CostModel(there, target("h100")), fill=False)
    alone = moved(fill=False)
    assert [phase.start for phase in out.policy.phases] == [0.5, 0.8]
    assert out.policy.stages[0].layers == alone.policy.layers
    assert out.choices == alone.choices
    names = [layer.name for layer in there.layers]
    scaled = [{n for n, plan in resolve(stage, names).items() if plan.scaled} for stage in out.policy.stages]
    assert scaled[0] > scaled[1] > scaled[2] == set()
    assert [len(scaled[1]), len(out.later)] == [sum(c == "fp8_rowwise" for c in out.later[0].choices.values()), 2]
    assert out.speedup > out.later[0].speedup > out.later[1].speedup == pytest.approx(1.0)


def test_the_evidence_says_where_it_comes_from_and_that_nothing_was_measured() -> None:
    found, there = policy(*ROWWISE), llama()
    proxy = Proxy.of(found, gpt(), table())
    result = transfer(found, proxy, there, CostModel(there, target("h100")))
    written = with_evidence(result, found, proxy, there, "h100", study="small", date="2026-11-22")
    origin = written.evidence["transferred_from"]
    assert written.evidence["source"] == "modelled"
    assert origin["model"]["class"] == "GPT"
    assert origin["evidence"]["gradient_error"] == 0.02
    assert origin["growth"]["depth"] == 4.0
    assert origin["predicted"]["gradient_error"] == pytest.approx(result.predicted.error, rel=1e-3)
    assert written.model is not None
    assert written.model.class_name == "Decoder"
    assert "checksum" not in written.to_dict()


def test_a_spot_check_corrects_the_prediction_and_what_the_budget_buys() -> None:
    before = moved(max_gradient_error=0.012)
    segments = before.predicted.segments
    assert segments
    ratios = dict.fromkeys(segments, 0.25)
    after = moved(max_gradient_error=0.012, correction=Correction(ratios, noise=before.predicted.noise))
    assert after.speedup > before.speedup
    assert after.predicted.error <= after.predicted.budget * (1 + 1e-9)
    same = moved(fill=False, correction=Correction(dict.fromkeys(moved(fill=False).predicted.segments, 4.0), noise=0.7))
    assert same.predicted.noise == 0.7
    for name, error in same.predicted.segments.items():
        assert error == pytest.approx(2.0 * moved(fill=False).predicted.segments[name])
    assert set(same.predicted.factors.values()) == {2.0}
