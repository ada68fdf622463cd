"""Asked against executed, per layer and GEMM: what the last real forward and backward ran, not what was configured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autoprec.applying.around.gelu import FusedGelu
from autoprec.applying.compiling import compiled_blocks, executed_as
from autoprec.applying.generating.pairs import rollout_of
from autoprec.applying.generating.section import weights_row
from autoprec.applying.optimizers import optimizers_of, unwrapped_of
from autoprec.applying.raw_weights import unit_execution
from autoprec.applying.state import without_policy
from autoprec.applying.swap import execution_of, root_of
from autoprec.applying.units import Unit, clean_name, tunable_units, unwrap
from autoprec.numerics.linear import LinearExecution
from autoprec.optim.audit import audit_optimizers
from autoprec.policy import LayerPlan, Policy, first_match, resolve
from autoprec.policy.sections import FEWEST_CLASSES, MOST_SCORES
from autoprec.precision.recipes import GEMMS, KEEP, Gemm, by_recipe
from autoprec.support.tables import Shown, Table

_AS_WRITTEN = "as the script wrote it"
#: What names of layers and operators of the copy that generates begin with.
ROLLOUT = "rollout: "
#: Rows of an audit that are of training alone.
_TRAINS = ("optimizer.", "communication", "loss_scaling")
#: Why ``torch.autocast`` does nothing to a product (``cached_cast`` of ATen/autocast_mode.h).
_FLOAT64 = "float64, which autocast leaves alone"
_BY_HAND = "no function of this class ran in low precision; one written by hand runs as the script wrote it"


@dataclass(frozen=True, slots=True)
class LayerAudit:
    """One layer: what was requested and executed, by GEMM, why they differ, by which backend, what did not run."""

    name: str
    requested: dict[str, str]
    executed: dict[str, str]
    ok: bool
    reason: str
    backend: str = ""
    silent: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the row ``autoprec check --json`` prints."""
        return {key: value for key, value in asdict(self).items() if key != "silent"}


