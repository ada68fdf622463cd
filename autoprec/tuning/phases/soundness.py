"""Whether a comparison with the script as written says anything: a reference that does not train proves nothing.

It looks at what is there anyway: the recorded step (:mod:`autoprec.graph.census`) and the losses of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from autoprec.errors import NothingAcceptableError, ScriptError
from autoprec.graph.report import GraphReport
from autoprec.policy.space import WIDE_OPERATORS, SpacePreset
from autoprec.precision.recipes import KEEP
from autoprec.support.plain import Document
from autoprec.trial.command import ScriptCommand
from autoprec.tuning.decide.decision import Decision
from autoprec.tuning.decide.problem import Params
from autoprec.tuning.decide.sentences import Reason, fault_text
from autoprec.tuning.lint.facts import Facts
from autoprec.tuning.lint.rules import Finding, findings
from autoprec.tuning.lint.source import settings_of
from autoprec.tuning.setup import Setup, reference_policy
from autoprec.tuning.study.run import MODELLED, Run, pooled

#: Faults under which weights hardly move, whatever the learning rate and the number of steps.
_STANDING = frozenset(("updates-lost", "rate-below-half-ulp", "stale-casts", "fp16-unscaled"))
#: The preset under which a policy mends what it can of the script's own precision.
MENDED = "the script, mended"
#: Code of a fault in bf16 -> the parameter of the study under which weights or moments lose nothing, and its value.
_STATE = {"updates-lost": ("optimizer.weights", "bf16_kahan"), "moment-16bit": ("optimizer.exp_avg_sq", "fp16_scaled")}
#: Faults of operators that a policy runs in FP32 where its activations are in 16 bits: softmax, norms, losses, the
#: model's output, and those that a model writes by hand.
_OPERATORS = frozenset(
    ("loss-16bit", "norm-16bit", "softmax-16bit", "router-16bit", "reduction-16bit", "overflow-16bit", "eps-zero")
)
#: Steps from which on losses that are one number mean that nothing is learnt.
_FEWEST_LOSSES = 3


def faults(graph: GraphReport, command: ScriptCommand) -> list[Finding]:
    """Return what is wrong with the precision of the reference, of severity error or warning.

    Args:
        graph: the recorded step of the reference: an FP32 one has what FP32 recipes do not reach (casts and sums that
            the script writes itself, how it stores weights).
        command: the script's.
    """
    if graph.judged is None:
        return []
    folder = str(command.cwd.absolute())
    known = replace(graph, judged=graph.judged.within(folder))
    settings = settings_of([command.target, *command.args], command.cwd)
    found = findings(Facts(report=known, settings=settings))
    return [one for one in found if one.severity in ("error", "warning")]


def is_still(losses: Sequence[float]) -> bool:
    """Say whether a run's losses are one number, step after step."""
    return len(losses) >= _FEWEST_LOSSES and len(set(losses)) == 1


def sound_in_fp32(found: Sequence[Finding], setup: Setup, judged: Callable[[], Sequence[Finding]]) -> bool:
    """Say whether a run in fp32 is a reference without the errors of a script that has some.

    It has those that FP32 recipes do not reach, such as updates that weights stored in bf16 lose.

    Args:
        found: faults of the reference.
        setup: whose reference they are of.
        judged: returns the faults of a step in fp32, which is recorded only where the answer depends on it.
    """
    if setup.options.reference != "script" or not any(one.severity == "error" for one in found):
        return False
    try:
        return not any(one.severity == "error" for one in judged())
    except ScriptError:  # it does not run in fp32
        return False


@dataclass(frozen=True, slots=True)
class Mend:
    """What a policy can mend of the script's faults.

    Attributes:
        settings: parameters of the study, and their values.
        cures: codes of faults that it is for and that a step judged under it does not have; ``left`` of all others.
    """

    settings: Mapping[str, str]
    cures: tuple[str, ...]
    left: tuple[str, ...]


def mends_for(code: str, dtype: str, wide: Sequence[str] = ()) -> dict[str, str]:
    """Return the parameters of a study, and their values, that are against a fault; none where no policy is.

    Args:
        code: of the fault.
        dtype: what it is in: a pair of bf16 values is coarser than fp16, so weights in fp16 have no mend.
        wide: classes of operators of which the study decides whether they run in FP32; of others its policies say so.
    """
    if code in _STATE and dtype == "bf16":
        return dict([_STATE[code]])
    if code == "fp16-unscaled":
        return {"activations": "fp16"}  # under which gradients are scaled
    if code in _OPERATORS and dtype in ("bf16", "fp16"):
        return {"activations": dtype, **dict.fromkeys(wide, "fp32")}
    return {}


