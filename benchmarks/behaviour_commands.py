"""The parts of behaviour.py that go through the command line: help, exit codes, schemas, JSON, losses, exported files.

A command runs in a fork of this process, where PyTorch is imported already; nothing else differs for it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS
from benchmarks.behaviour_parts import OPTIMIZER, document, raw

ROOT = Path(__file__).resolve().parent.parent
GPT = ROOT / "examples" / "train_gpt.py"
SMALL = ["--steps", "4", "--width", "64", "--depth", "2", "--heads", "2", "--batch", "4", "--context", "32"]
#: The model of the estimates: not so small that its GEMMs pay nowhere.
MIDDLE = ["--steps", "2", "--width", "128", "--depth", "2", "--heads", "2", "--batch", "8", "--context", "64"]
POLICIES = 40
LAYERS = tuple(f"transformer.h.{i}.{part}" for i in range(3) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc"))
LAYERS = (*LAYERS, "lm_head")


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    code: int
    out: str
    err: str


def autoprec(*words: str | Path, cwd: Path) -> Ran:
    """Run ``autoprec words`` in a folder."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _become(["autoprec", *map(str, words)], cwd, out.fileno(), err.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return Ran(code, *texts)


def _become(argv: list[str], cwd: Path, out: int, err: int) -> None:
    """In a child: be the console script, and end."""
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(cwd)
        sys.argv = argv
        from autoprec.__main__ import main

        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # never back into the dump


def commands(cwd: Path) -> list[str]:
    """Return the names under "Commands:" of ``autoprec --help``."""
    listed = autoprec("--help", cwd=cwd).out.partition("Commands:")[2].splitlines()[1:]
    return [
        line.split()[0] for line in listed if line.startswith("  ") and line[2:3].isalpha() and "  " in line.strip()
    ]


def help(cwd: Path) -> Iterator[tuple[str, str]]:
    """``--help`` of everything."""
    yield "autoprec", autoprec("--help", cwd=cwd).out
    for name in commands(cwd):
        yield name, autoprec(name, "--help", cwd=cwd).out


def shape(value: Any, path: str = "") -> set[str]:
    """Return the paths of every key of a JSON document; entries of a list are alike."""
    if isinstance(value, dict):
        return {path + "{}"} if not value else set().union(*(shape(v, f"{path}.{k}") for k, v in value.items()))
    if isinstance(value, list):
        return {path + "[]"} if not value else set().union(*(shape(v, f"{path}[]") for v in value))
    return {path}


def saved_step(cwd: Path) -> Path:
    """Record a step of examples/train_gpt.py; return the file."""
    path = cwd / "step.json"
    if not path.exists():
        ran = autoprec("inspect", "--json", GPT, *MIDDLE, cwd=cwd)
        if ran.code:
            raise RuntimeError(f"inspect --json: {ran.err[-500:]}")
        path.write_text(ran.out, encoding="utf-8")
    return path


def write_policy(cwd: Path, name: str, content: dict[str, Any]) -> Path:
    """Write a policy file."""
    path = cwd / name
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def keys(cwd: Path) -> Iterator[tuple[str, str]]:
    """The keys of everything that speaks JSON."""
    policy = write_policy(cwd, "p.yaml", document("fp8_rowwise", activations="bf16"))
    other = write_policy(cwd, "q.yaml", document("mxfp8", optimizer={"exp_avg": "bf16"}))
    step = saved_step(cwd)
    cases: dict[str, list[str | Path]] = {
        "show": ["show", policy],
        "validate": ["validate", policy],
        "diff": ["diff", policy, other],
        "targets": ["targets"],
        "targets b200": ["targets", "b200"],
        "doctor": ["doctor"],
        "inspect --graph": ["inspect", step],
        "sensitivity": ["sensitivity", "--space", "hopper-fp8", "--target", "h100", GPT, "--steps", "40", *SMALL[2:]],
        "check": ["check", "--policy", policy, "--steps", "2", "--backend", "emulated", GPT, *SMALL],
        "estimate --graph": ["estimate", "--target", "b200", step],
        "estimate --config": ["estimate", "--target", "b200", "llama3-70b"],
        "transfer": ["transfer", "--from", "llama3-8b", "--target", "b200", policy, "--", "llama3-70b"],
    }
    renamed: dict[str, list[str | Path]] = {
        "diff": ["show", policy, other],
        "targets": ["doctor", "--targets"],
        "targets b200": ["doctor", "--targets", "b200"],
        "sensitivity": ["inspect", "--sensitivity", *cases["sensitivity"][1:]],
    }
    for name, words in cases.items():
        ran = autoprec(words[0], "--json", *words[1:], cwd=cwd)
        if ran.code == 2 and name in renamed:
            ran = autoprec(renamed[name][0], "--json", *renamed[name][1:], cwd=cwd)
        yield f"{name} --json", _keys(ran)


