"""The house: rooms import only from their own room or rooms above, no import cycles, no long file or function."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

from benchmarks.house import MODULES, circles, trees, unexplained_figures, untested, written_twice

ROOT = Path(__file__).resolve().parent.parent

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
    "outlets": ("tracking", "reports", "export", "integrations"),
    "door": ("api", "cli", "__init__", "__main__"),
}
ORDER = {part: (index, room) for index, (room, parts) in enumerate(ROOMS.items()) for part in parts}
FOLDERS = ("autoprec", "tests", "examples", "benchmarks")
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
    "tuning": ("study", "decide", "libraries", "transfer", "workers", "timing", "phases"),
}


def room_of(module: str) -> tuple[int, str]:
    parts = module.split(".")
    return ORDER[parts[1] if len(parts) > 1 else "__init__"]


@cache
def nodes(module: str) -> list[ast.AST]:
    """Return the nodes of a module: each test looks at all of them."""
    return list(ast.walk(trees()[module]))


@cache
def type_only(module: str) -> set[ast.AST]:
    """Return the nodes under ``if TYPE_CHECKING``: they never run."""
    out: set[ast.AST] = set()
    for node in nodes(module):
        if isinstance(node, ast.If) and getattr(node.test, "id", getattr(node.test, "attr", "")) == "TYPE_CHECKING":
            for child in node.body:
                out.update(ast.walk(child))
    return out


@cache
def imports(module: str, *, typing_too: bool) -> set[str]:
    """Return the package's own modules that a module imports, at any level of nesting."""
    skipped = set() if typing_too else type_only(module)
    out: set[str] = set()
    for node in nodes(module):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            out.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports are not used here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                out.add(inner if inner in MODULES else str(node.module))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            out.update(arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))
    return {name for name in out if name in MODULES and name != module}


@cache
def graph() -> dict[str, set[str]]:
    """Return what each module imports when it runs."""
    return {name: imports(name, typing_too=False) for name in MODULES}


def test_every_module_has_a_room() -> None:
    homeless = [name for name in MODULES if name.split(".")[1:2] and name.split(".")[1] not in ORDER]
    assert homeless == []


def test_a_module_imports_only_from_its_own_room_or_above() -> None:
    wrong = [
        f"{module} ({room_of(module)[1]}) imports {other} ({room_of(other)[1]})"
        for module in MODULES
        for other in sorted(imports(module, typing_too=True))
        if other != "autoprec" and room_of(other)[0] > room_of(module)[0]
    ]
    assert wrong == []


def sub_room(module: str) -> str:
    """Return the folder of a room that a module lies in; empty for the room's own files."""
    parts = module.split(".")
    return parts[2] if len(parts) > 3 or (MODULES[module].name == "__init__.py" and len(parts) == 3) else ""