def mend_of(found: Sequence[Finding], setup: Setup, judged: Callable[[Document], GraphReport]) -> Mend | None:
    """Return what a policy can mend of a script's faults, as a step shows that runs under it; None for nothing.

    Args:
        found: faults of the reference.
        setup: whose reference they are of.
        judged: records and judges a step under a policy document.
    """
    errors = [one for one in found if one.severity == "error"]
    wide = [name for name in WIDE_OPERATORS if getattr(setup.space, name)]
    each = {one.code: mends_for(one.code, _dtype(one), wide) for one in errors}
    state = {code: one for code, one in each.items() if code in _STATE}
    around = {code: one for code, one in each.items() if code not in _STATE}
    codes = tuple(each)
    # an optimizer whose state no policy can store leaves what runs around the layers
    for tried in (each, around) if any(state.values()) and any(around.values()) else (each,):
        settings = {name: value for one in tried.values() for name, value in one.items()}
        still = _errors_under(settings, setup, judged) if settings else None
        if still is None:
            continue
        cures = tuple(code for code in codes if tried.get(code) and code not in still)
        if cures:
            return Mend(settings, cures, tuple(code for code in codes if code not in cures))
    return None


def _dtype(finding: Finding) -> str:
    return str(finding.seen.figures.get("to", "")) if finding.seen is not None else ""


def _errors_under(
    settings: Mapping[str, str], setup: Setup, judged: Callable[[Document], GraphReport]
) -> set[str] | None:
    """Return the codes of errors that a step has under some settings; None where that is not known."""
    wider = with_mend(setup, settings)
    try:
        graph = judged(wider.problem.policy(mended_params(wider, settings)).to_dict())
    except ScriptError:
        return None
    if graph.judged is None or graph.judged.unseen:
        return None
    return {one.code for one in findings(Facts(report=graph)) if one.severity == "error"}


def with_mend(setup: Setup, settings: Mapping[str, str]) -> Setup:
    """Return a search that may mend its script: further values of the study's parameters, and a preset of them.

    Args:
        setup: of the search.
        settings: parameters of the study, and their values.
    """
    space, changes, stored = setup.space, dict[str, object](), dict[str, tuple[str, ...]]()
    for name, value in settings.items():
        section, _, field = name.rpartition(".")
        values = tuple(dict.fromkeys((*getattr(space.optimizer if section else space, field), value)))
        if section:
            stored[field] = values
        else:
            changes[field] = values
    if settings.get("activations") == "fp16":
        changes["loss_scaling"] = "dynamic"
    preset = SpacePreset(name=MENDED, choice=KEEP, parameters=dict(settings))
    changes |= {"optimizer": space.optimizer.model_copy(update=stored), "presets": (*space.presets, preset)}
    return setup.restricted(space.model_copy(update=changes))


def mended_params(setup: Setup, settings: Mapping[str, str]) -> Params:
    """Return the point of a search at which the script runs as it is written, but mended."""
    return setup.problem.params_of(KEEP, **settings)


def with_price(answer: Decision, mend: Mend | None, setup: Setup, records: Sequence[Run]) -> Decision:
    """Return a decision that says what mending the script costs: measured where that ran, else modelled.

    Args:
        answer: of the search.
        mend: what a policy can mend; None for nothing.
        setup: of the search.
        records: every run of the study.
    """
    if mend is None:
        return answer
    ran = next((run for name, run in pooled(records).items() if name.startswith(MENDED)), None)
    estimate, before = setup.steps.of(mended_params(setup, mend.settings)), setup.steps.of_reference()
    data = {
        "settings": dict(mend.settings),
        "cures": list(mend.cures),
        "left": list(mend.left),
        "name": MENDED,
        "step_ms": ran["step_time_ms"] if ran else estimate.time_ms,
        "reference": setup.options.reference,
        "reference_ms": ran["step_time_ms"] * ran["speedup"] if ran else before.time_ms,
        "memory": estimate.memory_bytes - before.memory_bytes,
        "divergence": ran.get("divergence") if ran else None,
        **({"metric": setup.options.metric} if setup.options.metric else {}),
        "source": ran.metrics["step_time_ms"].source if ran else MODELLED,
    }
    return answer.with_reasons(Reason("mended", data))


