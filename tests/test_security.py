"""Policies, spaces and studies are data, wherever they go: exported code, pages, terminals, stores, sockets."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoprec.cli import cli
from autoprec.export import EXPORTERS, Request, exporter
from autoprec.policy import Policy, dump_yaml, parse_policy
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.reports.html import write_html
from autoprec.support.text import visible
from autoprec.tuning.study.run import Run
from tests.cli.helpers import autoprec
from tests.tracking.conftest import make_records, make_result

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autoprec"
#: Texts that would run, close a string, end a comment, or leave a quoted context, if they were pasted unquoted.
HOSTILE = [
    "x\nPWNED()", "x\rPWNED()", "x\u2028PWNED()", "x\x85PWNED()", "x\x0cPWNED()", '"); PWNED(); ("', "'); PWNED(); ('",
    '"""\nPWNED()\n"""', "'''\nPWNED()", "\\\nPWNED()", "{PWNED()}", "@RULES@", "#\nPWNED()", "$(PWNED)", "`PWNED`",
    "x\n- PWNED: 1", "x: {PWNED: 1}", "</script><script>PWNED()</script>", "😀",
]  # fmt: skip


def policy(text: str) -> Policy:
    """Return a policy with a hostile text wherever a policy may hold any text."""
    recipes = {f"r{text}": BUILTIN_RECIPES["fp8_rowwise"], f"d{text}": BUILTIN_RECIPES["fp8_delayed"]}
    return Policy.model_validate(
        {
            "recipes": recipes,
            "layers": [
                {"match": f"*{text}", "recipe": f"r{text}", "optional": True},
                {"match": "a", "recipe": f"d{text}", "gemms": {"wgrad": "keep"}, "optional": True},
            ],
            "default": f"d{text}",
            "activations": "bf16",
            "model": {"class": text, "parameters": 1, "fingerprint": text},
            "evidence": {"target": text, "reason": text, text: [text]},
            "guard": {"metrics": [text], "fallback": [text], "thresholds": {text: 1.0}},
        }
    )


def words_of(value: Any) -> Iterator[str]:
    """Yield every text of a document that does not hold the hostile text as a whole, keys included."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from words_of(key)
            yield from words_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from words_of(item)
    elif isinstance(value, str) and not any(text in value for text in HOSTILE):
        yield value


def names_in(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("text", HOSTILE, ids=repr)
@pytest.mark.parametrize("target", EXPORTERS)
def test_an_exported_file_holds_no_code_of_the_policy(target: str, text: str) -> None:
    done = exporter(target).export(Request(policy(text), ("a", f"b{text}"), f"policy{text}.yaml"))
    for name, content in done.files.items():
        if name.endswith(".py"):
            assert "PWNED" not in names_in(content), name
        elif name.endswith((".yaml", ".yml")):
            assert not [word for word in words_of(yaml.safe_load(content)) if re.match(r"[\W\d]*PWNED", word)], name


def test_names_of_any_alphabet_match_in_exported_code() -> None:
    source = exporter("torchao").export(Request(policy("😀"), ("b😀",))).files["precision_torchao.py"]
    rules = next(
        node for node in ast.parse(source).body if isinstance(node, ast.Assign) and node.targets[0].id == "RULES"
    )  # type: ignore[attr-defined]
    assert re.fullmatch(ast.literal_eval(rules.value)[0][0], "b😀")


@pytest.mark.parametrize("text", HOSTILE, ids=repr)
def test_a_saved_policy_says_what_it_said(text: str) -> None:
    assert parse_policy(dump_yaml(policy(text).to_dict())) == policy(text)


def test_a_page_runs_nothing_that_a_name_says(tmp_path: Path) -> None:
    bad = "<script>PWNED()</script><img src=x onerror=PWNED()>"
    records = [
        *make_records(),
        Run(9, "search", bad, {f"layer:{bad}": bad}, {}, "crashed", reason=bad, tail=bad),
    ]
    result = make_result(records)
    page = write_html(tmp_path / "r.html", result, records).read_text()
    assert "PWNED" in page, "the name is shown"
    assert "<script" not in page
    assert "<img" not in page


#: Escapes that a terminal obeys, and a name that reads as another.
ACTING = [
    "\x1b[2J\x1b[H]",
    "\x1b]0;x\x07",
    "\x9b31m",
    "\x1b]8;;http://evil\x1b\\\\x",
    "a\u202egnp",
    "\r\x08",
    "[red]x[/red][link=x]",
]


@pytest.mark.parametrize("text", ACTING, ids=ascii)
def test_a_policy_says_nothing_to_a_terminal(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(dump_yaml(policy(text).to_dict()))
    (tmp_path / "b.yaml").write_text(dump_yaml(policy("plain").to_dict()))
    (tmp_path / "bad.yaml").write_text(json.dumps({"schema": "autoprec.policy/1", text: text, "layers": [{text: 1}]}))
    printed = ""
    for words in (
        ["show", "a.yaml"],
        ["show", "a.yaml", "b.yaml"],
        ["show", "bad.yaml"],
        ["lint", "bad.yaml"],
    ):
        with pytest.raises(SystemExit):
            cli.main(words)
        printed += "".join(capfd.readouterr())
    assert "plain" in printed
    assert printed == visible(printed)
    assert "[red]" not in text or "[red]x[/red]" in printed


def test_nothing_is_unpickled_evaluated_or_run_by_a_shell() -> None:
    forbidden = {
        "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib",
    }  # fmt: skip
    calls = {"eval", "exec", "os.system", "os.popen", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        where = str(path.relative_to(ROOT))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                found = forbidden & {m.partition(".")[0] for m in modules}
                # writes a user's own function for a new process; reading one is left to that script
                assert not found or (where == "autoprec/trial/function_script.py" and found == {"cloudpickle"}), where
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert "loads" not in called or not called.startswith(("pickle", "cloudpickle")), where
                assert called not in calls, f"{where}: {called}"
                assert not any(k.arg == "shell" and ast.unparse(k.value) == "True" for k in node.keywords), where


def test_servers_listen_on_the_loopback_or_on_a_private_socket() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "0.0.0.0" not in text, path.name
        for family in re.findall(r"socket\.socket\(([^)]*)\)", text):
            looked_at = family.startswith("fileno=")  # a descriptor that is open already
            assert looked_at or "AF_UNIX" in family or path.name == "server.py", path.name
    text = (PACKAGE / "tracking" / "page.py").read_text(encoding="utf-8")
    assert text.count('"--host", "127.0.0.1"') == text.count('host="127.0.0.1"') == 1


def test_the_folder_of_sockets_is_for_its_owner_alone() -> None:
    from autoprec.trial.processes import private_folder

    folder, lock = private_folder()
    try:
        assert folder.stat().st_mode & 0o077 == 0
    finally:
        shutil.rmtree(folder)
        os.close(lock)


@pytest.mark.parametrize("name", ["../evil", "a/b", "/etc/x", "..", ".", "a\x00b"])
def test_a_study_name_leads_nowhere_else(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    ended = autoprec("search", "--study", name, "train.py")
    assert ended.code == 2, ended.err
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]
