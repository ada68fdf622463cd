"""How easily the code can be entered: files, rooms, arrows, what nothing reaches, what has no test, private words.

    python benchmarks/house.py               # the table
    python benchmarks/house.py --list reached | untested | words | figures | twice | rooms | folders | arrows | circles

A definition is *reached* when something that runs can name it: starting from the commands, the public names, the
modules that are run by ``python -m``, and the module level of every module that is imported, names are followed
through the bodies of the definitions they may mean. Names are matched as text, so this errs on the side of "reached".
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoprec.backends import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autoprec"
#: Modules that somebody outside runs or imports: the documentation names each.
ENTRANCES = (
    "autoprec",
    "autoprec.__main__",
    "autoprec.cli",
    "autoprec.graph",
    "autoprec.trial.driver.execute",
    "autoprec.trial.inside._inject.sitecustomize",
    "autoprec.integrations.lightning",
    "autoprec.integrations.transformers",
    "autoprec.export.standalone",
    # imported by name when a backend is asked for
    *(f"autoprec.backends.{module}" for module, _ in BACKENDS.values()),
)
COMPARATIVE = "longer|more|less|fewer|slower|faster|better|worse|larger|smaller|higher|lower|different|further"
#: "is no" for "is not a"; "there is no", "is no longer" and comparatives are good English.
PRIVATE_WORDS = re.compile(rf"(?<!there )\b(?:is|are|was|were) no\b(?! (?:{COMPARATIVE})\b)")
#: figure -> (what the first house had, the goal)
GOALS: dict[str, tuple[int, int | None]] = {
    "files lying loose in autoprec/": (22, 5),
    "files in the largest folder": (47, 14),
    "arrows between rooms": (156, 105),
    "lines of autoprec/": (37823, None),
    "lines of code in autoprec/": (0, None),
    "import circles, benchmarks included": (3, 0),
    "definitions and modules that nothing reaches": (60, 0),
    "source files without a test of their own": (64, 15),
    "`is no / are no / was no`": (78, 0),
    "figures without a reason": (72, 0),
    "constants that two modules write down": (10, 0),
}


def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("autoprec", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every module."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports(name: str) -> set[str]:
    """Return the package's own modules that a module imports, at any level of nesting."""
    out: set[str] = set()
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.Import):
            out.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                out.add(inner if inner in MODULES else node.module)
    return {other for other in out if other in MODULES and other != name}