@dataclass(frozen=True, slots=True)
class Soundness:
    """What is known of a search's reference before it runs: its faults, and the ways out.

    Attributes:
        reference: what it is: ``script``, ``fp32`` or ``bf16``.
        found: its faults, of severity error or warning; a warning speaks against nothing.
        mend: what a policy can mend of them; None for nothing.
        fp32: whether a run in fp32 is a way out, see :func:`sound_in_fp32`.
    """

    reference: str
    found: tuple[Finding, ...] = ()
    mend: Mend | None = None
    fp32: bool = False

    def mended(self, setup: Setup) -> Setup:
        """Return a search that may mend its script, where a policy can."""
        return with_mend(setup, self.mend.settings) if self.mend else setup

    def why_flat(self) -> str:
        """Return why a reference with these faults does not learn; empty where they do not keep it from that."""
        known = [row for row in self._rows("error") if row["code"] in _STANDING]
        return fault_text(known[0]) if known else ""

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Let a reference that cannot be measured end with what was seen of its precision: that may be why.

        Raises:
            NothingAcceptableError: as it was raised inside, with its faults and their cures: warnings where no error
                is.
        """
        try:
            yield
        except NothingAcceptableError as error:
            if rows := self._rows("error") or self._rows("warning"):
                error.what += f". {Reason('doubtful_reference', {'faults': rows})}"
                error.fix += f"; as for its precision: {'; '.join(dict.fromkeys(row['fix'] for row in rows[:2]))}"
            raise

    def told(self, losses: Sequence[float] = (), *, short: bool = False) -> Reason | None:
        """Return why comparisons with the reference are not evidence; None where nothing speaks against them.

        Args:
            losses: of its run, as far as it has run.
            short: names the faults by their codes and places: the verdict says the rest.
        """
        rows, still = self._rows("error"), is_still(losses)
        if not rows and not still:
            return None
        data = {"faults": rows, "still": still, "reference": self.reference, "fp32": self.fp32}
        data |= {"unmended": True} if rows and self.mend is None and not short else {}
        return Reason("unsound_reference", data | ({"short": True} if short else {}))

    def qualify(self, answer: Decision, setup: Setup, records: Sequence[Run], losses: Sequence[float]) -> Decision:
        """Return a decision that says first that its reference is at fault, where it is, and last what is doubtful.

        What a faulty reference says for a policy is not evidence, so none is adopted. What mending it costs is said as
        well, where a policy can.

        Args:
            answer: of the search.
            setup: of the search.
            records: every run of the study.
            losses: of the reference's run.
        """
        answer = with_price(answer, self.mend, setup, records)
        why, doubts = self.told(losses), self._rows("warning")
        if doubts:
            answer = answer.with_reasons(Reason("doubtful_reference", {"faults": doubts}))
        if why is None:
            return answer
        if answer.verdict == "adopt":
            adopted, *others = answer.reasons
            unproved = replace(adopted, data=adopted.data | {"unproved": True})
            answer = replace(answer, verdict="undecided", reasons=(unproved, *others), explanation={})
        return replace(answer, reasons=(why, *answer.reasons))

    def _rows(self, severity: str) -> list[dict[str, str]]:
        return [
            {"code": one.code, "place": one.place, "message": one.message, "fix": one.fix}
            for one in self.found
            if one.severity == severity
        ]


def soundness_of(setup: Setup, command: ScriptCommand, record: Callable[[Document | None], GraphReport]) -> Soundness:
    """Return what recorded steps show of a search's reference.

    A reference other than the script is judged as it runs, not as the script does.

    Args:
        setup: of the search.
        command: the script's.
        record: records and judges a step of the script under a policy document, None for as it is written.

    Raises:
        ScriptError: the reference's step could not be recorded.
    """
    other = setup.reference_policy()
    found = tuple(faults(record(other) if other else setup.graph, command))
    mend = mend_of(found, setup, record)
    fp32 = sound_in_fp32(found, setup, lambda: faults(record(reference_policy("fp32")), command))
    return Soundness(setup.options.reference, found, mend, fp32)