@dataclass(frozen=True, slots=True, repr=False)
class AuditReport(Shown):
    """The audit of a model: its layers, and the operators beside them."""

    layers: tuple[LayerAudit, ...]
    operators: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: backends that ran scaled recipes on a device on which nobody had run them before
    experimental: tuple[str, ...] = ()
    #: classes of other models that an optimizer of this one trains, and that no policy is on
    beside: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What a reader has to know beside the rows."""
        said = []
        if self.experimental:
            names = ", ".join(self.experimental)
            said.append(f"experimental on this device, tested against stand-ins only: backend {names}")
        if self.beside:
            said.append(f"its optimizer also trains {', '.join(self.beside)}, which no policy is on")
        return said

    @property
    def ok(self) -> bool:
        """True when everything that was asked for ran."""
        return all(layer.ok for layer in self.layers) and all(row["ok"] for row in self.operators.values())

    @property
    def did_not_run(self) -> dict[str, list[str]]:
        """GEMMs that were asked for and did not run in these steps, by layer.

        An unused output, a frozen tail or an expert without tokens has no backward, or no forward: what ran
        does not differ from what was asked of it.
        """
        return {row.name: list(row.silent) for row in self.layers if row.silent}

    @property
    def mismatches(self) -> tuple[LayerAudit, ...]:
        """The layers that did not run what was asked for."""
        return tuple(layer for layer in self.layers if not layer.ok)

    def to_json(self) -> dict[str, Any]:
        """Return the document ``autoprec check --json`` prints."""
        return {
            "ok": self.ok,
            "layers": [row.to_json() for row in self.layers],
            "operators": dict(self.operators),
            "did_not_run": self.did_not_run,
            "notes": self.notes,
        }

    def table(self) -> Table:
        """Return a line for each layer and each operator that the policy is about, and what it comes to."""
        rows = [
            (row.name, by_recipe(row.requested), by_recipe(row.executed), _yes(row.ok), row.reason)
            for row in self.layers
        ]
        for name, found in self.operators.items():
            if not found["ok"] or found["executed"] not in (KEEP, "-"):
                rows.append((name, found["requested"], found["executed"], _yes(found["ok"]), found["reason"]))
        wrong = len(self.mismatches) + sum(not row["ok"] for row in self.operators.values())
        notes = [f"{wrong} of them ran something else" if wrong else "everything that ran is what was asked for"]
        if self.did_not_run:
            notes.append(f"did not run in these steps, wholly or in part: {', '.join(self.did_not_run)}")
        notes += self.notes
        return Table(("layer or operator", "requested", "executed", "ok", "reason"), tuple(rows), notes=tuple(notes))

    __repr__ = Shown.__str__


def _yes(ok: bool) -> str:
    return "yes" if ok else "NO"


def audit_model(policy: Policy, model: nn.Module) -> AuditReport:
    """Compare a policy with what the model's last forward and backward ran.

    What ran is compared with what was asked of it. A GEMM that did not run, because no gradient reached its layer in
    these steps, is listed apart and is not a mismatch. A layer that was never called is one, since its weight may be
    multiplied where no policy reaches; unless it is one of several in a ``ModuleList`` of which others were called, as
    experts are: that one was only not reached, and the row says so.
    Rules that match nothing are refused when a policy is applied, so they are not repeated here. What the copy that
    generates ran follows, where the policy has a section for it.
    """
    found, side = _audit_side(policy, model, GEMMS), policy.rollout_side
    if side is None:
        return found
    rollout = rollout_of(model)
    if rollout is None:
        why = "the copy that generates is not there any more, or was not named"
        row = {"requested": "a section of its own", "executed": "-", "ok": False, "reason": why}
        return replace(found, operators={**found.operators, "rollout": row})
    theirs = _audit_side(side, rollout, ("fprop",))
    rows = tuple(replace(row, name=f"{ROLLOUT}{row.name}") for row in theirs.layers)
    around = {name: row for name, row in theirs.operators.items() if not name.startswith(_TRAINS)}
    around |= dict(weights_row(policy, rollout))
    operators = found.operators | {f"{ROLLOUT}{name}": row for name, row in around.items()}
    return replace(found, layers=(*found.layers, *rows), operators=operators)


def _audit_side(policy: Policy, model: nn.Module, gemms: tuple[Gemm, ...]) -> AuditReport:
    """Audit one side: the model that trains, or with fprop alone the copy that generates."""
    root = unwrap(model)
    units = tunable_units(root)
    plans = resolve(policy, units, strict=False)
    not_reached, left_out = _not_reached(root, units), _left_out(units)
    named = {name for name in units if (rule := first_match(policy.layers, name)) is not None and rule.match != "*"}
    audited = (
        (
            unit,
            _audit_layer(name, unit, plans[name], policy, gemms, reached=name not in not_reached, named=name in named),
        )
        for name, unit in units.items()
        if not _is_table(policy, name, unit, plans[name])
    )
    rows = tuple(_compiled_row(row, unit, row.name in left_out) for unit, row in audited)
    operators = _audit_operators(policy, root, any(not plan.keeps for plan in plans.values()))
    operators["activations"] |= _under_autocast(policy, units, operators["activations"])
    optimizers = optimizers_of(model)
    operators |= audit_optimizers(policy, optimizers, model)
    for name in unwrapped_of(model):
        why = f"an optimizer that is not wrapped takes steps, too: {name}"
        operators |= {
            part: row | {"ok": False, "reason": why} for part, row in operators.items() if part.startswith("optimizer.")
        }
    beside = dict.fromkeys(name for optimizer in optimizers for name in without_policy(optimizer))
    return AuditReport(rows, operators, _experimental(root, rows, plans), tuple(beside))


def _experimental(root: nn.Module, rows: tuple[LayerAudit, ...], plans: Mapping[str, LayerPlan]) -> tuple[str, ...]:
    """Return the backends that run scaled recipes on this model's device and had never run on such a device."""
    execution = root_of(root)
    device = next((str(parameter.device) for parameter in root.parameters()), "cpu")
    backends = execution.backends if execution is not None else ()
    unproven = {backend.name for backend in backends if backend.is_experimental(device)}
    scaled = {row.backend for row in rows if row.name in plans and plans[row.name].scaled}
    return tuple(sorted(unproven & scaled))


