"""Hugging Face Trainer: ``Trainer(..., callbacks=[PolicyCallback("policy.yaml")])``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoprec.applying.guard import Guard
from autoprec.applying.policy import TorchPolicy, load
from autoprec.errors import UsageError
from autoprec.support.optional import require

TrainerCallback: Any = require("transformers", purpose="PolicyCallback").TrainerCallback
ExportableState: Any = require("transformers.trainer_callback", purpose="PolicyCallback").ExportableState


def training_arguments(policy: TorchPolicy | Path | str, **given: Any) -> Any:
    """Return ``TrainingArguments`` under which a policy decides the precision.

    Args:
        policy: a policy, or the path of one, for a :class:`PolicyCallback` beside them.
        given: what ``TrainingArguments`` takes. ``bf16``, ``fp16`` and ``torch_compile`` are switched off where the
            policy decides the same (``activations``, ``execution``), and kept where it keeps the script's.

    Raises:
        UsageError: ``fp16=True`` beside a policy that scales the loss itself.
    """
    held = policy if isinstance(policy, TorchPolicy) else load(policy)
    _refuse_scaling_twice(held, bool(given.get("fp16")))
    if held.activations != "keep":
        given |= {"bf16": False, "fp16": False}
    if held.execution != "keep":
        given["torch_compile"] = False
    return require("transformers", purpose="training_arguments").TrainingArguments(**given)


def _refuse_scaling_twice(policy: TorchPolicy, fp16: bool) -> None:
    if fp16 and policy.loss_scaling == "dynamic":
        raise UsageError(
            "TrainingArguments(fp16=True) scales the loss, and so does the policy (loss_scaling: dynamic)",
            fix="leave fp16 off: the policy's activations and loss_scaling do that",
        )


class PolicyCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Applies a policy when training begins, takes it off when it ends, and guards the run in between.

    What the guard has done is in the Trainer's checkpoints: a resumed run goes on under what it had fallen back to.

    Phases of the policy follow the Trainer's own count (``state.max_steps``), in a resumed run as well.
    ``bf16`` of ``TrainingArguments`` stays what it was in the script that was searched, for "keep" means that; where
    the policy names ``activations``, those decide (:func:`training_arguments`).

    Args:
        policy: a policy, the path of one, or (as checkpoints have it) its document.
        backend: which backend runs the GEMMs: ``auto`` or a name of :mod:`autoprec.backends`.
        guard: watch the run (needs ``logging_steps`` small enough to see something) and fall back on a breach.
    """

    def __init__(
        self, policy: TorchPolicy | Path | str | Mapping[str, Any], *, backend: str = "auto", guard: bool = True
    ) -> None:
        if isinstance(policy, Mapping):
            policy = TorchPolicy.model_validate(policy)
        self.policy = policy if isinstance(policy, TorchPolicy) else load(policy)
        self.backend, self._wants_guard = backend, guard
        self.guard: Guard | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Apply the policy to the prepared model and wrap its optimizer.

        Args:
            args: the Trainer's arguments: ``fp16`` is read.
            state: of the Trainer: its step, and the steps of the run.
            control: not used.
            kwargs: ``model`` and ``optimizer`` as the Trainer prepared them.
        """
        model = kwargs["model"]
        _refuse_scaling_twice(self.policy, bool(getattr(args, "fp16", False)))
        steps = {"run_steps": state.max_steps or None, "step": state.global_step} if self.policy.phases else {}
        kept = self._kept(state)
        policy = self.policy if kept is None else TorchPolicy.model_validate(kept["policy"])
        policy.apply(model, backend=self.backend, **steps)
        optimizer = kwargs.get("optimizer")
        if optimizer is not None:
            policy.wrap_optimizer(getattr(optimizer, "optimizer", optimizer), model=model)
        if self._wants_guard:
            self.guard = Guard(policy, model, every=1, window=20, backend=self.backend)
            if kept is not None:
                self.guard.load_state_dict(kept)

    def state(self) -> dict[str, Any]:
        """Return what the Trainer saves of this callback: how it was made, and what its guard has done."""
        made = {"policy": self.policy.to_dict(), "backend": self.backend, "guard": self._wants_guard}
        return {"args": made, "attributes": {} if self.guard is None else {"kept": self.guard.state_dict()}}

    def _kept(self, state: Any) -> dict[str, Any] | None:
        """Return what the guard had done in a run that is resumed under the same policy."""
        saved = state.stateful_callbacks.get(type(self).__name__) if state is not None and state.global_step else None
        if not isinstance(saved, dict) or saved["args"]["policy"] != self.state()["args"]["policy"]:
            return None
        kept: dict[str, Any] | None = saved["attributes"].get("kept")
        return kept

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Show the guard what the Trainer logged; its metrics join the log.

        Args:
            args, state, control: not used.
            logs: what is logged now; the guard reads ``loss`` and ``grad_norm`` and adds ``guard/...``.
            kwargs: not used.
        """
        if self.guard is not None and logs and "loss" in logs:
            breach = self.guard.step(logs["loss"], logs.get("grad_norm"))
            logs |= {f"guard/{name}": value for name, value in self.guard.values.items()}
            if breach is not None:
                logs["guard/fallback"] = breach.action

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Take the policy off, so that evaluation and saving see the plain model.

        Args:
            args, state, control: not used.
            kwargs: ``model`` as the Trainer prepared it.
        """
        self.policy.remove(kwargs["model"])
