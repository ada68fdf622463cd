"""A policy that follows the training: every N steps the gradient errors are measured again, and the layers reassigned.

What an 8-bit layer costs is not the same at step 100 and at step 100,000: learning rates decay, outliers appear, the
noise of mini-batches grows beside a shrinking gradient. So every N steps one of the run's own steps is recorded
(:mod:`.recorded`) and, with its gradients complete and before the optimizer uses them, played again a few times: once
as the script wrote it, once under the policy, and, where the error is not what the table says, with single groups
lowered. The knapsack is solved again under the same budget, in units of the noise between the gradients of the last
four steps (:mod:`.deciding`). A change is measured as a whole before it is kept, and nothing else is touched
(:mod:`.untouched`): a run in which no change is made computes the same bits as one that is not followed.

A look costs at most eight passes, and no more than 1.6 % of the steps between two looks where these are 500 or more.
Ranks of a distributed run look together, and end that together (:mod:`.ranks`).
"""

from __future__ import annotations

import logging
import math
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoprec.applying.following.deciding import Desk, segments_to_ask
from autoprec.applying.following.gradients import Gradients, local_part, relative_error
from autoprec.applying.following.ranks import EndedError, Ranks, RanksApartError, average, fill, playing_alone, replicas
from autoprec.applying.following.recorded import RecordedStep
from autoprec.applying.following.untouched import untouched
from autoprec.applying.phases import Phases, Put, phases_of
from autoprec.applying.raw_weights import unit_execution
from autoprec.applying.state import carries_state, carry_state
from autoprec.applying.units import tunable_units, unwrap
from autoprec.errors import UsageError
from autoprec.policy import Policy
from autoprec.policy.phases import check_follow
from autoprec.policy.solver import IntVector
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.active_run import log_to_active_run