def _not_reached(root: nn.Module, units: dict[str, Unit]) -> set[str]:
    """Return the layers that were not called although the same layer of a sibling in their container was."""
    containers = (nn.ModuleList, nn.ModuleDict)
    listed = {clean_name(name): module for name, module in root.named_modules() if isinstance(module, containers)}
    called: dict[tuple[str, str], bool] = {}
    places: dict[str, list[tuple[str, str]]] = {}
    for name, unit in units.items():
        parts = name.split(".")
        ran = bool(getattr(unit_execution(unit), "called", False))
        for depth in range(len(parts) - 1):
            container = ".".join(parts[: depth + 1])
            if container in listed:
                place = (container, ".".join(parts[depth + 2 :]))
                called[place] = called.get(place, False) or ran
                if not ran:
                    places.setdefault(name, []).append(place)
    return {name for name, found in places.items() if any(called[place] for place in found)}


def _left_out(units: dict[str, Unit]) -> set[str]:
    """Return the layers that ran outside compiled graphs while the same layer of another block ran inside one."""
    found = ((re.sub(r"\d+", "*", name), name, unit_execution(unit)) for name, unit in units.items())
    ran = [(kind, name, one) for kind, name, one in found if isinstance(one, LinearExecution) and one.called]
    compiled = {kind for kind, _, one in ran if one.traced is not None}
    return {name for kind, name, one in ran if one.traced is None and kind in compiled}


def _compiled_row(row: LayerAudit, unit: Unit, left_out: bool) -> LayerAudit:
    why = getattr(unit_execution(unit), "uncompiled", "")
    if left_out:
        why = "ran uncompiled while the same layer of other blocks was compiled (torch._dynamo.config.recompile_limit?)"
    return replace(row, ok=row.ok and not left_out, reason="; ".join(filter(None, (row.reason, why)))) if why else row


def _is_table(policy: Policy, name: str, unit: Unit, plan: LayerPlan) -> bool:
    """True for a raw parameter that only the default names, and that no GEMM multiplied by: a table, not a weight."""
    if unit.kind != "functional" or isinstance(unit.module, nn.Linear) or first_match(policy.layers, name) is not None:
        return False
    found = unit_execution(unit)
    return plan.keeps or (found is not None and not found.called)


def _in_float64(unit: Unit) -> bool:
    return unit.weight.dtype is torch.float64


def _kept(policy: Policy, unit: Unit) -> str:
    """Say what a layer runs as that the policy leaves alone."""
    if policy.activations == KEEP:
        return _AS_WRITTEN
    return f"{_AS_WRITTEN}: {_FLOAT64}" if _in_float64(unit) else f"{_AS_WRITTEN}, under {policy.activations} autocast"


