"""What a script says of precision itself, read from its source and from the files it is given, without running it.

The script is read, the modules beside it that it imports, and DeepSpeed's and accelerate's configuration files among
its arguments. Only what is written out is seen: a dtype that comes from an argument has an empty value.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec.errors import AutoPrecError
from autoprec.support.files import read_document
from autoprec.trial.source import imported_sources, shown_from
from autoprec.tuning.lint.facts import Setting

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16"}
#: Last word of a call -> the kind of setting it is.
_CALLS = {
    "autocast": "autocast",
    "GradScaler": "scaler",
    "compile": "compile",
    "convert_to_float8_training": "torchao",
    "fp8_autocast": "te",
    "fp8_model_init": "te",
    "set_float32_matmul_precision": "tf32",
}
#: Arguments of Accelerator and TrainingArguments that choose a precision.
_FLAGS = ("bf16", "fp16", "mixed_precision")


def settings_of(words: Sequence[str], folder: Path) -> list[Setting]:
    """Return what the script of a command line says of precision; empty where its file is not known.

    Args:
        words: a script with its arguments, or a launcher with both.
        folder: what relative paths are relative to.
    """
    folder = folder.resolve()
    files = [path for word in words if not word.startswith("-") and (path := (folder / word).resolve()).is_file()]
    sources: dict[Path, ast.Module | None] = {}
    for script in (path for path in files if path.suffix == ".py"):
        sources |= {path: tree for path, (_, tree) in imported_sources(script, script.parent).items()}
    found: list[Setting] = []
    for path, tree in sources.items():
        found += _Reader(tree, shown_from(folder, path)).settings if tree is not None else []
    for path in (path for path in files if path.suffix in (".json", ".yaml", ".yml")):
        found += _of_config(path, shown_from(folder, path))
    return found


def _last(node: ast.AST) -> str:
    """Return the last word of a dotted name; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.AST | None) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else _last(node) if node is not None else ""


class _Reader(ast.NodeVisitor):
    """Collects the settings of one file."""

    def __init__(self, tree: ast.Module, name: str) -> None:
        self.settings: list[Setting] = []
        self._name = name
        self.visit(tree)

    def _add(self, kind: str, value: str, node: ast.expr | ast.stmt) -> None:
        self.settings.append(Setting(kind, value, f"{self._name}:{node.lineno}"))

    def visit_Call(self, node: ast.Call) -> None:
        called, given = _last(node.func), {word.arg: word.value for word in node.keywords if word.arg}
        owner = _text(getattr(node.func, "value", None))
        kind = _CALLS.get(called, "") if called != "compile" or owner in ("torch", "model") else ""  # not re.compile
        if kind == "autocast":
            dtypes = [_DTYPES.get(_text(arg), "") for arg in (*node.args, given.get("dtype")) if arg is not None]
            enabled = not (isinstance(given.get("enabled"), ast.Constant) and not _is_true(given.get("enabled")))
            self._add("autocast", next(filter(None, dtypes), ""), node) if enabled else None
        elif kind:
            self._add(kind, _text(node.args[0]) if kind == "tf32" and node.args else called, node)
        if called in ("half", "bfloat16") and not node.args:
            self._add("cast", _DTYPES[called], node)
        for flag in _FLAGS:
            if flag in given and called.endswith(("Accelerator", "Arguments", "Config", "Trainer", "Fabric")):
                value = _text(given[flag]) if flag == "mixed_precision" else flag if _is_true(given[flag]) else ""
                self._add("trainer", _DTYPES.get(value, value), node) if value not in ("", "no", "None") else None
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Attribute) and target.attr == "allow_tf32":
                self._add("tf32", "high" if _is_true(node.value) else "highest", node)
        self.generic_visit(node)


def _is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and bool(node.value)


def _of_config(path: Path, name: str) -> Iterator[Setting]:
    """Yield what a configuration of DeepSpeed or accelerate chooses; nothing of other files."""
    try:
        document: Mapping[str, Any] = read_document(path)
    except AutoPrecError:
        return
    for key in ("bf16", "fp16"):
        part = document.get(key)
        if isinstance(part, dict) and part.get("enabled") is True:
            yield Setting("trainer", key, f"{name}:1")
            if key == "fp16":  # DeepSpeed scales the loss itself
                yield Setting("scaler", "deepspeed", f"{name}:1")
    mixed = document.get("mixed_precision")
    if isinstance(mixed, str) and mixed != "no":
        yield Setting("trainer", mixed, f"{name}:1")
        if mixed == "fp16":
            yield Setting("scaler", "accelerate", f"{name}:1")
