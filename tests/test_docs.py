"""The documentation is true: every command parses, every file and snippet works, every link leads somewhere."""

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import click
import pytest

import autoprec as package
from autoprec.cli import COMMANDS, cli
from autoprec.cli.script import TakesScript
from autoprec.errors import MissingDependencyError
from autoprec.policy import Policy, parse_policy
from autoprec.policy.space import space_from_dict
from autoprec.precision.hardware import load_targets
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.files import parse_document
from autoprec.trial.protocol import FAILURES
from tests.documents import PAGES, ROOT, Snippet, commands, reference, snippets
from tests.test_architecture import ROOMS

OURS = [(where, words[1:]) for where, words in commands() if words[0] == "autoprec"]


@pytest.mark.parametrize(("where", "words"), OURS, ids=[f"{where} {words[0]}" for where, words in OURS])
def test_every_documented_command_line_is_one_that_autoprec_accepts(where: str, words: list[str]) -> None:
    assert words[0] in COMMANDS, where
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    context = command.make_context(words[0], words[1:], parent=click.Context(cli, **cli.context_settings))
    if isinstance(command, TakesScript):
        assert context.params["script"], f"{where}: no script"


def test_other_documented_commands_are_make_targets_and_git() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for where, words in commands():
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile, where
        else:
            assert words[0] in ("autoprec", "git", "cd", "pip", "python"), where


def test_the_command_page_is_current() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == reference(), "run: make docs"


@pytest.mark.parametrize("snippet", snippets("yaml"), ids=str)
def test_every_documented_file_is_valid(snippet: Snippet, tmp_path: Path) -> None:
    if "autoprec.space/1" in snippet.text:
        space_from_dict(parse_document(snippet.text), where=str(snippet))
    elif "autoprec.targets/1" in snippet.text:
        (tmp_path / "t.yaml").write_text(snippet.text, encoding="utf-8")
        assert load_targets(tmp_path / "t.yaml")
    elif not re.match(
        r"(on|repos):", snippet.text
    ):  # else a whole policy, or some of its keys; not another tool's file
        whole = "" if "autoprec.policy/1" in snippet.text else "schema: autoprec.policy/1\n"
        parse_policy(whole + snippet.text, where=str(snippet))


@pytest.mark.parametrize("snippet", snippets("python"), ids=str)
def test_every_documented_python_snippet_runs(
    snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch import nn

    monkeypatch.chdir(tmp_path)
    Path("policy.yaml").write_text("schema: autoprec.policy/1\nrecipes: {bf16: {format: bf16}}\ndefault: bf16\n")
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    policy = package.load("policy.yaml")
    if "audit" in snippet.text:
        policy.apply(model)
        model(torch.randn(4, 16)).sum().backward()
    searched: list[Any] = []

    def search(*args: Any, **options: Any) -> Any:
        searched.append((args, options))
        raise package.AutoPrecError("not here")

    monkeypatch.setattr(package, "search", search, raising=False)
    batches = [torch.randn(4, 16) for _ in range(3)]
    names: dict[str, Any] = {"autoprec": package, "model": model, "optimizer": optimizer, "policy": policy}
    names |= {"batches": batches, "data": batches, "loss_function": lambda net, batch: net(batch).square().mean()}
    try:
        exec(compile(snippet.text, str(snippet), "exec"), names)
    except SystemExit:
        assert searched
    except (ModuleNotFoundError, MissingDependencyError) as error:
        pytest.skip(f"shows a package that is not installed: {error}")


def test_links_inside_the_documentation_lead_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name} -> {target}"


def test_links_to_a_heading_lead_to_one() -> None:
    for path in PAGES:
        for page, anchor in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", path.read_text(encoding="utf-8")):
            text = (path.parent / page if page else path).read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{path.name} -> {page}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_source_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:autoprec|tests|benchmarks|examples|search_spaces)/[\w./-]*)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_architecture_page_has_fifteen_steps_each_with_a_file_to_open() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8").split("## Architecture")[1]
    steps = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    assert len(steps) == 15
    assert all("`autoprec/" in step for step in steps)


def test_the_map_of_rooms_is_the_one_that_the_code_is_held_to() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    text = page.split("## The rooms of the code")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ") and "folder" not in line]
    folders = re.findall(r"`(\w+)/`", "\n".join(rows))
    parts = [part for parts in ROOMS.values() for part in parts if (ROOT / "autoprec" / part).is_dir()]
    assert folders == parts
    picture = (ROOT / "docs" / "images" / "rooms.svg").read_text(encoding="utf-8")
    assert re.findall(r'font-weight="600"[^>]*>([\w ]+)<', picture) == [
        *("support", "precision", "policy", "numerics", "optim", "backends", "applying", "graph", "cost", "trial"),
        *("tuning", "tracking  report  export  integrations", "cli"),
    ]