def _keys(ran: Ran) -> str:
    try:
        found = "\n".join(sorted(shape(json.loads(ran.out))))
    except ValueError:
        found = f"no JSON: {ran.out[-300:]}{ran.err[-600:]}"
    return f"exit {ran.code}\n{found}\n"


def exits(cwd: Path) -> Iterator[tuple[str, str]]:
    """Exit codes of what goes well and what goes wrong."""
    write_policy(cwd, "good.yaml", document("fp8_rowwise", activations="bf16"))
    write_policy(cwd, "same.yaml", document("fp8_rowwise", activations="bf16"))
    write_policy(cwd, "other.yaml", document("bf16"))
    write_policy(cwd, "matches-nothing.yaml", document("keep", layers=[{"match": "nowhere.*", "recipe": "keep"}]))
    write_policy(cwd, "unknown.yaml", document("keep", default="nowhere"))
    (cwd / "broken.yaml").write_text("schema: autoprec.policy/1\n  default: [")
    (cwd / "fails.py").write_text("import sys\nsys.exit(7)\n")
    (cwd / "raises.py").write_text("raise ValueError('x')\n")
    (cwd / "layers.txt").write_text("\n".join(LAYERS))
    lines = """
        --help; --version; frobnicate; --frobnicate; show good.yaml; show missing.yaml; show broken.yaml
        show unknown.yaml; validate good.yaml; validate good.yaml broken.yaml; validate missing.yaml
        diff good.yaml same.yaml; diff good.yaml other.yaml; diff good.yaml missing.yaml
        export good.yaml --to python -o out; export good.yaml --to nowhere; export good.yaml --to megatron -o lossy
        export good.yaml --to torchao --layers layers.txt -o ao; export missing.yaml --to python
        import good.yaml; schema policy; schema nowhere; targets; targets b200; targets nowhere
        estimate --target nowhere llama3-70b; estimate --target b200 llama3-80b; estimate missing.py
        estimate --target b200 raises.py; estimate --target b200 --batch 0 llama3-70b; inspect missing.py
        inspect fails.py; run fails.py; run missing.py; run --policy missing.yaml fails.py
        run --policy matches-nothing.yaml --backend emulated raises.py; check --policy good.yaml raises.py
        search; search missing.py; search --target b200 --no-mlflow raises.py; search --trials 0 raises.py
        search --target nowhere raises.py; search --space nowhere raises.py; search --frobnicate raises.py
        search --sampler nowhere raises.py; search --budget soon raises.py; verify raises.py; ui --frobnicate
        transfer good.yaml -- nowhere.json; transfer missing.yaml -- llama3-70b
    """
    for line in (part.strip() for row in lines.splitlines() for part in row.split(";")):
        if line:
            ran = autoprec(*line.split(), cwd=cwd)
            unexpected = f"\n{ran.err}" if "Traceback" in ran.err and "raises.py" not in line else ""
            yield line, f"exit {ran.code}{unexpected}\n"


def schemas(cwd: Path) -> Iterator[tuple[str, str]]:
    """JSON Schemas of policies and search spaces, by the command that prints them in this version."""
    for name in ("policy", "space"):
        ran = autoprec("schema", name, cwd=cwd)
        if ran.code:
            ran = autoprec("show", "--schema", name, cwd=cwd)
        yield name, ran.out or ran.err


def estimates(cwd: Path) -> Iterator[tuple[str, str]]:
    """``estimate --json`` of one recorded step and of a preset model on every target; this CPU's rates are measured."""
    step = saved_step(cwd)
    listed = [line.split()[0] for line in autoprec("targets", cwd=cwd).out.splitlines()[1:-1]]
    if not listed:
        listed = [line.split()[0] for line in autoprec("doctor", "--targets", cwd=cwd).out.splitlines()[1:-1]]
    for target in (name for name in listed if name != "cpu"):
        words: dict[str, list[str | Path]] = {
            "step": [step],
            "step, scaled": ["--cost-scale", "width=16,depth=4,tokens=32", step],
            "llama3-70b": ["llama3-70b"],
        }
        for name, rest in words.items():
            ran = autoprec("estimate", "--target", target, "--json", *rest, cwd=cwd)
            yield f"{target}, {name}", f"exit {ran.code}\n{ran.out}{ran.err if ran.code else ''}"


