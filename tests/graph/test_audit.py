"""Executed precisions: protections are seen in the recorded step, not believed."""

import torch
from torch import nn

from autoprec.graph.audit import executed_precisions, protection_rows
from autoprec.graph.recorder import record_step
from tests.graph.models import Decoder, RMSNorm, token_batch


def recorded(model, autocast):
    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(token_batch()[0])
        out.float().square().mean().backward()

    return record_step(model, step)


def test_every_layer_and_gemm_has_its_executed_dtype():
    ran = executed_precisions(recorded(Decoder(), autocast=True))
    assert ran["layers"]["blocks.0.up"] == {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
    assert set(ran["operators"]["gemm"]) == {"bf16"}
    plain = executed_precisions(recorded(Decoder(), autocast=False))
    assert {d for roles in plain["layers"].values() for d in roles.values()} == {"fp32"}


def test_a_norm_in_low_precision_is_seen():
    wanted = {"norm": "fp32", "softmax": "fp32", "embedding": "keep", "loss": "fp32"}
    good = protection_rows(recorded(Decoder(), autocast=False), wanted)
    assert all(row["ok"] for row in good.values())
    model = Decoder(norm=RMSNorm).to(torch.bfloat16)
    bad = protection_rows(recorded(model, autocast=False), wanted)
    assert not bad["norm"]["ok"]
    assert "blocks.0.n1" in bad["norm"]["reason"]
    assert "bf16" in bad["norm"]["executed"]
    assert bad["embedding"]["ok"]


def test_a_policy_shows_in_the_recorded_step():
    from autoprec.apply import Policy

    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    policy = Policy.model_validate(
        {"recipes": {"bf16": {"format": "bf16"}}, "layers": [{"match": "2", "recipe": "bf16"}]}
    )
    policy.apply(model)
    report = record_step(model, lambda: model(torch.randn(4, 16, requires_grad=True)).sum().backward())
    ran = executed_precisions(report)["layers"]
    assert ran["2"] == {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
    assert set(ran["0"].values()) == {"fp32"}