def test_a_sub_room_imports_none_that_comes_after_it() -> None:
    wrong = []
    for module in MODULES:
        room, own = module.split(".")[1] if "." in module else "", sub_room(module)
        order = SUB_ROOMS.get(room, ())
        later = order[order.index(own) + 1 :] if own in order else ()
        others = (other for other in sorted(graph()[module]) if other.split(".")[1:2] == [room])
        wrong += [f"{module} imports {other}" for other in others if sub_room(other) in later]
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
    out: set[str] = set()
    imported = [node for node in nodes(module) if isinstance(node, (ast.Import, ast.ImportFrom))]
    later = [n for n in nodes(module) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    skipped = type_only(module).union(*(ast.walk(node) for node in later))
    for node in imported:
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            out.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            out.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return out


def test_the_driver_and_the_decisions_load_no_torch() -> None:
    heavy = {name for name in MODULES if any(n.split(".")[0] == "torch" for n in top_level_imports(name))}
    free = [name for name in MODULES if name.startswith(TORCH_FREE)]
    guilty = {name: sorted(loaded_with(name) & heavy) for name in free}
    assert {name: through for name, through in guilty.items() if through} == {}


def test_a_decision_starts_nothing_and_writes_nothing() -> None:
    wrong = []
    for module in (name for name in MODULES if name.startswith("autoprec.tuning.decide")):
        imported = {alias.name for node in nodes(module) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in nodes(module) if isinstance(node, ast.ImportFrom)}
        functions = [node.func for node in nodes(module) if isinstance(node, ast.Call)]
        called = {getattr(f, "attr", getattr(f, "id", "")) for f in functions}
        wrong += [f"{module}: {name}" for name in imported & IMPURE_MODULES | called & IMPURE_CALLS]
    assert wrong == []


def test_nothing_but_the_door_imports_the_package_itself() -> None:
    wrong = [name for name, others in graph().items() if "autoprec" in others and room_of(name)[1] != "door"]
    assert wrong == []


def test_there_are_no_import_cycles() -> None:
    assert circles() == []


#: Source files without a test file of their own, and why.
UNTESTED = {
    "__init__.py": "tests/test_public_api.py is its test",
    "__main__.py": "a few lines that every test of the command line runs through",
    "_version.py": "one constant, which tests/test_public_api.py reads",
    "trial/inside/_inject/sitecustomize.py": "runs before anything can be imported; every real trial goes through it",
}


def test_every_source_file_has_a_test_file_or_a_reason() -> None:
    """A reason must go as soon as there is a test."""
    assert untested() == sorted(UNTESTED)


def test_every_figure_has_a_reason() -> None:
    assert unexplained_figures() == []


def test_a_constant_stands_in_one_place() -> None:
    assert written_twice() == []


def test_a_folder_is_seen_at_a_glance() -> None:
    counted = Counter(path.parent for path in MODULES.values())
    assert {folder: files for folder, files in counted.items() if files > MAX_FILES_IN_A_FOLDER} == {}


def test_files_and_functions_stay_readable() -> None:
    long = []
    parsed = {path: nodes(module) for module, path in MODULES.items()}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > MAX_FILE_LINES:
            long.append(f"{path.relative_to(ROOT)}: split it: one idea per file")
        long += [
            f"{path.relative_to(ROOT)}: {node.name}: {node.end_lineno - node.lineno + 1} lines"
            for node in parsed.get(path) or ast.walk(ast.parse(text))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.end_lineno is not None
            and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
        ]
    assert long == []


def test_a_module_says_what_it_is_in_one_sentence() -> None:
    wrong = []
    for module, tree in trees().items():
        first = (ast.get_docstring(tree) or "").split("\n\n")[0]
        # a head of one or two words only repeats a name
        if not first.rstrip().endswith((".", ":", "?")) or len(first.split()) <= 2:
            wrong.append(f"{module}: {first!r}")
    assert wrong == []


def test_users_are_never_answered_with_assert_or_a_stub() -> None:
    narrowing = ("is not None", "isinstance(")  # tells the type checker what the code already guarantees
    wrong = []
    for module in MODULES:
        for node in nodes(module):
            if isinstance(node, ast.Assert):
                if not any(text in ast.unparse(node.test) for text in narrowing):
                    wrong.append(f"{module}:{node.lineno}: raise an error of autoprec.errors instead")
            elif isinstance(node, ast.Raise) and node.exc and "NotImplementedError" in ast.unparse(node.exc):
                wrong.append(f"{module}:{node.lineno}: a stub")
    assert wrong == []


def test_tensors_that_are_made_name_their_dtype():
    """Scripts set another default dtype: of bfloat16 scales, tables and noise would lose 16 bits, without a word."""
    makers = {"zeros", "ones", "full", "empty", "tensor", "linspace", "logspace", "rand", "randn", "eye"}
    unnamed = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room in ("numerics", "optim", "backends", "applying")
        for path in sorted((ROOT / "autoprec" / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).removeprefix("torch.") in makers
        and ast.unparse(node.func).startswith("torch.")
        and all(keyword.arg != "dtype" for keyword in node.keywords)
    ]
    assert unnamed == []