def room(name: str) -> str:
    """Return the room of a module: its folder in the package, or itself where it lies loose."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def arrows() -> Counter[tuple[str, str]]:
    """Return how many imports lead from one room to another."""
    pairs = ((room(name), room(other)) for name in MODULES for other in imports(name))
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def folders() -> Counter[str]:
    """Return the number of Python files in each folder of the package."""
    return Counter(str(path.parent.relative_to(ROOT)) for path in MODULES.values())


@dataclass
class Definition:
    """A function, method or class: where it stands, and every name its own text (less its members) mentions."""

    where: str
    name: str
    owner: str
    names: set[str] = field(default_factory=set)
    implicit: bool = False


def words_of(node: ast.AST) -> set[str]:
    """Return the identifiers of a piece of code, and the words of its short strings (names looked up by text)."""
    out: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            out.add(inner.id)
        elif isinstance(inner, ast.Attribute):
            out.add(inner.attr)
        elif isinstance(inner, ast.alias):
            out.update(inner.name.split("."))
        elif isinstance(inner, ast.keyword) and inner.arg:
            out.add(inner.arg)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str) and len(inner.value) < 100:
            out.update(re.findall(r"[A-Za-z_]\w*", inner.value))
    return out


def is_export_list(node: ast.AST) -> bool:
    """Say whether a statement is ``__all__ = [...]``: being listed is not being used."""
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)


def definitions(name: str) -> tuple[list[Definition], set[str]]:
    """Return the definitions of a module, and the names that its module level mentions."""
    found: list[Definition] = []
    level: set[str] = set()

    def visit(node: ast.AST, owner: str) -> set[str]:
        used: set[str] = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                here = Definition(f"{name}:{child.lineno}", child.name, owner)
                decorators = (
                    set().union(*(words_of(d) for d in child.decorator_list)) if child.decorator_list else set()
                )
                if isinstance(child, ast.ClassDef):
                    heads = (
                        set().union(*(words_of(b) for b in [*child.bases, *child.keywords])) if child.bases else set()
                    )
                    here.names = heads | decorators | visit(child, child.name)
                else:
                    here.names = words_of(child) | decorators
                    # a method of a framework's class is called by the framework; a decorated function by its decorator
                    framework = {"command", "overload", "field_validator", "model_validator"}
                    framework |= {"custom_op", "register_fake"}
                    here.implicit = child.name.startswith(("__", "_repr_")) or bool(decorators & framework)
                    # a training framework calls the methods of its plugin
                    here.implicit |= name.startswith("autoprec.integrations.")
                found.append(here)
            elif not is_export_list(child):
                used |= words_of(child)
        return used

    level = visit(trees()[name], "")
    return found, level


def foreign_bases() -> dict[str, bool]:
    """Return for each class whether a base is not of the package: its overrides are called from elsewhere."""
    bases: dict[str, set[str]] = {}
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = set().union(
                    *({ast.unparse(b).split("[")[0].split(".")[-1]} for b in node.bases), set()
                )
    plain = {"Protocol", "Generic", "object", "NamedTuple", "ABC", "Exception"}

    def foreign(name: str, seen: frozenset[str] = frozenset()) -> bool:
        return any(
            (base not in bases and base not in plain)
            or (base in bases and base not in seen and foreign(base, seen | {name}))
            for base in bases[name]
        )

    return {name: foreign(name) for name in bases}


def unreached() -> list[str]:
    """Return the definitions and modules that no command, public name or other module reaches."""
    per_module = {name: definitions(name) for name in MODULES}
    foreign = foreign_bases()
    imported: set[str] = set()
    frontier = [name for name in ENTRANCES if name in MODULES]
    text = "\n".join(path.read_text(encoding="utf-8") for path in MODULES.values())
    lazily = {name for name in MODULES if f'"{name}"' in text}
    lazily |= {name for name in MODULES if name.startswith(("autoprec.cli.", "autoprec.export.stacks."))}
    frontier += sorted(lazily)
    while frontier:
        name = frontier.pop()
        if name in imported:
            continue
        imported.add(name)
        frontier += sorted(imports(name))
        frontier.append(name.rpartition(".")[0]) if name.rpartition(".")[0] in MODULES else None
    reached: set[int] = set()
    names: set[str] = set(ENTRANCES)
    for name in imported:
        names |= per_module[name][1]
    names |= set(re.findall(r"\w+", " ".join(public_names())))
    every = [d for name in imported for d in per_module[name][0]]
    changed = True
    while changed:
        changed = False
        classes = {d.name for d in every if id(d) in reached}
        for d in every:
            if id(d) in reached:
                continue
            called_by_framework = d.owner in classes and (d.implicit or foreign.get(d.owner, False))
            if (
                called_by_framework
                or (d.name in names and (not d.owner or d.owner in classes))
                or (d.implicit and not d.owner)
            ):
                reached.add(id(d))
                names |= d.names - {d.name} if d.name not in names else d.names
                changed = True
    out = [f"{name} (module)" for name in MODULES if name not in imported]
    out += [f"{d.where} {d.owner + '.' if d.owner else ''}{d.name}" for d in every if id(d) not in reached]
    return sorted(out)


def public_names() -> list[str]:
    """Return the names that documentation shows to users, with those of the conformance suites."""
    out: list[str] = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
        out += code
    out += [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").rglob("*.py"))]
    return out


def its_tests(path: Path) -> list[Path]:
    """Return where the test of a source file may lie; nothing for a package that only hands names on."""
    place = ROOT / "tests" / path.relative_to(PACKAGE).parent
    if path.name != "__init__.py":
        return [place / f"test_{path.stem}.py"]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in tree.body):
        return []
    return [folder / f"test_{path.parent.name}.py" for folder in (place, place.parent)]


def untested() -> list[str]:
    """Return the source files that have no test file at the same place of ``tests/``."""
    wanted = {path: its_tests(path) for path in MODULES.values()}
    return [str(p.relative_to(PACKAGE)) for p, tests in wanted.items() if tests and not any(t.exists() for t in tests)]


_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")


def constants(text: str) -> Iterator[tuple[ast.Assign | ast.AnnAssign, dict[str, ast.expr]]]:
    """Yield each assignment of a module's text that makes constants, with their names and values."""
    for node in ast.parse(text).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        found: dict[str, ast.expr] = {}
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            for one, value in zip(target.elts, node.value.elts, strict=True) if several else [(target, node.value)]:
                names = [name.id for name in ast.walk(one) if isinstance(name, ast.Name)]
                found |= {name: value for name in names if _CONSTANT.fullmatch(name)}
        if found:
            yield node, found


def unexplained(text: str) -> list[str]:
    """Return the constants of a module that hold a figure, beside 0 and 1, and have no comment above or beside them."""
    lines, out = text.splitlines(), []
    for node, found in constants(text):
        looked_up = {id(n) for one in ast.walk(node) if isinstance(one, ast.Subscript) for n in ast.walk(one.slice)}
        figures = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and id(n) not in looked_up)
        if not any(type(figure) in (int, float) and figure not in (0, 1) for figure in figures):
            continue
        above = "".join(lines[: node.lineno - 1][-1:])
        if not above.startswith("#") and not any("#" in line for line in lines[node.lineno - 1 : node.end_lineno]):
            out.append(f"{node.lineno}: {', '.join(found)}")
    return out