def losses(cwd: Path) -> Iterator[tuple[str, str | bytes]]:
    """What examples/train_gpt.py prints and saves under ``autoprec run``, with every recipe and other settings."""
    made: dict[str, dict[str, Any] | None] = {"as written": None}
    made |= {name: document(name) for name in BUILTIN_RECIPES if "fp32" not in name}
    edges = [{"match": match, "recipe": "bf16"} for match in ("blocks.0.*", "head")]
    mixed = document("fp8_rowwise", layers=edges, activations="bf16")
    mixed["recipes"]["bf16"] = BUILTIN_RECIPES["bf16"].to_dict()
    made["fp8_rowwise, first and last bf16"] = mixed
    made["bf16 optimizer"] = document(
        "bf16", activations="bf16", optimizer={"exp_avg": "bf16", "weights": "bf16_stochastic"}
    )
    made["fp16, loss scaling"] = document("fp16", activations="fp16", loss_scaling="dynamic")
    made["attention"] = document("fp8_tensorwise", operators={"attention": "fp16"})
    made["phases"] = document("fp8_rowwise", phases=[{"from": 2, "default": "keep"}])
    for name, policy in made.items():
        weights = cwd / "gpt.pt"
        weights.unlink(missing_ok=True)
        asked = ["--policy", write_policy(cwd, "run.yaml", policy), "--backend", "emulated"] if policy else []
        ran = autoprec("run", *asked, GPT, *SMALL, "--out", weights, cwd=cwd)
        printed = "\n".join(" ".join(line.split()[:4]) for line in ran.out.splitlines() if line.startswith("step"))
        yield f"{name}, printed", f"exit {ran.code}\n{printed}\n{ran.err if ran.code else ''}"
        if weights.exists():
            yield f"{name}, weights", raw(torch.load(weights))


def random_policy(number: int) -> dict[str, Any]:
    """Return a policy by its number: recipes, rules with exceptions, and what surrounds the layers."""
    draw = random.Random(number)
    names = draw.sample(sorted(BUILTIN_RECIPES), 3)
    rules = []
    for match in draw.sample(["transformer.h.0.*", "*.attn.*", "*.mlp.*", "lm_head", "*c_proj", "nowhere.*"], 3):
        rule: dict[str, Any] = {"match": match, "recipe": draw.choice([*names, "keep"]), "optional": True}
        if draw.random() < 0.4:
            rule["gemms"] = {gemm: draw.choice([*names, "keep"]) for gemm in draw.sample(list(GEMMS), 1)}
        rules.append(rule)
    policy = document("keep", layers=rules, activations=draw.choice(["keep", "bf16", "fp16"]))
    policy |= {"recipes": {n: BUILTIN_RECIPES[n].to_dict() for n in names}, "default": draw.choice([*names, "keep"])}
    if number % 4 == 1:
        policy["operators"] = {"attention": draw.choice(["keep", "fp32", "bf16", "fp16"]), "norm": "keep"}
    if number % 4 == 2:
        policy |= {"communication": {"gradients": draw.choice(["bf16", "fp8"])}}
        policy["loss_scaling"] = "dynamic" if policy["activations"] == "fp16" else "none"
        policy["execution"] = draw.choice(["keep", "compile", "eager"])
    if number % 4 == 3:
        policy["optimizer"] = {key: draw.choice(values) for key, values in OPTIMIZER.items()}
    return policy


def exports(cwd: Path) -> Iterator[tuple[str, str]]:
    """Files and listed losses of 40 policies on every target; and what ``show`` and its JSON make of each policy."""
    (cwd / "layers.txt").write_text("\n".join(LAYERS))
    said = " ".join(autoprec("export", "--help", cwd=cwd).out.split())
    targets = said.partition("One of: ")[2].partition(".")[0].split(", ")
    for number in range(POLICIES):
        policy = write_policy(cwd, f"p{number}.yaml", random_policy(number))
        for words in (["show", policy], ["show", "--json", policy]):
            ran = autoprec(*words, cwd=cwd)
            yield f"policy {number}: {' '.join(map(str, words[:-1]))}", f"exit {ran.code}\n{ran.out}"
        for target in targets:
            folder = cwd / f"{number}-{target}"
            rest = ["--to", target, "--layers", "layers.txt", "--allow-lossy", "-o", folder]
            ran = autoprec("export", policy, *rest, cwd=cwd)
            text = io.StringIO()
            print(f"exit {ran.code}\n{ran.out}{ran.err}", file=text)
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                print(f"--- {file.relative_to(folder)}\n{file.read_text()}", file=text)
            yield f"policy {number}: {target}", text.getvalue()
