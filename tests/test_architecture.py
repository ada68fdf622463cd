"""The house: rooms import only from their own room or rooms above, no import cycles, no long file or function."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autoprec"

#: Rooms from the foundation up, by the first part of a module's name inside the package.
ROOMS = {
    "face": ("errors", "_version"),
    "support": ("support",),
    "precision": ("precision",),
    "policy": ("policy",),
    "numerics": ("numerics",),
    "optim": ("optim",),
    "backends": ("backends",),
    "applying": ("applying",),
    "graph": ("graph",),
    "cost": ("cost",),
    "trial": ("trial",),
    "tuning": ("tuning",),
    "outlets": ("tracking", "report", "export", "integrations"),
    "testing": ("testing",),
    "door": ("api", "cli", "__init__", "__main__"),
}
ORDER = {part: (index, room) for index, (room, parts) in enumerate(ROOMS.items()) for part in parts}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_FILES_IN_A_FOLDER = 14

#: Folders whose modules, with everything of the package that they import when they are loaded, import no torch.
TORCH_FREE = ("autoprec.tuning", "autoprec.trial.driver", "autoprec.policy", "autoprec.precision", "autoprec.support")
#: What a pure decision does not do: start anything, or touch files. (Names of modules, and of calls.)
IMPURE_MODULES = {
    "subprocess",
    "multiprocessing",
    "socket",
    "tempfile",
    "shutil",
    "concurrent.futures",
    "torch",
    "mlflow",
}
IMPURE_CALLS = {"open", "fork", "popen", "system", "unlink", "rename", "mkdir", "write_text", "write_bytes"}
#: Inside a room: who is below whom. A folder imports from those before it in its row, never from those after it.
SUB_ROOMS = {
    "trial": ("inside", "driver"),
    "tuning": ("study", "decide", "workers", "phases"),
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("autoprec", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def room_of(module: str) -> tuple[int, str]:
    parts = module.split(".")
    return ORDER[parts[1] if len(parts) > 1 else "__init__"]


def type_only(tree: ast.AST) -> set[ast.AST]:
    """Return the nodes under ``if TYPE_CHECKING``: they never run."""
    out: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                out.update(ast.walk(child))
    return out


@cache
def imports(module: str, path: Path, *, typing_too: bool) -> set[str]:
    """Return the package's own modules that a module imports, at any level of nesting."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = set() if typing_too else type_only(tree)
    out: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            out.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports are not used here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                out.add(inner if inner in MODULES else str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            out.update(arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))
    return {name for name in out if name in MODULES and name != module}


GRAPH = {name: imports(name, path, typing_too=False) for name, path in MODULES.items()}


def test_every_module_has_a_room() -> None:
    homeless = [name for name in MODULES if name.split(".")[1:2] and name.split(".")[1] not in ORDER]
    assert homeless == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_from_its_own_room_or_above(module: str) -> None:
    here, room = room_of(module)
    wrong = [
        f"{module} ({room}) imports {other} ({room_of(other)[1]})"
        for other in sorted(imports(module, MODULES[module], typing_too=True))
        if other != "autoprec" and room_of(other)[0] > here
    ]
    assert wrong == []


def sub_room(module: str) -> str:
    """Return the folder of a room that a module lies in; empty for the room's own files."""
    parts = module.split(".")
    return parts[2] if len(parts) > 3 or (MODULES[module].name == "__init__.py" and len(parts) == 3) else ""


ORDERED = sorted(
    name for name in MODULES if sub_room(name) in SUB_ROOMS.get(name.split(".")[1] if "." in name else "", ())
)


@pytest.mark.parametrize("module", ORDERED)
def test_a_sub_room_imports_none_that_comes_after_it(module: str) -> None:
    room = module.split(".")[1]
    order = SUB_ROOMS[room]
    later = set(order[order.index(sub_room(module)) + 1 :])
    wrong = [other for other in sorted(GRAPH[module]) if other.split(".")[1] == room and sub_room(other) in later]
    assert wrong == []


