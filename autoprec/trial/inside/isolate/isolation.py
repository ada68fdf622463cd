"""Keep a trial from writing anything of the user's: savers do nothing, and other files go to a private place."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from autoprec.trial.inside.isolate.overlay import Overlay

__all__ = ["SAVERS", "isolate", "suppressed"]

#: ``module, attribute path``: what writes a checkpoint, a model or an upload, and is not allowed to in a trial.
SAVERS: tuple[tuple[str, str], ...] = (
    ("torch", "save"),
    ("torch.jit", "save"),
    ("torch.distributed.checkpoint", "save"),
    ("torch.distributed.checkpoint", "async_save"),
    ("safetensors.torch", "save_file"),
    ("safetensors.torch", "save_model"),
    ("safetensors.numpy", "save_file"),
    ("transformers.modeling_utils", "PreTrainedModel.save_pretrained"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase.save_pretrained"),
    ("transformers.configuration_utils", "PretrainedConfig.save_pretrained"),
    ("transformers.utils.hub", "PushToHubMixin.push_to_hub"),
    ("transformers.trainer", "Trainer._save_checkpoint"),
    ("transformers.trainer", "Trainer.save_model"),
    ("accelerate.accelerator", "Accelerator.save_state"),
    ("accelerate.accelerator", "Accelerator.save_model"),
    ("accelerate.accelerator", "Accelerator.save"),
    ("lightning.pytorch.trainer.trainer", "Trainer.save_checkpoint"),
    ("pytorch_lightning.trainer.trainer", "Trainer.save_checkpoint"),
    ("lightning.fabric.fabric", "Fabric.save"),
    ("tensorboard.summary.writer.event_file_writer", "EventFileWriter.add_event"),
    ("tensorboard.summary.writer.event_file_writer", "EventFileWriter.flush"),
    ("tensorboard.summary.writer.event_file_writer", "EventFileWriter.close"),
    ("tensorboardX.event_file_writer", "EventFileWriter.add_event"),
    ("tensorboardX.event_file_writer", "EventFileWriter.flush"),
    ("tensorboardX.event_file_writer", "EventFileWriter.close"),
    ("huggingface_hub", "upload_folder"),
    ("huggingface_hub", "upload_file"),
    ("huggingface_hub", "create_repo"),
)

#: How often a saver was called and did nothing, in this process.
suppressed: dict[str, int] = {}


def _nothing(label: str) -> Callable[..., None]:
    def saver(*_args: Any, **_kwargs: Any) -> None:
        suppressed[label] = suppressed.get(label, 0) + 1

    saver.__name__ = label.rpartition(".")[2]
    return saver


def _silence(module: Any, path: str, label: str) -> None:
    *owners, name = path.split(".")
    owner = module
    for part in owners:
        owner = getattr(owner, part, None)
    if owner is not None and hasattr(owner, name):
        setattr(owner, name, _nothing(label))


class _SaverFinder:
    """Silences the savers of a module right after it has been imported."""

    def __init__(self, wanted: dict[str, list[str]]) -> None:
        self._wanted, self._busy = wanted, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name not in self._wanted or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for attribute in self._wanted.get(name, ()):
                _silence(module, attribute, f"{name}.{attribute}")

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def isolate(config: dict[str, Any]) -> Overlay:
    """Silence every saver of :data:`SAVERS`, now or when it is imported, and put an overlay under all other files.

    ``config`` names our ``private`` directory, the ``run_dir`` of the logs, the script's ``cwd`` and its path.
    """
    wanted: dict[str, list[str]] = {}
    for module_name, path in SAVERS:
        module = torch if module_name == "torch" else sys.modules.get(module_name)
        if module is not None:
            _silence(module, path, f"{module_name}.{path}")
        else:
            wanted.setdefault(module_name, []).append(path)
    sys.meta_path.insert(0, _SaverFinder(wanted))
    cwd = str(config["cwd"])
    guarded = [cwd]
    if config.get("script"):
        guarded.append(os.path.dirname(os.path.abspath(os.path.join(cwd, str(config["script"])))))
    layer = os.path.join(str(config["private"]), f"overlay-{os.getpid()}")
    os.makedirs(layer, exist_ok=True)
    overlay = Overlay(layer, guarded, [str(config["private"]), str(config["run_dir"])])
    overlay.install()
    return overlay