def unexplained_figures() -> list[str]:
    """Return every constant of the package whose figure nobody says a reason for."""
    return [f"{p.relative_to(ROOT)}:{row}" for p in MODULES.values() for row in unexplained(p.read_text("utf-8"))]


def written_twice() -> list[str]:
    """Return constants that two modules both write down: one name, and one value of figures, words or types."""
    places: dict[tuple[str, str], list[str]] = {}
    for path in (path for path in MODULES.values() if path.name != "standalone.py"):  # which is handed out, alone
        for node, found in constants(path.read_text(encoding="utf-8")):
            for name, value in found.items():
                if not any(isinstance(one, (ast.Call, ast.Subscript)) for one in ast.walk(value)):
                    key = name.strip("_"), ast.unparse(value)
                    places.setdefault(key, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return [f"{name} = {value}: {', '.join(where)}" for (name, value), where in places.items() if len(where) > 1]


def private_words() -> list[str]:
    """Return every place of code, docs and messages that says "is no" for "is not a"."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.yaml"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    out = []
    for name in listed.stdout.split():
        path = ROOT / name
        if not path.exists() or name.startswith("benchmarks/results") or path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if PRIVATE_WORDS.search(line):
                out.append(f"{name}:{number}: {line.strip()[:110]}")
    return out


@dataclass
class Size:
    """Lines of a room, and those of them that hold code (no docstring, comment or blank)."""

    lines: int = 0
    code: int = 0


_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Return how many lines of a module hold code."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node):
                held.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(held)


@functools.cache
def sizes() -> dict[str, Size]:
    """Return the size of every row of the table of rooms in docs/concepts.md; loose files belong to the first."""
    found: dict[str, Size] = {}
    rooms: dict[str, str] = {}
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    for line in page.split("## The rooms of the code")[1].split("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and "`" in cells[1]:
            found[cells[0]] = Size()
            rooms |= dict.fromkeys(re.findall(r"`(\w+)/`", cells[1]), cells[0])
    loose = next(iter(found))
    for name, path in MODULES.items():
        content, size = path.read_text(encoding="utf-8"), found[rooms.get(room(name), loose)]
        size.lines += content.count("\n")
        size.code += code_lines(content)
    return found


def circles() -> list[list[str]]:
    """Return the circles of imports among the package's modules and the benchmarks, without what only types need."""
    modules_ = dict(MODULES)
    for path in (ROOT / "benchmarks").rglob("*.py"):
        modules_[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    graph: dict[str, set[str]] = {}
    for name, path in modules_.items():
        graph[name] = set()
        for node in running(trees().get(name) or ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= (inner & set(modules_)) or {node.module}
        graph[name] = graph[name] & set(modules_) - {name}
    return connected(graph)


def running(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes of a tree that are not under ``if TYPE_CHECKING``."""
    out: list[ast.AST] = [tree]
    for node in out:
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        out += node.orelse if isinstance(node, ast.If) and typing_only else list(ast.iter_child_nodes(node))
    return out


def connected(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
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

    for name in graph:
        if name not in index:
            visit(name)
    return found


def figures() -> dict[str, int]:
    """Return every figure that is counted from the files."""
    per_folder = folders()
    return {
        "files lying loose in autoprec/": per_folder["autoprec"],
        "files in the largest folder": max(count for folder, count in per_folder.items() if folder != "autoprec"),
        "arrows between rooms": len(arrows()),
        "lines of autoprec/": sum(size.lines for size in sizes().values()),
        "lines of code in autoprec/": sum(size.code for size in sizes().values()),
        "import circles, benchmarks included": len(circles()),
        "definitions and modules that nothing reaches": len(unreached()),
        "source files without a test of their own": len(untested()),
        "`is no / are no / was no`": len(private_words()),
        "figures without a reason": len(unexplained_figures()),
        "constants that two modules write down": len(written_twice()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    lists: dict[str, Callable[[], Iterable[str]]] = {"reached": unreached, "untested": untested, "words": private_words}
    lists |= {"figures": unexplained_figures, "twice": written_twice}
    lists["circles"] = lambda: (" <-> ".join(circle) for circle in circles())
    lists["rooms"] = lambda: (f"{size.lines:7,} {size.code:7,}  {name}" for name, size in sizes().items())
    for name, counted in (("folders", folders), ("arrows", arrows)):
        lists[name] = lambda counted=counted: (f"{count:5d}  {key}" for key, count in counted().most_common())
    parser.add_argument("--list", choices=lists)
    asked = parser.parse_args()
    if asked.list:
        print(*lists[asked.list](), sep="\n")
        return
    print("| what | first house | now | goal |\n|---|---|---|---|")
    for what, now in figures().items():
        before, goal = GOALS[what]
        print(f"| {what} | {before} | {now} | {'told' if goal is None else f'<= {goal}'} |")


if __name__ == "__main__":
    main()
