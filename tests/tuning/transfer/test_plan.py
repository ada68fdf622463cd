"""A policy of a small GPT on a large model: mapped by role, without what cannot run there or does not pay."""

import pytest

from autoprec.cost import CostModel
from autoprec.errors import PolicyMismatchError, UnsupportedError
from autoprec.graph.report import GraphReport
from autoprec.policy import RolloutPolicy, resolve
from autoprec.precision.hardware import target
from autoprec.tuning.transfer.plan import Transfer, transfer, with_evidence
from autoprec.tuning.transfer.proxy import Proxy
from tests.tuning.models import gpt, linear, report
from tests.tuning.transfer.test_proxy import policy

ROWWISE = (("h.0.*", "bf16"), ("*.mlp.*", "fp8_rowwise"))


def llama(hidden: int = 4096, layers: int = 16, tokens: int = 4096) -> GraphReport:
    """A Llama: q, k and v move together, gate and up do."""
    out = []
    for i in range(layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        out += [linear(f"{attention}.{x}_proj", tokens, hidden, hidden, group=f"{attention}.qkv") for x in "qkv"]
        out += [linear(f"{attention}.o_proj", tokens, hidden, hidden)]
        out += [linear(f"{mlp}.{x}_proj", tokens, hidden, 4 * hidden, group=f"{mlp}.in") for x in ("gate", "up")]
        out += [linear(f"{mlp}.down_proj", tokens, 4 * hidden, hidden)]
    return report([*out, linear("lm_head", tokens, hidden, 32000, flags=("head",))])


def moved(rules=ROWWISE, big: GraphReport | None = None, device: str = "h100", **options) -> Transfer:
    found, there = policy(*rules), big or llama()
    return transfer(found, Proxy.of(found, gpt()), there, CostModel(there, target(device)), **options)


def test_rules_go_by_role_and_the_first_block_stays_the_first() -> None:
    found = moved()
    plans = resolve(found.policy, [layer.name for layer in llama().layers])
    quantised = {name for name, plan in plans.items() if plan.scaled}
    assert quantised == {n for n in plans if ".mlp." in n and not n.startswith("model.layers.0.")}
    assert len(found.policy.layers) <= 4
    assert found.policy.activations == "bf16"
    assert found.speedup > 1.02
    assert found.lost == ()


def test_where_nothing_pays_every_rule_is_dropped_with_its_reason() -> None:
    found = moved(big=llama(hidden=256, layers=4, tokens=256))
    assert set(found.choices.values()) == {"bf16"}
    assert found.speedup == pytest.approx(1.0)
    assert {(x.choice, x.reason[:16]) for x in found.lost} == {("fp8_rowwise", "below break-even")}


@pytest.mark.parametrize(("recipe", "device", "runs"), [
    ("mxfp8", "h100", False), ("mxfp8", "a100", False), ("mxfp8", "b200", True),
    ("fp8_rowwise", "a100", False), ("fp8_rowwise", "h100", True),
])  # fmt: skip
def test_what_the_device_cannot_run_is_dropped(recipe: str, device: str, runs: bool) -> None:
    found = moved((("*.mlp.*", recipe),), device=device)
    assert (recipe in found.policy.recipes) is runs
    assert {x.choice for x in found.lost} == (set() if runs else {recipe})


def test_a_group_moves_together_and_runs_what_most_of_its_counterparts_do() -> None:
    odd = [linear("h.0.attn.q_proj", 4096, 4096, 4096, group="qk"), linear("h.0.attn.k_proj", 16, 16, 16, group="qk")]
    found = policy(("*.q_proj", "fp8_rowwise"), ("*", "bf16"))
    small = report([linear("h.0.attn.q_proj", 64, 64, 64), linear("h.0.attn.k_proj", 64, 64, 64)])
    done = transfer(found, Proxy.of(found, small), report(odd))
    assert set(done.choices.values()) == {"fp8_rowwise"}


def test_a_list_of_names_is_mapped_and_not_costed() -> None:
    found = policy(*ROWWISE)
    there = transfer(found, Proxy.of(found, gpt()), llama())
    assert there.step is None
    assert (there.speedup, there.bounds) == (1.0, ())
    assert there.choices["model.layers.7.mlp.up_proj"] == "fp8_rowwise"


def test_models_of_another_kind_are_refused_with_the_nearest_guess() -> None:
    strange = report([linear(f"z.{i}.w_alpha", 64, 64, 256) for i in range(3)])
    with pytest.raises(PolicyMismatchError, match=r"z\.\*\.w_alpha.*mlp\.in.*\n.*--role 'z\.\*\.w_alpha=mlp\.in'"):
        moved(big=strange)
    found = moved(big=strange, hints=[("z.*.w_alpha", "mlp.in")])
    assert set(found.matched.of.values()) <= {f"h.{i}.mlp.c_fc" for i in range(4)}


def test_a_few_strangers_are_kept_as_written() -> None:
    layers = [*llama(layers=4).layers, linear("model.layers.1.adapter", 4096, 512, 1024)]
    found = moved(big=report(layers))
    assert found.matched.alone == ("model.layers.1.adapter",)
    assert found.choices["model.layers.1.adapter"] == "keep"


def test_every_phase_is_carried_over_at_its_boundary() -> None:
    found = policy(*ROWWISE)
    phases = [{"from": 0.5, "layers": [{"match": "h.1.mlp.*", "recipe": "fp8_rowwise"}]}, {"from": 0.8, "layers": []}]
    whole = type(found).model_validate({**found.model_dump(by_alias=True), "phases": phases})
    there = llama()
    out = transfer(whole, Proxy.of(whole, gpt()), there, CostModel(there, target("h100")))
    alone = moved()
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
    proxy = Proxy.of(found, gpt())
    result = transfer(found, proxy, there, CostModel(there, target("h100")))
    written = with_evidence(result, found, proxy, there, "h100", study="small", date="2026-11-22")
    origin = written.evidence["transferred_from"]
    assert written.evidence["source"] == "modelled"
    assert written.evidence["speedup_over_16bit"] == pytest.approx(result.speedup, rel=1e-3)
    assert (origin["study"], origin["model"]["class"], origin["evidence"]["gradient_error"]) == ("small", "GPT", 0.02)
    assert written.model is not None
    assert "checksum" not in written.to_dict()


def test_a_transfer_by_names_alone_claims_no_figures() -> None:
    found = policy(*ROWWISE)
    proxy = Proxy.of(found, gpt())
    result = transfer(found, proxy, llama())
    evidence = with_evidence(result, found, proxy, llama(), "h100", study="", date="2026-11-22").evidence
    assert "study" not in evidence["transferred_from"]
    assert not {"speedup_over_16bit", "memory_bytes"} & set(evidence)
    assert "nothing was measured" in evidence["limit"]


def test_a_section_for_the_copy_that_generates_is_refused_and_not_dropped() -> None:
    found = policy(*ROWWISE).model_copy(update={"rollout": RolloutPolicy(activations="fp16")})
    with pytest.raises(UnsupportedError, match="not carried over"):
        transfer(found, Proxy.of(found, gpt()), llama())
