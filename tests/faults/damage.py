"""Files of a search, and what is read from them after damage: the value that was written, a clear error, or a fault."""

from __future__ import annotations

import collections
import contextlib
import random
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna

from autoprec.errors import AutoPrecError
from autoprec.policy import Policy, load_policy, save_policy
from autoprec.policy.space import load_space
from autoprec.support.files import read_document, with_checksum, without_checksum, write_json
from autoprec.tuning.study.run import Run, metrics_of
from autoprec.tuning.study.study import StudyStore, default_storage
from tests.faults.bad_documents import flipped, policy_document, space_seeds

__all__ = ["Kept", "Outcome", "cut_everywhere", "flip_at_random", "kept_files"]

GROUPS = {f"layer:{i}": optuna.distributions.CategoricalDistribution(("keep", "bf16", "fp8")) for i in range(6)}


@dataclass(frozen=True)
class Kept:
    """One file: its bytes, how it is read, and what it says; ``checked`` files must never say anything else."""

    name: str
    path: Path
    raw: bytes
    read: Callable[[Path], Any]
    checked: bool = True


@dataclass
class Outcome:
    """What became of the damaged copies of one file."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, kept: Kept, raw: bytes, expected: Any) -> None:
        """Read one damaged copy and judge what came out."""
        kept.path.write_bytes(raw)
        try:
            found = kept.read(kept.path)
        except AutoPrecError as error:
            clear = bool(error.what and error.where and error.fix) and len(str(error)) < 5000
            self.counts["refused" if clear else "unclear"] += 1
            if kept.path.read_bytes() != raw:
                self.counts["overwritten"] += 1
        except Exception as error:
            self.counts["crashed"] += 1
            self.faults.append(f"{kept.name}: {type(error).__name__}: {error}"[:500])
        else:
            same = found == expected
            self.counts["same value" if same else "wrong value" if kept.checked else "another valid value"] += 1
            if not same and kept.checked:
                self.faults.append(f"{kept.name}: accepted {raw[:200]!r}")


def read_study(path: Path) -> Any:
    """Return everything a resumed search takes from a study's database."""
    with StudyOpen(path.parent) as store:
        if store.signature is None and store.records:  # as the engine refuses it
            raise AutoPrecError("no setup", where=str(path), fix="--study NEW")
        return [record.to_json() for record in store.records], store.signature


class StudyOpen(contextlib.AbstractContextManager[StudyStore]):
    """A study opened to be resumed, and its connections closed again."""

    def __init__(self, folder: Path, *, resume: bool = True) -> None:
        self.store = StudyStore(default_storage(folder), "study", ("step_time_ms", "divergence"), resume=resume)

    def __enter__(self) -> StudyStore:
        return self.store

    def __exit__(self, *_: object) -> None:
        self.store.close()
        self.store._storage.engine.dispose()


def _write_study(folder: Path, trials: int) -> Path:
    with StudyOpen(folder, resume=False) as store:
        store.set_signature({"command": ["train.py"], "seed": 0})
        store.start(optuna.samplers.RandomSampler(seed=0), GROUPS, [])
        for number in range(trials):
            trial = store.ask()
            metrics = {"step_time_ms": 10.0 + number, "divergence": 1e-3 / (number + 1), "speedup": 1.1}
            policy = policy_document().to_dict()
            name = f"trial {number}"
            store.tell(
                trial, Run(number, "search", name, dict(trial.params), policy, "ok", metrics=metrics_of(metrics))
            )
    connection = sqlite3.connect(folder / "study.db")
    connection.executescript("pragma page_size = 512; vacuum")  # little of it is empty, so most damage hits something
    connection.close()
    return folder / "study.db"


def _read_table(path: Path) -> Any:
    try:
        return without_checksum(read_document(path), where=str(path))
    except AutoPrecError as error:  # the search says so and measures it again
        error.fix = error.fix or "it is measured again"
        raise


def kept_files(folder: Path, *, trials: int = 6) -> Iterator[Kept]:
    """Write one file of each kind below ``folder`` and return them."""
    study = _write_study(folder, trials)
    yield Kept("study database", study, study.read_bytes(), read_study)
    policy: Policy = policy_document()
    path = save_policy(policy, folder / "policy.yaml")
    yield Kept("policy with evidence", path, path.read_bytes(), load_policy)
    table = write_json(folder / "sensitivity.json", with_checksum({"noise": 0.01, "rows": {"a": [0.1, 0.25]}}))
    yield Kept("sensitivity table", table, table.read_bytes(), _read_table)
    space = folder / "space.yaml"
    yield Kept("space (no checksum)", space, max(space_seeds(), key=len), load_space, checked=False)
    bare = save_policy(policy.model_copy(update={"evidence": {}}), folder / "bare.yaml")
    yield Kept("policy by hand (no checksum)", bare, bare.read_bytes(), load_policy, checked=False)


def cut_everywhere(kept: Kept, *, step: int = 1) -> Outcome:
    """Truncate a file at every ``step``-th byte."""
    outcome, expected = Outcome(), _expected(kept)
    for length in range(0, len(kept.raw), step):
        outcome.add(kept, kept.raw[:length], expected)
    return outcome


def flip_at_random(kept: Kept, count: int, seed: int) -> Outcome:
    """Flip one to eight random bits of a file, ``count`` times."""
    outcome, expected, chance = Outcome(), _expected(kept), random.Random(seed)
    for _ in range(count):
        outcome.add(kept, flipped(chance, kept.raw), expected)
    return outcome


def _expected(kept: Kept) -> Any:
    kept.path.write_bytes(kept.raw)
    return kept.read(kept.path)
