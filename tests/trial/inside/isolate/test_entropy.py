"""Two forks of one state draw the same numbers from everything a script can hold."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.trial.inside.isolate.entropy import fork, repeat_entropy

#: Every source of randomness by name; each is drawn from in a fork.
SOURCES: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "random.sample": lambda: random.sample(range(10**6), 3),
    "random.gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: float(numpy.random.rand()),
    "torch": lambda: float(torch.rand(1)),
    "torch.Generator": lambda: float(torch.rand(1, generator=GENERATOR)),
    "numpy.Generator": lambda: float(NUMPY.random()),
    "numpy.RandomState": lambda: float(LEGACY.rand()),
    "random.Random": lambda: OWN.random(),
    "hash": lambda: hash("a string"),
}
#: What is seeded by the operating system.
UNSEEDED = """
import json, random, secrets, sys, uuid
from autoprec.trial.inside.isolate.entropy import repeat_entropy
repeat_entropy(int(sys.argv[1]))
import os, numpy, tempfile
print(json.dumps([random.random(), random.Random().random(), random.SystemRandom().random(), secrets.token_hex(),
    str(uuid.uuid4()), os.urandom(4).hex(), numpy.random.default_rng().random(), numpy.random.rand()]))
print(next(tempfile._get_candidate_names()))
"""
GENERATOR, NUMPY, LEGACY, OWN = (
    torch.Generator(),
    numpy.random.default_rng(),
    numpy.random.RandomState(),
    random.Random(),
)


def drawn_in_a_fork(order: list[str]) -> list[Any]:
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        os.write(writer, json.dumps([SOURCES[name]() for name in order]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        drawn = json.load(stream)
    os.waitpid(pid, 0)
    return list(drawn)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(sorted(SOURCES)), min_size=1, max_size=12))
def test_two_forks_of_one_state_are_equal_and_follow_the_parent(order: list[str]) -> None:
    first, second = drawn_in_a_fork(order), drawn_in_a_fork(order)
    assert first == second
    assert [SOURCES[name]() for name in order] == first  # as the process would have gone on


def test_what_the_system_seeds_repeats_per_key_and_temporary_names_do_not() -> None:
    root = Path(__file__).parents[4]

    def run(key: int) -> list[str]:
        command = [sys.executable, "-c", UNSEEDED, str(key)]
        env = {**os.environ, "PYTHONPATH": str(root)}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.splitlines()

    first, again, other = run(0), run(0), run(1)
    assert first[0] == again[0]
    assert all(a != b for a, b in zip(json.loads(first[0]), json.loads(other[0]), strict=True))
    assert first[1] != again[1]


def test_a_second_call_only_changes_the_key() -> None:
    pid = os.fork()
    if pid == 0:
        repeat_entropy(0)
        state = random.getstate()
        repeat_entropy(1)
        os._exit(0 if random.getstate() == state else 1)
    assert os.waitpid(pid, 0)[1] == 0