@cache
def loaded_with(module: str) -> set[str]:
    """Return what is loaded when a module is: itself, its packages, and its imports at module level, followed."""
    seen: set[str] = set()
    frontier = [module]
    while frontier:
        name = frontier.pop()
        if name in seen or name not in MODULES:
            continue
        seen.add(name)
        frontier += [name.rpartition(".")[0], *top_level_imports(name)]
    return seen


@cache
def top_level_imports(module: str) -> set[str]:
    """Return every module, of the package or not, that loading a module imports."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    out: set[str] = set()
    skipped = type_only(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            skipped.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            out.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            out.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return out


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name.startswith(TORCH_FREE)))
def test_the_driver_and_the_decisions_load_no_torch(module: str) -> None:
    guilty = [
        name for name in sorted(loaded_with(module)) if any(n.split(".")[0] == "torch" for n in top_level_imports(name))
    ]
    assert guilty == []


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name.startswith("autoprec.tuning.decide")))
def test_a_decision_starts_nothing_and_writes_nothing(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    imported = {
        name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in (a.name for a in node.names)
    }
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported & IMPURE_MODULES == set()
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {
        f.attr if isinstance(f, ast.Attribute) else f.id for f in calls if isinstance(f, (ast.Attribute, ast.Name))
    }
    assert called & IMPURE_CALLS == set()


def test_nothing_but_the_door_imports_the_package_itself() -> None:
    wrong = [name for name, others in GRAPH.items() if "autoprec" in others and room_of(name)[1] != "door"]
    assert wrong == []


def cycles() -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in GRAPH[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in GRAPH:
        if name not in index:
            visit(name)
    return found


def test_there_are_no_import_cycles() -> None:
    assert cycles() == []


#: Source files without a test file of their own, and why.
UNTESTED = {
    "__init__.py": "tests/test_public_api.py is its test",
    "__main__.py": "four lines that every test of the command line runs through",
    "_version.py": "one constant, which tests/test_public_api.py reads",
    "trial/inside/_inject/sitecustomize.py": "runs before anything can be imported; every real trial goes through it",
}


def its_tests(relative: Path) -> list[Path]:
    """Return where the test of a source file may lie; nothing for a package that only hands names on."""
    if relative.name != "__init__.py":
        return [ROOT / "tests" / relative.parent / f"test_{relative.stem}.py"]
    tree = ast.parse((PACKAGE / relative).read_text(encoding="utf-8"))
    if not any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in tree.body):
        return []
    name = f"test_{relative.parent.name}.py"
    return [ROOT / "tests" / relative.parent / name, ROOT / "tests" / relative.parent.parent / name]


@pytest.mark.parametrize("path", sorted(MODULES.values()), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_source_file_has_a_test_file_or_a_reason(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    places = its_tests(relative)
    found = not places or any(place.exists() for place in places)
    assert found != (str(relative) in UNTESTED), "write its test, or a reason in UNTESTED (and none where it has one)"


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=lambda path: path.name)
def test_a_folder_is_seen_at_a_glance(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= MAX_FILES_IN_A_FOLDER, "which two ideas live in this folder?"


def sources() -> list[Path]:
    out = []
    for folder in ("autoprec", "tests", "examples", "benchmarks"):
        out += sorted((ROOT / folder).rglob("*.py"))
    return out


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES, "split it: one idea per file"
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_says_what_it_is_in_one_sentence(module: str) -> None:
    docstring = ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8")))
    assert docstring, "the module has no docstring"
    first = docstring.split("\n\n")[0]
    assert first.rstrip().endswith((".", ":", "?")), f"no sentence: {first!r}"
    assert len(first.split()) > 2, f"it only repeats a name: {first!r}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_users_are_never_answered_with_assert_or_a_stub(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    if not module.startswith("autoprec.testing"):
        asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        narrowing = ("is not None", "isinstance(")  # tells the type checker what the code already guarantees
        wrong = [node.lineno for node in asserts if not any(text in ast.unparse(node.test) for text in narrowing)]
        assert wrong == [], "raise an error of autoprec.errors instead"
    raised = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    stubs = [node.lineno for node in raised if "NotImplementedError" in ast.unparse(node.exc)]
    assert stubs == []
