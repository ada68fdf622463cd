"""Public functions say what they do, what they take, and what shapes their tensors have."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "autoprec"
#: Rooms in which every public function is documented.
ROOMS = (
    *("errors.py", "api.py", "support", "precision", "policy", "numerics", "optim", "backends", "applying", "graph"),
    *("cost", "trial", "tuning"),
    *("tracking", "reports", "export", "integrations", "cli"),
)
#: So many parameters are told one by one.
MANY = 3

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Return the public functions and methods of a module or class; those inside a function are nobody's business."""
    for child in ast.iter_child_nodes(node):
        name = getattr(child, "name", "_")
        if name.startswith("_"):
            continue
        if isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{name}.")
        elif isinstance(child, Function) and not _is_declared_elsewhere(child):
            yield f"{prefix}{name}", child


@cache
def classes() -> dict[str, tuple[set[str], dict[str, str]]]:
    """Return, by the name of a class, the names of its bases, and the docstrings of its methods."""
    out: dict[str, tuple[set[str], dict[str, str]]] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases, methods = out.setdefault(node.name, (set(), {}))
                bases |= {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
                found = [method for method in node.body if isinstance(method, Function)]
                methods |= {method.name: doc for method in found if (doc := ast.get_docstring(method))}
    return out


def inherited(qualified: str) -> str:
    """Return what the base classes of a method's class say of it; a method that overrides one says what is its own."""
    *owner, name = qualified.split(".")
    frontier, seen = owner[-1:], set[str]()
    while frontier:
        bases = classes().get(frontier.pop(), (set(), {}))[0] - seen
        seen |= bases
        frontier += bases
    return "\n".join(classes()[base][1].get(name, "") for base in seen if base in classes())


def _is_declared_elsewhere(function: Function) -> bool:
    """Say whether a function is an overload or a setter, which its sibling documents."""
    return any(ast.unparse(one).endswith(("overload", ".setter")) for one in function.decorator_list)


def is_command(function: Function) -> bool:
    """Say whether a function is a command: its help is its docstring, and its options say what each of them is."""
    text = " ".join(ast.unparse(one) for one in function.decorator_list)
    return "click.command" in text or "script_command" in text


def problem(function: Function, qualified: str = "") -> str:
    """Return what a docstring lacks; empty for nothing."""
    own, told, spec = ast.get_docstring(function) or "", inherited(qualified), function.args
    doc = own or told.strip()
    named = [one for one in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs) if one.arg not in ("self", "cls")]
    if not doc:
        return "has no docstring"
    if len(named) >= MANY and "Args:" not in own + told and not is_command(function):
        return f"has {len(named)} parameters and no Args:"
    types = [ast.unparse(one.annotation) for one in named if one.annotation]
    types += [ast.unparse(function.returns)] if function.returns else []
    if any("Tensor" in one for one in types) and "[" not in doc and "shape" not in doc.lower():
        return "takes or returns tensors and says nothing of their shapes"
    return ""


@pytest.mark.parametrize("room", ROOMS)
def test_public_functions_are_documented(room: str) -> None:
    files = [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{function.lineno} {name} {what}"
        for path in files
        for name, function in functions(ast.parse(path.read_text(encoding="utf-8")))
        if (what := problem(function, name))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("def f(): pass", "has no docstring"),
        ('def f(a, b, c):\n    "It."', "has 3 parameters and no Args:"),
        ('def f(a, b, c):\n    "It.\\n\\n    Args:\\n        a, b, c: of it.\\n    "', ""),
        ('def f(self, a, b):\n    "It."', ""),
        ('def f(a: torch.Tensor) -> int:\n    "It."', "takes or returns tensors and says nothing of their shapes"),
        ('def f(a: torch.Tensor) -> int:\n    "It of ``[M, K]``."', ""),
        ('@click.command("f")\ndef f(a, b, c):\n    "It."', ""),
    ],
)
def test_what_is_missing_is_seen(source: str, what: str) -> None:
    (_, function), *_ = functions(ast.parse(source))
    assert problem(function) == what


def test_an_override_leaves_to_its_base_what_that_says() -> None:
    assert "Args:" in inherited("NativeBackend.capability")
    assert inherited("Backend.capability") == inherited("capability") == ""
    (_, function), *_ = functions(ast.parse("def capability(self, a, b, c): pass"))
    assert problem(function, "NativeBackend.capability") == ""
    assert problem(function, "Backend.capability") == "has no docstring"