def _under_autocast(policy: Policy, units: dict[str, Unit], row: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be corrected in the row of activations: autocast changes no product of float64."""
    wide = sum(map(_in_float64, units.values()))
    if policy.activations == KEEP or row["executed"] != policy.activations or not wide:
        return {}
    if wide == len(units):
        why = f"autocast changes nothing: the model computes in {_FLOAT64}"
        return {"executed": "fp64", "ok": False, "reason": why}
    return {"executed": f"{row['executed']}, fp64", "reason": f"{wide} of {len(units)} layers compute in {_FLOAT64}"}


def _audit_layer(
    name: str,
    unit: Unit,
    plan: LayerPlan,
    policy: Policy,
    gemms: tuple[Gemm, ...],
    *,
    reached: bool,
    named: bool,
) -> LayerAudit:
    requested: dict[str, str] = {gemm: plan.labels[gemm] for gemm in gemms}
    found = unit_execution(unit)
    if plan.keeps:
        ran = dict(requested) if found is None else dict(found.executed)
        reason = _kept(policy, unit) if found is None else "a policy is installed where none was asked for"
        return LayerAudit(name, requested, ran, found is None, reason)
    if found is None:
        return LayerAudit(name, requested, dict.fromkeys(gemms, KEEP), False, "the policy is not applied to this layer")
    ran = {gemm: ran for gemm, ran in found.executed.items() if gemm in gemms}
    if not found.called:
        if not reached:
            why = "not called in this step, others of its list were (an expert that nothing was routed to?)"
            return LayerAudit(name, requested, ran, True, why, _runs(found), gemms)
        why = "never called"
        if unit.kind == "functional":
            why = "no F.linear, matmul or einsum by this weight was seen"
            if not named and not isinstance(unit.module, nn.Linear):
                why = f"never runs: {why} (a table, or a norm's gain?), and only the rule for everything is about it"
                return LayerAudit(name, requested, ran, True, why, _runs(found), gemms)
        return LayerAudit(name, requested, ran, False, why, _runs(found))
    reasons = [found.note] if found.note else []
    ok, silent = True, list[Gemm]()
    for gemm in gemms:
        if gemm in ran:
            if ran[gemm] != requested[gemm]:
                ok = False
                reasons.append(f"{gemm} ran as {ran[gemm]}")
        elif gemm == "dgrad" and "wgrad" in ran:
            reasons.append("no dgrad: its input needs no gradient")
        elif gemm == "wgrad" and ("dgrad" in ran or not unit.weight.requires_grad):
            reasons.append("no wgrad: its weight is frozen")
        elif gemm == "dgrad" and not unit.weight.requires_grad:
            reasons.append("no dgrad seen")
        elif gemm == "fprop" and not found.idle:
            ok = False
            reasons.append("fprop has not run")
        else:
            silent.append(gemm)
    if found.idle and "fprop" in silent:
        reasons.append("called without a token (an expert that nothing was routed to?)")
    elif silent:
        reasons.append(f"{' and '.join(silent)} did not run in these steps: no gradient reached this layer")
    if found.note and unit.weight.is_cuda:
        ok = False  # emulated where hardware was expected
    if not reasons and _is_emulated(found):
        reasons.append("emulated: true numerics, no 8-bit speed")
    return LayerAudit(name, requested, ran, ok, "; ".join(reasons), _runs(found), tuple(silent))


def _runs(found: Any) -> str:
    """Return the backend that runs a layer; plain casts are torch's own, also where 8-bit layers are emulated."""
    plain = isinstance(found, LinearExecution) and not _is_emulated(found) and not found.emulates_casts
    return "native" if plain and found.backend == "emulated" else str(found.backend)


#: Why a way to compute was not taken.
_NOT_TAKEN = {
    "loss": f"no F.cross_entropy over {FEWEST_CLASSES:,} classes or more was computed of its output, or in its forward",
    "attention": "no F.scaled_dot_product_attention ran in 16 bits in the model's forward, of at most "
    f"{MOST_SCORES:,} scores a head",
    "gelu": "no module computes by hand what F.gelu is",
    "layout": "the model was given no images or volumes that lie with their channels first",
}


def _is_emulated(found: Any) -> bool:
    if not isinstance(found, LinearExecution) or found.backend != "emulated":
        return False
    return any(recipe.format != "int8" for recipe in found.plan.scaled)  # int8 runs on any device's integer units


def emulated_note(model: nn.Module) -> str:
    """Return one line about the layers of a model under a policy whose recipes are emulated here, or nothing."""
    found = [one for unit in tunable_units(model).values() if _is_emulated(one := unit_execution(unit))]
    if not found:
        return ""
    recipes = dict.fromkeys(recipe.describe() for one in found for recipe in one.plan.scaled)
    return (
        f"{len(found)} layers run {', '.join(recipes)} emulated on this device: "
        "the numerics are true, the speed is not (slower than without the policy)"
    )


def _embedding_row(policy: Policy, root: nn.Module) -> dict[str, Any]:
    """Audit the shrunk gradient of embeddings: the tables whose look-ups it was behind in the model's forward."""
    found, asked = root_of(root), f"{policy.embedding_gradient:g}"
    ran = "" if found is None else found.executed.get("embedding_gradient", "")
    if ran:
        seen = found.looked_up if found is not None else set()
        named = [name for name, parameter in root.named_parameters() if id(parameter) in seen]
        reason = f"behind each look-up in {', '.join(map(clean_name, named))}" if named else ""
    elif found is None:
        reason = "the policy is not applied"
    elif found.traced:
        return {"requested": asked, "executed": "-", "ok": True, "reason": "inside a compiled graph"}
    elif not found.called:
        reason = "the model was not called, only its parts were: what surrounds its forward never ran"
    else:
        reason = "no embedding with a table that trains was looked up in a training step (F.embedding, F.embedding_bag)"
    return {"requested": asked, "executed": ran or "-", "ok": ran == asked, "reason": reason}


def _implementation_row(name: str, asked: str, root: nn.Module) -> dict[str, Any]:
    """Audit one way to compute: that it was taken in the model's forward, or of its output."""
    found = root_of(root)
    ran = "" if found is None else found.executed.get(f"implementation.{name}", "")
    if name == "gelu" and any(isinstance(execution_of(module), FusedGelu) for module in root.modules()):
        ran = asked  # inside compiled blocks, too, where nothing is written down
    reason = "" if ran else _NOT_TAKEN[name] if found is not None else "the policy is not applied"
    if not ran and name == "attention" and found is not None and (found.traced or compiled_blocks(root)):
        return {"requested": asked, "executed": "-", "ok": True, "reason": "inside a compiled graph"}
    if not ran and found is not None and found.traced:
        reason = "inside a compiled graph: it is computed as torch.compile makes it"
    return {"requested": asked, "executed": ran or KEEP, "ok": ran == asked, "reason": reason}


def _audit_operators(policy: Policy, root: nn.Module, layers_changed: bool) -> dict[str, dict[str, Any]]:
    """Return requested / executed / ok / reason of activations and of each operator class."""
    found = root_of(root)
    executed = {} if found is None else found.ran
    wanted = {"activations": policy.activations} | policy.operators.model_dump()
    active = policy.activations != KEEP or policy.operators.attention != KEEP or layers_changed
    rows: dict[str, dict[str, Any]] = {}
    for name, requested in wanted.items():
        if requested == KEEP:
            rows[name] = {"requested": KEEP, "executed": KEEP, "ok": True, "reason": _AS_WRITTEN}
            continue
        ran = executed.get(name)
        reason = ""
        ok = ran == requested or (requested, ran) == ("fp32", "fp64")
        if ran is None:
            if found is not None and found.traced:
                ok, reason = True, "inside a compiled graph"
            elif name in ("activations", "attention"):
                reason = "never executed" if active else "the policy is not applied"
                if active and found is not None and not found.called:
                    reason = "the model was not called, only its parts were: what surrounds its forward never ran"
                if name == "attention" and found is not None and found.called:
                    reason = "the model calls no scaled_dot_product_attention"
                    ok = True
            else:
                by_hand = found is not None and found.low_precision and found.activations is None
                ok, reason = True, _BY_HAND if by_hand else "nothing of low precision reached it"
        elif name == "activations" and ok and found is not None and found.emulates_activations:
            reason = f"emulated: products in fp32, of operands rounded to {requested}"
        elif name == "output" and found is not None and found.unwidened:
            ran = policy.activations
            reason = f"the tensors of the {found.unwidened} that the model returns stay as they are: no container"
        elif name == "output" and found is not None and found.narrowed:
            reason = "widened after its last product had rounded it; a head with output: fp32 returns FP32 sums"
        rows[name] = {"requested": requested, "executed": ran or "-", "ok": ok, "reason": reason}
    parts = [name for name, module in root.named_modules() if name and root_of(module) is not None]
    if parts:  # applied after this one
        ran = root_of(root.get_submodule(parts[0])).ran.get("activations", KEEP)
        why = f"another policy is on part '{parts[0]}'"
        rows["activations"] = {"requested": policy.activations, "executed": ran, "ok": False, "reason": why}
    if policy.embedding_gradient != 1.0:
        rows["embedding_gradient"] = _embedding_row(policy, root)
    for name, value in policy.implementation.model_dump(exclude_defaults=True).items():
        rows[f"implementation.{name}"] = _implementation_row(name, value, root)
    if policy.execution != KEEP:
        rows["execution"] = executed_as(root, policy.execution)
    return rows
