"""What a script says of precision itself, read from its source and from the files it is given, without running it.

Looked at are the script, the modules beside it that it imports, and DeepSpeed's and accelerate's configuration files
among its arguments. Only what is written out is seen: a dtype that comes from an argument has an empty value.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec.errors import AutoPrecError
from autoprec.support.files import read_document, read_text
from autoprec.tuning.lint.facts import Setting

#: Modules beside a script that are looked at, at most, and the size of each in bytes.
_MOST_FILES, _MOST_BYTES = 200, 2_000_000
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
    files = [folder / word for word in words if not word.startswith("-")]
    scripts = [path for path in files if path.suffix == ".py" and path.is_file()]
    configs = [path for path in files if path.suffix in (".json", ".yaml", ".yml") and path.is_file()]
    found: list[Setting] = []
    for path, tree in _with_imports(scripts).items():
        found += _Reader(tree, _short(path, folder)).settings
    for path in configs:
        found += _of_config(path, _short(path, folder))
    return found


def _short(path: Path, folder: Path) -> str:
    path = path.resolve()
    return str(path.relative_to(folder.resolve())) if path.is_relative_to(folder.resolve()) else str(path)


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(read_text(path, most_bytes=_MOST_BYTES))
    except (AutoPrecError, SyntaxError, ValueError, RecursionError):
        return None


def _with_imports(scripts: Sequence[Path]) -> dict[Path, ast.Module]:
    """Return scripts and the modules that lie beside them and that they import, each parsed once."""
    seen: dict[Path, ast.Module] = {}
    waiting = [(path, path.parent) for path in scripts]
    while waiting and len(seen) < _MOST_FILES:
        path, root = waiting.pop(0)
        tree = None if path in seen else _parse(path)
        if tree is None:
            continue
        seen[path] = tree
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                start = node.module or ""
                names = [start, *(f"{start}.{alias.name}".strip(".") for alias in node.names)]
            above = path.parent if isinstance(node, ast.ImportFrom) and node.level else root
            for name in filter(None, names):
                beside = above.joinpath(*name.split("."))
                tried = (beside.with_suffix(".py"), beside / "__init__.py")
                waiting += [(file, root) for file in tried if file.is_file() and file not in seen]
    return seen


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
