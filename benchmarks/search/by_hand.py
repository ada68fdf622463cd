"""What a search says of a script's speed against the truth, and against what a person does by hand.

    python benchmarks/search/by_hand.py conv tab lstm unet gpt --search --repeats 3 --out FILE.md
    python benchmarks/search/by_hand.py gpt --search --repeats 2 --at-once 2 --out FILE.md       # one on each core
    python benchmarks/search/by_hand.py all --search --options "--budget 15m" --out FILE.md     # hours
    python benchmarks/search/by_hand.py all --search --at-once 8 --out FILE.md                   # beside a load of 8
    python benchmarks/search/by_hand.py conv --policy policy.yaml

By hand are the script as written, the script under ``torch.autocast("cpu", bfloat16)``, and every layer in bf16. They
and each policy train in processes of their own, as they do at a user's: copies of one model in one process would share
its caches and its heap, and by where that lies one process differs from the next. One works at a time, in blocks of a
few steps in random order, in as many threads as trials have. What a process took is divided by what another's took
beside it; the median of these ratios, one for each of eight processes, has a 95 % interval (blocks of one process are
alike, and would make it too narrow). Each process begins with a heap of its own, as trials do. Nothing else of the
product takes part but ``autoprec.load``, ``apply`` and ``wrap_optimizer``, which is what a user writes; the loop is the
script's own.

With ``--search`` the policies are what ``autoprec search`` adopts, script after script or ``--at-once`` several, each
beside the others (answers that are in ``--work`` already are not searched again). What all the searches of a script
adopted is then timed together, so many at once as were searched, and the gain of each answer over the fastest by hand
is said. Where fewer are left to do, scripts train in the place of the others, so that the load stays. Turns of
``--duel`` are all at the same time: duels have duels beside them, processes have processes that start. Nothing else
may run: where cores share a cache that makes a speed-up of 3.3 one of 3.1. A row is wrong where the speed it claims
is outside the true one's interval and more than 3 % from it, where autocast by hand is surely faster than what was
adopted (than the script, where the answer is to stay), or where another search of the script adopted what is surely
faster by more than this one said is left at most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import autoprec
from autoprec.applying.policy import TorchPolicy
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.files import write_json
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.inside.observe.measure import some_heap
from autoprec.trial.intervals import median_interval
from autoprec.trial.protocol import REFERENCE, DuelRounds, DuelSpec, Probe

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "scripts" / "by_hand"
TRAIN, PASSIVE = FOLDER / "train.py", {"OMP_WAIT_POLICY": "PASSIVE"}
_MODELS = "conv tab lstm unet moe dlrm seq2seq muon vit convnext mixer bert gpt2 whisper gpt6"
#: What is searched, as the words of a command line.
SCRIPTS = {name: (str(TRAIN), name) for name in _MODELS.split()}
_GPT = str(ROOT / "examples" / "train_gpt.py")
SCRIPTS |= {
    "gpt": (_GPT,),
    "gpt-768": (_GPT, "--width", "768", "--heads", "12"),
    "gpt2-autocast": (str(TRAIN), "gpt2", "--autocast"),
}
#: The contenders that are there without a policy.
BY_HAND = WRITTEN, AUTOCAST, BF16 = "script", "autocast by hand", "all bf16"
ADOPTED, DUEL = "adopted", "duel: "
ALL_BF16 = TorchPolicy(recipes={"bf16": BUILTIN_RECIPES["bf16"]}, default="bf16")
#: A block has so many steps at least, takes so long at least (s), and so many steps go by before it; before the first
#: block of a process so many: the longest that page faults of a step were seen to go on falling. A process that has
#: settled for so long is worth a longer block: blocks of 0.4 s differ twice as much where faults come in bursts.
#: Where steps are slow, so many seconds are enough.
BLOCK, BLOCK_S, SETTLING, SETTLING_FIRST, SETTLING_S = 3, 1.5, 1, 30, 8.0
#: Processes that each contender has at most, one after the other.
PROCESSES = 8
#: A claim so close to the truth is right, whatever the interval.
CLOSE = 0.03
#: What a search that has ended says is left at most, in percent.
LEFT = re.compile(r"none of them gains more than about ([\d.]+)%")
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class Row:
    """What a search claimed of one script, and what is true.

    ``left`` is what no untried policy gains more than, as it says; ``other`` the best answer of all over this one;
    ``duel`` what a duel in the minutes of the truth says.
    """

    script: str
    verdict: str
    claimed: Interval | None
    truth: Interval
    autocast: Interval
    bf16: Interval
    paired: Interval
    by_hand: str
    gain: Interval
    left: float | None
    other: Interval
    seconds: float
    duel: Interval | None = None

    @property
    def wrong(self) -> str:
        """Return what is wrong; empty where nothing is, as where a budget ended before there was an answer."""
        if self.verdict not in ("adopt", "stay"):
            return ""
        if self.paired[2] < 1.0:
            return "autocast by hand is faster"
        if self.left is not None and self.other[1] > 1.0 + self.left:
            return "more was left"
        if self.claimed is not None and not self.truth[1] <= self.claimed[0] <= self.truth[2]:
            apart = self.claimed[0] / self.truth[0] - 1.0
            return f"the claim is {apart:+.0%} off" if abs(apart) > CLOSE else ""
        return ""


def make(name: str) -> tuple[Any, ...]:
    """Return a script's model, optimizer, what draws a batch, the loss of one, and the largest norm of its gradient."""
    if name not in ("gpt", "gpt-768"):
        task = import_module("train").make(SCRIPTS[name][1])
        return task.model, task.optimizer, task.batch, task.loss_of, task.clip
    module = import_module("examples.train_gpt")  # its loop is its main(): the same model, sizes and optimizer here
    torch.manual_seed(0)
    width, heads = (768, 12) if name == "gpt-768" else (384, 6)
    model, text = module.GPT(width, 3, heads, 64), module.read_text(4_000_000)
    shapes = [[p for p in model.parameters() if (p.ndim >= 2) is many] for many in (True, False)]
    groups = [{"params": shapes[0], "weight_decay": 0.1}, {"params": shapes[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def batch() -> Any:
        return text[torch.randint(len(text) - 65, (8, 1)) + torch.arange(65)]

    return model, optimizer, batch, lambda model, window: model(window[:, :-1], window[:, 1:]), 1.0


class Ended(BaseException):
    """Ends a script's loop; what a script catches does not end it."""


def train(name: str, kind: str, stepped: Callable[[float], None], seed: int | None = None) -> None:
    """Run a script's own loop as a contender, until ``stepped`` raises :class:`Ended`, on a heap of its own.

    What a loop holds on to from step to step, its loss and its batch, decides where the heap ends and so which pages
    the C library gives back and asks for again: up to a tenth of a step. So it is the script's loop that is timed.

    Args:
        kind: one of :data:`BY_HAND` or a policy's file, and behind it the script's options.
        stepped: is called after each step of the optimizer, with the step's last loss.
        seed: of what is drawn once the model is made, the order of the data; None: as the script has it.
    """
    kind, *options = kind.split(" --")
    policy = ALL_BF16 if kind == BF16 else None if kind in BY_HAND else autoprec.load(Path(kind))
    own = name in ("gpt", "gpt-768")
    script = import_module("examples.train_gpt" if own else "train")
    _held = some_heap(os.getpid())
    made, losses, backward = script.GPT if own else script.make, [math.nan], torch.Tensor.backward

    def build(*arguments: Any) -> Any:
        built = made(*arguments)
        model = built if own else built.model
        if policy is not None:
            policy.apply(model)
            built = built if own else replace(built, optimizer=policy.wrap_optimizer(built.optimizer, model))
        if own and kind == AUTOCAST:
            model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        if seed is not None:
            torch.manual_seed(seed)
        return built

    def kept(loss: torch.Tensor, *arguments: Any, **named: Any) -> None:
        losses[0] = float(loss.detach())
        backward(loss, *arguments, **named)

    hook = register_optimizer_step_post_hook(lambda *_: stepped(losses[0]))
    words = [word for option in options for word in ("--" + option).split()]
    words += ["--autocast"] * (kind == AUTOCAST and not own)
    sys.argv = [*SCRIPTS[name], "--steps", str(10**6), *words]
    try:
        with (
            mock.patch.object(script, "GPT" if own else "make", build),
            mock.patch.object(torch.Tensor, "backward", kept),
            contextlib.redirect_stdout(sys.stderr),
        ):
            script.main()
    except Ended:
        pass
    finally:
        hook.remove()


def seconds() -> float:
    """Return the time on the wall; with one thread, CPU time."""
    return (time.process_time if torch.get_num_threads() == 1 else time.perf_counter)()


def serve(name: str, kind: str) -> None:
    """Train, a block of steps for each line of standard input, and answer with a block's milliseconds per step."""
    answers, count, steps, first, began = os.fdopen(os.dup(1), "w"), 0, 0, 0.0, 0.0
    settling = SETTLING_FIRST

    def stepped(_loss: float) -> None:
        nonlocal count, steps, settling, first, began
        now, count = seconds(), count + 1
        first = first or now
        if not steps and (count == settling or (count > BLOCK and now - first > SETTLING_S)):
            settling = count
            steps = max(BLOCK, math.ceil(BLOCK_S / max(now - began, 1e-4)))
        if count <= settling:
            began = now
        elif count == settling + steps:
            print((now - began) / steps * 1e3, file=answers, flush=True)
            if not sys.stdin.readline():
                raise Ended
            count, settling = 0, SETTLING

    sys.stdin.readline()
    train(name, kind, stepped)


def races(
    asked: dict[str, dict[str, str]], rounds: int, at_once: int = 1, duel_s: float = 0.0
) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds per step of each contender of each script, one for each of its processes.

    A process's time is also that of its heap, by the page faults of its steps, and processes of one program have much
    the same heap: of two programs that compute the same (``dlrm`` under autocast, and under a policy of autocast) one
    took 43 to 46 ms in all eight, the other 36 to 43. So each process's heap is drawn at random, and each contender has
    several, of each of which the mean of its blocks counts once.

    Args:
        asked: scripts, and the contenders of each.
        rounds: blocks of a contender in all its processes together, which are no more.
        at_once: so many work at a time, each beside the others as the searches were: what else wants a machine's cache
            takes more from one policy than from another.
        duel_s: seconds of a search's duel before each turn, whose times are of :data:`DUEL` and the contender.
    """

    def blocks_of(name: str, number: int) -> dict[str, list[float]]:
        contenders = asked[name]
        blocks: dict[str, list[float]] = {who: [] for who in contenders}
        duel = _duel(name, contenders, duel_s) if duel_s else {}
        with contextlib.ExitStack() as lanes:
            block = _started(name, contenders, lanes)
            for turn in range(number, rounds, PROCESSES):
                for who in random.Random(turn).sample(list(contenders), len(contenders)):
                    blocks[who].append(block(who))
        return {who: [statistics.fmean(found)] for who, found in blocks.items()} | duel

    turns = [(name, number) for number in range(min(rounds, PROCESSES)) for name in asked]
    found = together(blocks_of, turns, at_once)
    times: dict[str, dict[str, list[float]]] = {name: {} for name in asked}
    for (name, _), blocks in zip(turns, found, strict=True):
        for who, ms in blocks.items():
            times[name].setdefault(who, []).extend(ms)
    return times


def _duel(name: str, contenders: dict[str, str], within_s: float) -> dict[str, list[float]]:
    """Return milliseconds per step of policies and the script in the rounds of a duel, as a search times them."""
    probes = tuple(Probe(who, _bare(Path(kind))) for who, kind in contenders.items() if who not in BY_HAND)
    if not probes:
        return {}
    with TrialRunner(ScriptCommand.parse(list(SCRIPTS[name]))) as runner:
        runner.start()
        spec = DuelSpec(probes=probes, within_s=within_s, precision=0.0, side_by_side=2)
        done = runner.run(spec)
    if not isinstance(done.answer, DuelRounds):  # the others of the same script say enough
        print(f"{name}: a duel failed: {done.status}: {done.reason}\n{done.tail}", file=sys.stderr)
        return {}
    rounds, names = done.answer.rounds, {REFERENCE: WRITTEN}
    return {DUEL + names.get(who, who): [ms[who] for ms in rounds] for who in rounds[0]}


def _bare(policy: Path) -> dict[str, Any]:
    """Return a policy's document without what it was measured to be."""
    return autoprec.load(policy).model_copy(update={"evidence": None}).to_dict()


def together(work: Callable[[str, int], Any], asked: Sequence[tuple[str, int]], at_once: int) -> list[Any]:
    """Return what a function returns of a script and a number each, so many at once; scripts take the last ones' place.

    Without these the load falls as searches end, while that of the truth does not.
    """
    with contextlib.ExitStack() as company, ThreadPoolExecutor(at_once) as workers:
        left = {workers.submit(work, *one): one[0] for one in asked}
        all_of, training = list(left), 0
        while left:
            for one in wait(left, return_when=FIRST_COMPLETED).done:
                name = left.pop(one)
                if 0 < len(left) < at_once - training:
                    training += 1
                    company.callback(_training(name).kill)
        return [one.result() for one in all_of]


def _training(name: str) -> subprocess.Popen[bytes]:
    """Start a script that trains until it is killed."""
    none = subprocess.DEVNULL
    return _process([*SCRIPTS[name], "--steps", str(10**6)], stdout=none, stderr=none)


def _process(words: Sequence[str], **pipes: Any) -> subprocess.Popen[Any]:
    """Start Python in a session of its own, as trials are: those of one have one's part of a desktop's cores."""
    return subprocess.Popen([sys.executable, *words], env=PASSIVE | os.environ, start_new_session=True, **pipes)


def race(name: str, contenders: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """Return :func:`races` of one script, with nothing beside it."""
    return races({name: contenders}, rounds)[name]


def _started(name: str, contenders: dict[str, str], lanes: contextlib.ExitStack) -> Callable[[str], float]:
    """Start a process for each contender; return what has one of them run a block."""
    pipe, children = subprocess.PIPE, {}
    for who, kind in contenders.items():
        child = _process([__file__, name, "--serve", kind], stdin=pipe, stdout=pipe, text=True)
        children[who] = lanes.enter_context(child)
        lanes.callback(child.kill)

    def block(who: str) -> float:
        asks, answers = children[who].stdin, children[who].stdout
        assert asks is not None
        assert answers is not None
        print(file=asks, flush=True)
        return float(answers.readline())

    for who in children:
        block(who)
    return block


def over(times: Sequence[float], base: Sequence[float]) -> Interval:
    """Return the speed-up of one contender over another: median of their processes' ratios, and its 95 % interval."""
    return median_interval([b / own for own, b in zip(times, base, strict=True)])


def text(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f}x [{interval[1]:.2f}, {interval[2]:.2f}]"


def search(name: str, folder: Path, words: Sequence[str], script: Sequence[str] = ()) -> dict[str, Any]:
    """Search a script (by default as :data:`SCRIPTS` has it), unless its folder has an answer; return that."""
    if (kept := folder / "result.json").exists():
        return dict(json.loads(kept.read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "autoprec", "search", "--json", "--no-mlflow", "-o", "policy.yaml", *words]
    command += ["--study", name, *(script or SCRIPTS[name])]
    began = time.monotonic()
    with (folder / "search.log").open("w") as log:
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, check=False)
    none: dict[str, Any] = {"verdict": f"no answer, exit {done.returncode}", "best": {}, "presets": []}
    found = (json.loads(done.stdout) if done.stdout.strip() else none) | {"seconds": time.monotonic() - began}
    write_json(kept, found)
    return found


def judged(folders: dict[str, list[Path]], rounds: int, at_once: int = 1, duel_s: float = 0.0) -> list[Row]:
    """Time what searches of scripts adopted beside the script and autocast by hand; returns a row for each search.

    What several of them adopted is timed once. Times are kept beside the searches' folders, and not taken again.

    Args:
        folders: of the searches of each script.
        rounds: see :func:`races`, as of the others.
    """
    results = {name: [json.loads((one / "result.json").read_text()) for one in own] for name, own in folders.items()}
    answers = {name: _answers(own, results[name]) for name, own in folders.items()}
    times: dict[str, dict[str, list[float]]] = {}
    asked = {}
    for name, own in folders.items():
        kept = own[0].parent / "truth.json"
        times[name] = json.loads(kept.read_text()) if kept.exists() else {}
        contenders = {kind: kind for kind in BY_HAND} | dict(answers[name])
        if not contenders.keys() <= times[name].keys():
            asked[name] = contenders
    for name, found in races(asked, rounds, at_once, duel_s).items():
        times[name] = found
        write_json(folders[name][0].parent / "truth.json", found)
    return [
        _row(name, result, times[name], who, {*dict(answers[name])} - {WRITTEN})
        for name in folders
        for result, (who, _) in zip(results[name], answers[name], strict=True)
    ]


def _answers(folders: Sequence[Path], results: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the contender that each search answered with: the script, or the first search with the same policy."""
    bare = {i: _bare(folders[i] / "policy.yaml") for i, found in enumerate(results) if found["verdict"] == "adopt"}
    first = {i: next(j for j, other in bare.items() if other == own) for i, own in bare.items()}
    adopted = {i: (f"{ADOPTED} {j}", str(folders[j] / "policy.yaml")) for i, j in first.items()}
    return [adopted.get(i, (WRITTEN, WRITTEN)) for i in range(len(results))]


def _row(name: str, result: dict[str, Any], times: dict[str, list[float]], answered: str, others: set[str]) -> Row:
    best, claimed, answer = result["best"], None, times[answered]
    fastest = min(BY_HAND, key=lambda who: statistics.median(times[who]))
    left = LEFT.search(result.get("stopped") or "")
    if answered != WRITTEN and (bounds := best.get("intervals", {}).get("speedup")) is not None:  # else none is claimed
        claimed = (best["speedup"], *bounds)
    return Row(
        name,
        result["verdict"],
        claimed,
        over(answer, times[WRITTEN]),
        over(times[AUTOCAST], times[WRITTEN]),
        over(times[BF16], times[WRITTEN]),
        over(answer, times[AUTOCAST]),
        fastest,
        over(answer, times[fastest]),
        float(left[1]) / 100 if left else None,
        max((over(times[other], answer) for other in others), key=lambda found: found[1], default=(1.0, 1.0, 1.0)),
        result["seconds"],
        over(times[DUEL + answered], times[DUEL + WRITTEN]) if DUEL + answered in times else None,
    )


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| script | verdict | claimed | truth | duel beside it | autocast by hand | all bf16 "
        "| answer over autocast by hand | fastest by hand "
        "| answer over it | left at most | best answer over this | search | wrong |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [text(found) for found in (row.claimed, row.truth, row.duel, row.autocast, row.bf16, row.paired)]
        left = "" if row.left is None else f"{row.left:.1%}"
        end = [row.by_hand, text(row.gain), left, text(row.other), f"{row.seconds:.0f} s", row.wrong or "no"]
        cells = [row.script, row.verdict, *figures, *end]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", choices=[*SCRIPTS, "all"], help="vit to whisper need timm, transformers")
    parser.add_argument("--policy", type=Path, action="append", default=[], help="time this file; may be repeated")
    parser.add_argument("--search", action="store_true", help="search first, and compare the claim with the truth")
    parser.add_argument("--options", default="", help="options of the searches, e.g. '--steps 10 --trials 6'")
    parser.add_argument("--work", type=Path, default=Path("autoprec-runs/by-hand"), help="answers here are kept")
    parser.add_argument("--repeats", type=int, default=1, help="searches of each script")
    parser.add_argument("--at-once", type=int, default=1, help="searches, then truths, beside each other")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--duel", type=float, default=0.0, metavar="S", help="time answers in duels of so many seconds")
    parser.add_argument("--serve", metavar="CONTENDER", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the table into this file as well")
    args = parser.parse_args()
    if args.serve:
        sys.path[:0] = [str(ROOT), str(FOLDER)]
        serve(args.scripts[0], args.serve)
        return
    args.scripts = list(SCRIPTS) if "all" in args.scripts else args.scripts
    if not args.search:
        for name in args.scripts:
            contenders = {kind: kind for kind in (*BY_HAND, *map(str, args.policy))}
            times = race(name, contenders, args.rounds)
            for who, ms in times.items():
                print(f"{name:6}{who:40}{statistics.median(ms):9.1f} ms  {text(over(ms, times[WRITTEN]))}")
        return
    folders = {name: [args.work / name / str(number) for number in range(args.repeats)] for name in args.scripts}
    asked = [(name, number) for number in range(args.repeats) for name in args.scripts]
    together(lambda name, number: search(name, folders[name][number], args.options.split()), asked, args.at_once)
    load = os.getloadavg()[0]
    rows = judged(folders, args.rounds, args.at_once, args.duel)
    verdicts = {name: {row.verdict for row in rows if row.script == name} for name in args.scripts}
    apart = [name for name, found in verdicts.items() if len(found) > 1]
    gains = [row.gain[0] - 1.0 for row in rows]
    lines = ["# What a search claims, the truth, and what is done by hand", "", f"`python {' '.join(sys.argv)}`", ""]
    lines += [
        f"{datetime.now():%Y-%m-%d}; {platform.processor() or platform.machine()}, {os.cpu_count()} cores; "
        f"torch {torch.__version__}; {torch.get_num_threads()} threads, {args.rounds} rounds; searches {args.at_once} "
        f"at once; load average {load:.1f} after the searches, {os.getloadavg()[0]:.1f} at the end.",
        "",
        *table(rows),
        "",
        f"gain of the answer over the fastest by hand: median {statistics.median(gains):+.1%}, worst {min(gains):+.1%}",
        f"wrong: {sum(bool(row.wrong) for row in rows)} of {len(rows)}",
        f"scripts with contradictory verdicts: {len(apart)} of {len(args.scripts)} {' '.join(apart)}".rstrip(),
    ]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