#: What trials are tagged with in MLflow: names with a dot that nobody imports.
TAGS = {"autoprec.kind", "autoprec.number", "autoprec.status", "autoprec.modelled"}


def documented_names() -> list[str]:
    """Return every dotted name under ``autoprec`` that a page mentions, in prose or in a snippet."""
    found: set[str] = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found |= set(re.findall(r"(?<![\w./-])autoprec(?:\.[A-Za-z_]\w*)+(?![\w/])", text))
        for module, names in re.findall(r"from (autoprec[\w.]*) import \(?([\w, ]+)", text):
            found |= {f"{module}.{name.strip()}" for name in names.split(",") if name.strip()}
    return sorted(found - TAGS)


@pytest.mark.parametrize("name", documented_names())
def test_every_documented_name_can_be_imported(name: str) -> None:
    """Modules of optional packages are looked for, not imported."""
    value: Any = package
    parts = name.split(".")
    for index, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            module = ".".join(parts[:index])
            assert importlib.util.find_spec(module) is not None, f"{name}: {module} does not exist"
            try:
                value = importlib.import_module(module)
            except package.AutoPrecError as error:
                pytest.skip(f"needs a package that is not installed: {error.what}")
        else:
            value = getattr(value, part)


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("nav:")[1].split("theme:")[0]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r"([\w-]+\.md)$", text, re.MULTILINE)) == pages


def test_every_page_is_reachable_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "index.md" or f"({path.name})" in index, f"{path.name} is not in docs/index.md"


def test_every_key_of_a_policy_is_documented() -> None:
    page = (ROOT / "docs" / "policy-format.md").read_text(encoding="utf-8")

    def keys(schema: dict[str, Any]) -> set[str]:
        out = set(schema.get("properties", {}))
        for inner in schema.get("$defs", {}).values():
            out |= keys(inner)
        return out

    missing = {key for key in keys(Policy.model_json_schema(by_alias=True)) if key not in page}
    assert missing == set()


def test_every_recipe_is_in_the_table_of_recipes() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").split("## Recipes")[1]
    assert [name for name in (*BUILTIN_RECIPES, "keep") if f"`{name}`" not in page] == []


def test_every_value_of_a_policy_is_documented() -> None:
    page = (ROOT / "docs" / "policy-format.md").read_text(encoding="utf-8")
    values = set(re.findall(r"'enum': \[(.*?)\]", str(Policy.model_json_schema())))
    missing = {word for group in values for word in re.findall(r"'(\w+)'", group) if f"`{word}`" not in page}
    assert missing == set()


def test_every_way_a_trial_can_fail_is_documented() -> None:
    page = (ROOT / "docs" / "trials.md").read_text(encoding="utf-8")
    for status in ("ok", "pruned", *FAILURES):
        assert f"| `{status}` |" in page


def test_every_variable_that_is_read_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    read = set()
    for path in (ROOT / "autoprec").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        read |= set(re.findall(r"""(?:environ\.get\(|environ\[|getenv\(|envvar=)["']([A-Z][A-Z0-9_]+)["']""", text))
    private = {name for name in read if name.startswith("AUTOPREC_") and name != "AUTOPREC_DEBUG"}
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # torchrun's
    missing = {name for name in read - private - launcher if f"`{name}`" not in page}
    assert missing == set()


def test_every_variable_that_a_trial_sets_is_documented(tmp_path: Path) -> None:
    from autoprec.trial.environment import run_environment, trial_environment

    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    trial = trial_environment(tmp_path / "c.json", "mark", tmp_path, threads=1, base={})
    shown = {name for name in trial if name != "PYTHONPATH" and not name.startswith("AUTOPREC_")}
    assert {name for name in shown if f"`{name}`" not in page} == set()
    assert not (shown & set(run_environment(tmp_path / "c.json", base={})))


def test_everything_a_guard_knows_is_documented() -> None:
    from autoprec.applying.guard import FALLBACKS
    from autoprec.policy import GUARD_METRICS as METRICS

    page = (ROOT / "docs" / "policy-format.md").read_text(encoding="utf-8")
    assert {name for name in (*FALLBACKS, *METRICS) if f"`{name}`" not in page} == set()
