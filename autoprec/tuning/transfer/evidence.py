"""What a transferred policy says about itself: where it comes from, what is predicted, that nothing was measured."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from typing import Any

from autoprec._version import __version__
from autoprec.graph.report import GraphReport
from autoprec.policy import ModelInfo, Policy
from autoprec.tuning.transfer.plan import Transfer
from autoprec.tuning.transfer.proxy import Proxy

#: What is repeated of the proxy's own evidence.
_REPEATED = (
    "target",
    "source",
    "speedup",
    "speedup_over_16bit",
    "divergence",
    "gradient_error",
    "seeds",
    "steps",
    "date",
)


def _plain(values: Mapping[str, float]) -> dict[str, float]:
    """Return finite values with four significant digits."""
    return {name: float(f"{value:.4g}") for name, value in values.items() if math.isfinite(value)}


def with_evidence(
    found: Transfer, policy: Policy, proxy: Proxy, report: GraphReport, target: str, *, study: str, date: str
) -> Policy:
    """Return the policy of a transfer with its evidence.

    Args:
        policy, proxy: what was transferred, and the model it was found on.
        target: the device whose times decided.
        study: name of the proxy's study; empty where it is not known.
        date: of today.
    """
    predicted = found.predicted
    origin: dict[str, Any] = {
        "model": dict(proxy.report.model),
        **({"study": study} if study else {}),
        "evidence": {name: policy.evidence[name] for name in _REPEATED if name in policy.evidence},
        "growth": found.growth.to_json(),
    }
    if math.isfinite(predicted.error):
        whole = {"gradient_error": predicted.error, "gradient_noise": predicted.noise, "budget": predicted.budget}
        origin |= {"predicted": _plain(whole), "segments": _plain(predicted.segments)}
        if predicted.factors:
            origin["corrected_by"] = _plain(predicted.factors)
    evidence: dict[str, Any] = {"target": target, "source": "modelled", "transferred_from": origin}
    if found.step is not None:
        bounds = zip(("speedup_over_16bit_low", "speedup_over_16bit_high"), found.bounds, strict=False)
        figures = {"speedup_over_16bit": found.speedup, **dict(bounds), "memory_bytes": float(found.step.memory_bytes)}
        evidence |= _plain(figures) | {"cost": found.step.label}
    evidence |= {
        "date": date,
        "versions": {"autoprec": __version__, "python": platform.python_version()},
        "limit": "transferred: nothing was measured on this model; autoprec check --sensitivity 8 asks it",
    }
    model = ModelInfo.model_validate(dict(report.model)) if report.model.get("parameters") else None
    return found.policy.model_copy(update={"evidence": evidence, "model": model})
