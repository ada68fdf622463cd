"""``autoprec demo``: a search from script to policy, report and MLflow, on whatever machine this is.

The shipped ``train_gpt.py`` is searched and timed here: GPUs gain from 16 and 8 bits, nearly every CPU from INT8. Where
the answer is to stay, the last line shows how to rehearse the same script for an H100, numerics emulated and times
modelled at the size of a model that such a GPU is used for.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import click

from autoprec.cli.echo import echo
from autoprec.support.optional import how_to_install, installed_version
from autoprec.tuning.options import SearchOptions

POLICY = "demo-policy.yaml"
#: 8 times as wide (3072), 4 times as deep (12 blocks), 32 times the tokens (16,384 per step): 1.4 B parameters, which
#: with their gradients, optimizer state and activations fit on one such GPU.
REHEARSAL = "--target h100 --cost-scale width=8,depth=4,tokens=32"
#: The same size on a GPU that holds it: 48 heads of 64, 32 sequences of 512 bytes. The script's own is too small there.
AS_REHEARSED = ("--width", "3072", "--depth", "12", "--heads", "48", "--batch", "32", "--context", "512")
#: Bytes of a GPU that holds it: one of 80 GB has a little less for programs.
_HOLDS_IT = 70 << 30


def example() -> Path:
    """Return the shipped training script, in an installed package or in a checkout; relative where that is shorter."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "examples" / "train_gpt.py"
    found = inside if inside.is_file() else package.parent / "examples" / "train_gpt.py"
    here = Path.cwd()
    return found.relative_to(here) if found.is_relative_to(here) else found


def program() -> str:
    """Return how this program is started again: by its name, or by its Python where the shell would not find it."""
    return "autoprec" if shutil.which("autoprec") else f"{shlex.quote(sys.executable)} -m autoprec"


def next_steps(command: tuple[str, ...], policy: str) -> str:
    """Return what to try after the demo; every line can be pasted."""
    name, file, train = program(), shlex.quote(policy), shlex.join(command)
    lacks = installed_version("mlflow") is None
    return "\n".join(
        [
            "next:",
            f"  {name} ui                                   the trials, in MLflow"
            + (f"; first: {how_to_install('mlflow')}" if lacks else ""),
            f"  {name} show {file}                what each layer runs, and why",
            f"  {name} check --policy {file} {train}     asked against executed, layer by layer",
            f"  {name} run --policy {file} {train} --steps 20     train under it",
            f"  {name} search your_train.py                 your own script",
        ]
    )


@click.command("demo", short_help="See the whole product on a small GPT, on any machine.")
def demo() -> int:
    """Search a policy for a small GPT on this machine.

    Takes about three minutes on a CPU; on a GPU it was never timed. Writes demo-policy.yaml and autoprec-runs/ into the
    current folder.
    """
    import torch

    from autoprec.cli.scripts.search import exit_code, perform, print_result

    script: tuple[str, ...] = (str(example()),)
    if torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory >= _HOLDS_IT:
        script += AS_REHEARSED
        echo(f"at the size of a model that such a GPU is used for: {' '.join(AS_REHEARSED)}", err=True)
    asked = SearchOptions(command=script, output=POLICY)
    engine, result, files = perform(asked)
    print_result(engine, result, files)
    if result.policy:  # a search that was cut short before it could say anything writes none
        echo(next_steps(asked.command, result.policy))
    if result.verdict == "stay":
        echo(f"  {program()} search {REHEARSAL} {shlex.join(script)}     a rehearsal for an H100, modelled")
    return exit_code(result)
