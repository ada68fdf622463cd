"""Collects ``loss_curves.json``: the losses of real scripts, as written and with optimizers that do nothing.

    python -m tests.tuning.decide.loss_curves --from CLONES --work DIR [--only makemore,pygcn] [--out FILE]

Scripts are those of ``benchmarks/scripts/scripts.yaml`` (CLONES as there), of its ``by_hand`` and of ``examples``. Each
runs twice with every generator seeded, until its first optimizer has taken 24 steps; a loss is the sum of what was
differentiated since its step before. The script as written is kept where it moves: where the mean of its last third
lies two standard deviations of the frozen run's losses, and 1 %, off theirs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path

from benchmarks.scripts.scripts import Script, Trial, manifest

STEPS, FEWEST, LIMIT_S = 24, 20, 240.0
MODELS = ("conv", "tab", "lstm", "unet", "moe", "dlrm", "seq2seq", "gpt6", "vit", "convnext", "mixer", "bert", "gpt2")
HOOKS = """
import atexit, json, os, random, sys, types
LOSSES, PENDING, FIRST = [], [], []

def write():
    if LOSSES:
        with open(os.path.join(os.environ["CURVES"], f"{os.getpid()}.json"), "w") as file:
            json.dump(LOSSES, file)

def end():
    write()
    sys.stdout.flush()
    os._exit(0)

def stepped(optimizer):
    if not FIRST:
        FIRST.append(optimizer)
    if FIRST[0] is optimizer and PENDING:
        LOSSES.append(sum(PENDING))
        PENDING.clear()
        if len(LOSSES) >= STEPS:
            end()

def install():
    import numpy, torch
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    for name, first in (("backward", "tensors"), ("grad", "outputs")):
        def hooked(*args, _plain=getattr(torch.autograd, name), _first=first, **kwargs):
            given = args[0] if args else kwargs[_first]
            for one in [given] if isinstance(given, torch.Tensor) else given:
                PENDING.append(float(one.detach().double().sum()))
            if not FIRST and len(PENDING) > 20 * STEPS:  # it has no optimizer
                end()
            return _plain(*args, **kwargs)
        setattr(torch.autograd, name, hooked)
    if os.environ["FROZEN"]:
        plain = Optimizer.__init__
        def step(self, closure=None, **_):
            found = closure() if closure is not None else None
            stepped(self)
            return found
        def init(self, *args, **kwargs):
            plain(self, *args, **kwargs)
            self.step = types.MethodType(step, self)
        Optimizer.__init__ = init
    else:
        register_optimizer_step_post_hook(lambda optimizer, *_: stepped(optimizer))
    atexit.register(write)

if os.environ.get("CURVES"):
    install()
"""


def losses(script: Script, clones: Path, work: Path, *, frozen: bool) -> list[float]:
    """Return the losses of one run, four digits each; those of the process that took most steps."""
    trial = Trial(script, clones, work)
    tree, hooks = trial.copy("bare"), work / "scratch" / script.name / "hooks"
    shutil.rmtree(hooks, ignore_errors=True)
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(f"STEPS = {STEPS}\n{HOOKS}", encoding="utf-8")
    more = {"PYTHONPATH": str(hooks), "CURVES": str(hooks), "FROZEN": "1" if frozen else "", "PYTHONHASHSEED": "0"}
    trial.command(script.words if script.launcher else [sys.executable, *script.words], tree, LIMIT_S, more)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in hooks.glob("*.json")]
    shutil.rmtree(tree)
    return [float(f"{loss:.4g}") for loss in max(runs, key=len, default=[])]


def rows(name: str, own: list[float], still: list[float]) -> dict[str, tuple[bool, list[float]]]:
    """Return what is kept of two runs; nothing of too few steps, or where freezing its optimizers changes nothing."""
    count = min(len(own), len(still))
    own, still = own[:count], still[:count]
    if count < FEWEST or own[1:] == still[1:]:
        return {}
    third = count - count // 3
    off = abs(statistics.fmean(own[third:]) - statistics.fmean(still[third:]))
    least = max(2 * statistics.stdev(still), 0.01 * abs(statistics.fmean(still[third:])))
    return ({name: (True, own)} if off >= least else {}) | {f"{name}, frozen": (False, still)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="clones", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    asked = parser.parse_args()
    by_hand = "benchmarks/scripts/by_hand"
    scripts = [*manifest(), *(Script(f"byhand-{m}", "train.py", args=(m,), ours=by_hand) for m in MODELS)]
    scripts += [Script(f"examples-{name}", f"{name}.py", ours="examples") for name in ("train_gpt", "train_vit")]
    (asked.work / "scratch").mkdir(parents=True, exist_ok=True)
    kept = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    for script in scripts:
        name = script.name.removeprefix("odd-").replace("-", " ")
        wanted = not asked.only or script.name in asked.only.split(",")
        if not wanted or f"{name}, frozen" in kept or script.missing(asked.clones):
            continue
        own, still = (losses(script, asked.clones, asked.work.resolve(), frozen=frozen) for frozen in (False, True))
        kept |= rows(name, own, still)
        print(f"{name}: {len(own)} and {len(still)} losses", flush=True)
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(row)}" for key, row in kept.items())
        asked.out.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