_LOG = logging.getLogger("autoprec.following")
#: Gradients of this many steps, the one looked at last, say how noisy mini-batches are.
_NOISE_STEPS = 4
#: Passes of a look: at most this share of the steps between two looks, but the fewest that can decide, and not more
#: than are ever useful; these also where the policy must step back, which is rare.
_SHARE, _FEWEST, _MOST = 0.016, 5, 8
#: Kept for what is decided: a proposal, and a safer one if that is not good enough.
_FOR_DECIDING = 2
_ACTIVE: weakref.WeakKeyDictionary[nn.Module, Following] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a run: relative gradient errors at ``step``, and what was changed and why (empty: nothing)."""

    step: int
    error: float
    limit: float
    noise: float
    change: str
    reason: str
    passes: int


class Following:
    """Follows one run of one model.

    Args:
        policy: what the model runs, with a ``follow`` section (a search writes one).
        model: the model, wrapped or not; the policy is applied to it already.
        put: puts a policy on the model.
        every: optimizer steps between two looks.
        on_change: called with a line of text at every change.
        run_steps: optimizer steps of the whole run, where known: no look is taken with fewer than ``every`` steps left.
            Weights have adapted to the precision they were trained in, and a change right before the end leaves them
            no time to adapt again (measured: benchmarks/results, the long run followed).

    Attributes:
        looks: what was seen and done.
        seconds: time spent on it.
        paused: do not look (a guard has fallen back).

    Raises:
        UsageError: the policy does not record what following needs, or the model cannot be followed.
    """

    def __init__(
        self,
        policy: Policy,
        model: nn.Module,
        put: Put,
        *,
        every: str | int = 500,
        on_change: Callable[[str], None] | None = None,
        run_steps: int | None = None,
    ) -> None:
        self.every, self._run_steps = check_follow(policy, every), run_steps
        self.policy, self._on_change, self._put = policy, on_change, put
        desks = [Desk.of(policy.follow, stage) for stage in policy.stages] if policy.follow is not None else []
        desk = next((made for made in desks if made is not None), None)
        if desk is None:
            raise UsageError(
                "the policy's layers run what its section 'follow' does not list, so no change can be weighed",
                fix="search again, or undo the edit of 'layers'",
            )
        self._desk, self._stages = desk, policy.stages
        root = unwrap(model)
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in root.parameters()):
            raise UsageError("a model whose gradients are used during backward cannot be followed")
        self._model, self._root = weakref.ref(model), weakref.ref(root)
        self.step, self.seconds, self.paused = 0, 0.0, False
        self._states: dict[str, tuple[Any, dict[str, Tensor]]] = {}
        self.looks: list[Look] = []
        self._began = time.monotonic()
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._recorded: RecordedStep | None = None
        self._gradients: Gradients | None = None
        self._seen, self._deviation, self._square = 0, 0.0, 0.0
        self._ranks, self._failed, self._due = Ranks(), "", False
        self._passes = 0
        self._stop: Callable[[], None] = lambda: None

    def begin(self) -> None:
        root = self._root()
        assert root is not None
        stop_following(root)
        handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

        def remove() -> None:
            for handle in handles:
                handle.remove()

        self._stop = weakref.finalize(root, remove)  # hooks of the process would outlive the model
        _ACTIVE[root] = self

    def stop(self) -> None:
        """Look no more; what is on the model stays."""
        if self._recorded is not None:
            self._recorded.stop()
        self._recorded = self._gradients = None
        self._stop()

    def resume(self, policy: Policy) -> None:
        """Continue from what an earlier process had changed the policy to (it is on the model already)."""
        self.policy, self.paused = policy, False

    @property
    def share(self) -> float:
        """Share of the time since the beginning that looking took."""
        return self.seconds / max(time.monotonic() - self._began, 1e-9)

    # ---------------------------------------------------------------- the steps of the run
    def _is_ours(self, optimizer: Optimizer) -> bool:
        primary = self._optimizer() if self._optimizer is not None else None
        if primary is None:
            root = self._root()
            own = {id(p) for p in root.parameters()} if root is not None else set()
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                return False
            self._optimizer, primary = weakref.ref(optimizer), optimizer
        return optimizer is primary

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        self.step += 1
        due = (self.step + 1) % self.every == 0 and not self._ending()
        self._due = due and self._stage_index() is not None
        if self._due:
            self._locally(self._record)

    def _record(self) -> None:
        root = self._root()
        assert root is not None
        self._recorded = RecordedStep(root.parameters(), _device(root), sees_backward=True)
        self._recorded.start()

    def _locally(self, work: Callable[[], None]) -> None:
        """Do something that other ranks do not wait for; if it fails, all of them hear of it at the next look."""
        try:
            work()
        except Exception as error:  # following must never be what ends a training
            _LOG.debug("following failed", exc_info=True)
            self._failed = self._failed or f"{type(error).__name__}: {error}"

    def _ending(self) -> bool:
        """Whether the run ends before another look would be due."""
        return self._run_steps is not None and self.step + 1 + self.every > self._run_steps

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        until = self.every - 1 - self.step % self.every
        if until >= _NOISE_STEPS or self._ending() or not self._is_ours(optimizer):
            return
        began = time.monotonic()
        self._locally(self._note_gradients)
        if until == 0:
            if self._recorded is not None:
                self._recorded.stop()
            if self._due:
                self._look_or_end()
            self._recorded = self._gradients = None
        self.seconds += time.monotonic() - began

    def _look_or_end(self) -> None:
        try:
            try:
                self._look()
            except (EndedError, RanksApartError):
                raise
            except Exception as error:  # the other ranks wait to hear of it
                _LOG.debug("following failed", exc_info=True)
                self._ranks.gather(partial(_fail, error))
        except EndedError as error:
            warnings.warn(f"the run is not followed any more: {error}", stacklevel=5)
            self.stop()

    # ---------------------------------------------------------------- gradients
    def _parameters(self) -> list[nn.Parameter]:
        root = self._root()
        return [] if root is None else [p for p in root.parameters() if p.requires_grad]

    def _grads(self) -> list[Tensor | None]:
        return [None if p.grad is None else local_part(p.grad) for p in self._parameters()]

    def _note_gradients(self) -> None:
        """Take the gradients of this step into the mean of the last ones."""
        if self._gradients is None:
            self._gradients = Gradients(list(self._parameters()), 1, shared=False)
            self._gradients.store(0, {}, self._grads())
            self._seen, self._deviation, self._square = 1, 0.0, self._gradients.square(0)
        else:
            self._deviation += self._gradients.fold(self._seen, {}, self._grads())
            self._seen += 1

    def _noise(self) -> float:
        """Return the standard deviation of a mini-batch's gradient over the norm of one."""
        noise = self._ratio(lambda: (self._deviation / max(self._seen - 1, 1), self._square))
        return noise if self._seen > 1 else math.nan

    def _error(self, policy: Policy) -> float:
        """Play the recorded step under a policy; return the relative gradient error."""
        gradients = self._gradients
        assert gradients is not None
        self._play(policy)
        return self._ratio(lambda: gradients.compare(0, {}, self._grads()))

    def _play(self, policy: Policy) -> None:
        assert self._recorded is not None
        wrappers = replicas(self._recorded.modules)
        with playing_alone(wrappers):
            self._ranks.gather(partial(self._play_here, policy, wrappers))
        average(wrappers)
        self._passes += 1

    def _play_here(self, policy: Policy, wrappers: list[nn.parallel.DistributedDataParallel]) -> None:
        model = self._model() or self._root()
        assert model is not None
        assert self._recorded is not None
        for parameter in self._parameters():
            parameter.grad = None
        self._put(policy.model_copy(update={"execution": "keep"}), model)
        for name, unit in tunable_units(unwrap(model)).items():
            run, (plan, state) = unit_execution(unit), self._states.get(name, (None, {}))
            if run is not None and state and run.plan == plan:
                run.load_state({part: value.clone() for part, value in state.items()}, unit.weight.device)
        self._recorded.play(alone=True)
        fill(wrappers)

    def _ratio(self, squares: Callable[[], tuple[float, float]]) -> float:
        """Return the root of a ratio, over all shards, and the same on all ranks: they must decide alike."""
        found = self._ranks.gather(squares)
        if len(found) == 1:
            return relative_error(*found[0])
        if any(hasattr(p, "to_local") for p in self._parameters()):
            found = [(math.fsum(error2 for error2, _ in found), math.fsum(norm2 for _, norm2 in found))]
        ratios = [relative_error(*one) for one in found]
        return max(math.inf if math.isnan(ratio) else ratio for ratio in ratios)

    # ---------------------------------------------------------------- a look
    def _stage_index(self) -> int | None:
        """Return which stage of the policy runs, if it is one that can be followed."""
        phases = self._phases()
        index = 0 if phases is None else phases.index
        first, now = (Desk.of(self._desk.follow, stages[index]) for stages in (self._stages, self.policy.stages))
        # a phase in 16 bits is meant to be that
        if first is None or now is None or self.paused or not (first.scaled or phases is None):
            return None
        self._desk.now = now.now
        return index

    def _phases(self) -> Phases | None:
        root = self._root()
        return None if root is None else phases_of(root)

    def _look(self) -> None:
        root, index, recorded = self._root(), self._stage_index(), self._recorded
        if root is None or index is None:
            return
        self._ranks.gather(self._check)
        assert recorded is not None
        noise, stage = self._noise(), self.policy.stages[index]
        follow = self._desk.follow
        limit = min(follow.max_gradient_error * noise, follow.most_error or math.inf)
        self._passes = 0
        self._states = {
            name: (run.plan, {part: value.clone() for part, value in run.state(unit.weight.device).items()})
            for name, unit in tunable_units(root).items()
            if (run := unit_execution(unit)) is not None
        }
        with untouched(root, self._parameters(), _device(root)):
            error, chosen, reason = self._decide(stage, self._stages[index], limit)
        change = "" if chosen is None else self._desk.told(chosen)
        look = Look(self.step + 1, error, limit, noise, change, reason, self._passes)
        self._conclude(index, chosen)
        self.looks.append(look)
        self._locally(partial(self._tell, look))

    def _check(self) -> None:
        """Raise what this rank alone knows to be in the way of a look."""
        failed = self._failed or (self._recorded.failed if self._recorded is not None else "nothing was recorded")
        if failed:
            raise EndedError(failed)
        if self._recorded is not None and not self._recorded.complete:
            raise UsageError("no loss of the model was seen on its way to backward")

    def _decide(self, stage: Policy, base: Policy, limit: float) -> tuple[float, IntVector | None, str]:
        """Return the error of now, the assignment to change to (None: stay), and why."""
        desk = self._desk
        self._play(_reference(desk.follow.reference))
        norm = self._ratio(self._kept)
        if norm == 0 or not math.isfinite(norm):
            return math.nan, None, f"the gradient of this step is {'zero' if norm == 0 else 'not finite'} as written"
        error = self._error(stage)
        if not math.isfinite(limit):
            return error, None, "the noise of mini-batches could not be measured"
        must = desk.is_over(error, limit)
        most = _MOST if must else min(_MOST, max(_FEWEST, int(_SHARE * self.every)))
        if not desk.agrees(error**2) or not math.isfinite(error):
            self._ask(base, error**2, most - _FOR_DECIDING)
        if not must:
            self._ask_again(base, most - _FOR_DECIDING)
        reason = f"the gradient error of {error:.3g} is over the limit of {limit:.3g}" if must else ""
        while self._passes < most and (chosen := desk.proposal(limit, must=must)) is not None:
            found = self._error(desk.policy(base, chosen))
            if found <= limit:
                saved = desk.saved_ms(chosen) / desk.follow.step_time_ms
                why = reason or f"the gradient error may grow from {error:.3g} to {found:.3g}, within {limit:.3g}"
                return error, chosen, f"{why}; {abs(saved):.1%} of a step {'saved' if saved > 0 else 'given up'}"
            desk.learn(_groups_of(desk, chosen), found**2 - desk.follow.other_error**2, chosen)
        if must and (desk.safest() != desk.now).any():
            return error, desk.safest(), f"{reason}, and nothing faster was found within it"
        return error, None, "over the limit once" if desk.over else "within the limit"

    def _kept(self) -> tuple[float, float]:
        """Keep the gradients of now as those of the reference; return the squared norm, over one."""
        assert self._gradients is not None
        self._gradients.store(0, {}, self._grads())
        return self._gradients.square(0), 1.0

    def _ask(self, base: Policy, measured2: float, most: int) -> None:
        """Find out which groups the error comes from: halve the segment that is least explained, and so on."""
        desk = self._desk
        lowered, other2 = desk.lowered, desk.follow.other_error**2
        if not lowered:
            return
        predicted = [float(desk.error2[g, desk.now[g]]) for g in lowered]
        whole = tuple(range(len(lowered)))
        known = {whole: max(measured2 - other2, 0.0)} if math.isfinite(measured2) else {whole: math.inf}
        while self._passes < most and (half := segments_to_ask(predicted, known)) is not None:
            segment = next(s for s in known if s[: len(half)] == half and len(s) // 2 == len(half))
            rest, index = segment[len(half) :], desk.safest()
            for g in half:
                index[lowered[g]] = desk.now[lowered[g]]
            total, found2 = known.pop(segment), self._error(desk.policy(base, index)) ** 2
            found2 = found2 if math.isfinite(found2) else math.inf
            known[half] = found2
            known[rest] = total if math.isinf(total) and math.isfinite(found2) else max(total - found2, 0.0)
            if math.isinf(found2):
                known[rest] = sum(predicted[g] for g in rest)
        for segment, error2 in known.items():
            desk.learn([lowered[g] for g in segment], error2)

    def _ask_again(self, base: Policy, most: int) -> None:
        """Find out whether groups that left what they began with could go back to it."""
        desk, first = self._desk, Desk.of(self._desk.follow, base)
        assert first is not None
        for g in desk.to_ask_again(first.now, most - self._passes):
            index = desk.safest()
            index[g] = first.now[g]
            desk.learn([g], self._error(desk.policy(base, index)) ** 2, index)

    # ---------------------------------------------------------------- a change
    def _conclude(self, index: int, chosen: IntVector | None) -> None:
        """Make a change on all ranks, or on none; what failed on one since the last pass is heard here, too."""
        before = self.policy
        try:
            self._ranks.gather(lambda: None if chosen is None else self._change(index, chosen))
        except EndedError:
            if self.policy is not before:
                self.policy = before
                self._install()
            raise

    def _change(self, index: int, chosen: IntVector) -> None:
        stages = list(self.policy.stages)
        stages[index] = self._desk.policy(self._stages[index], chosen)
        self.policy = self.policy.with_stages(stages)
        self._install()
        self._desk.now, self._desk.over = chosen, 0

    def _install(self) -> None:
        model, phases = self._model() or self._root(), self._phases()
        assert model is not None
        if phases is not None:
            phases.replace(self.policy)
        else:
            self._put(self.policy, model, keep=True)
            optimizer = self._optimizer() if self._optimizer is not None else None
            if optimizer is not None and carries_state(optimizer):
                carry_state(optimizer, model)

    def _tell(self, look: Look) -> None:
        metrics = {"follow/gradient_error": look.error, "follow/limit": look.limit, "follow/share": self.share}
        text = f"step {look.step}: {look.change}: {look.reason}" if look.change else ""
        log_to_active_run(metrics, look.step, {f"autoprec.follow.{look.step}": text} if text else None)
        _LOG.log(logging.WARNING if text else logging.INFO, text or f"step {look.step}: nothing changed: {look.reason}")
        if text and self._on_change is not None:
            self._on_change(text)


def following_of(model: nn.Module) -> Following | None:
    """Return what follows a model's run, or None."""
    return _ACTIVE.get(unwrap(model))


def stop_following(model: nn.Module) -> None:
    """Follow a model's run no more; a no-op where nothing does."""
    found = _ACTIVE.pop(unwrap(model), None)
    if found is not None:
        found.stop()


def _reference(name: str) -> Policy:
    if name == "script":
        return Policy()
    return Policy(recipes={name: BUILTIN_RECIPES[name]}, default=name, activations="bf16" if name == "bf16" else "keep")


def _fail(error: Exception) -> None:
    raise error


def _groups_of(desk: Desk, index: IntVector) -> list[int]:
    return [g for g, c in enumerate(index) if desk.error2[g, c] > 0]


def _device(root: nn.Module) -> torch.device:
    return next(iter(root.parameters())).device
