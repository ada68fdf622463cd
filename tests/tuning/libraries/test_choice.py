"""Who runs quantised layers: a duel of the best preset by each library decides, in a search and in real processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.policy import Policy, load_policy
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.trial.protocol import DuelRounds, DuelSpec, TrainSpec, TrialResult
from autoprec.tuning.engine import Search
from autoprec.tuning.libraries import choice
from autoprec.tuning.libraries.choice import BACKENDS, able, fastest, row_of, run_by
from autoprec.tuning.study.records import SearchResult
from tests.simulated import SimulatedRunner, SimulatedScript, named_backend
from tests.tuning.test_engine import engine, here, options, script, search  # noqa: F401

ALL = ("native", "torchao", "transformer_engine")


def uniform(recipe: str, **changes: Any) -> dict[str, Any]:
    return Policy(recipes={recipe: BUILTIN_RECIPES[recipe]}, default=recipe, **changes).to_dict()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    names = {"torchao", "transformer_engine"}
    monkeypatch.setattr(choice, "is_available", lambda name: name in names)
    return names


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("fp8_tensorwise", ["native", "torchao", "transformer_engine"]),
        ("fp8_delayed", ["native", "torchao", "transformer_engine"]),
        ("mxfp8", ["native", "torchao", "transformer_engine"]),
        ("nvfp4", ["native", "transformer_engine"]),
        ("int8", ["native"]),
        ("bf16", []),
    ],
)
def test_who_may_run_a_policy_follows_from_its_formats(installed: set[str], recipe: str, expected: list[str]) -> None:
    assert able(uniform(recipe)) == expected
    installed.clear()
    assert able(uniform(recipe)) == expected[:1]


def test_the_evidence_names_who_runs_each_quantised_recipe_and_nothing_else() -> None:
    names = ("fp8_rowwise", "bf16", "int8")
    recipes = {name: BUILTIN_RECIPES[name] for name in names}
    policy = Policy(recipes=recipes, default="fp8_rowwise", evidence={"seeds": 2}).to_dict()
    row = {"backend": "torchao", "device": "cuda"}
    found = run_by(policy, row)
    assert found["evidence"] == {"seeds": 2, "backends": {"fp8_rowwise": row}}
    assert row_of(found) == row
    assert row_of(policy) == {}
    assert run_by(policy, {}) is policy
    assert run_by(uniform("int8"), row) == uniform("int8")


def rounds(count: int = 8, **ms: float) -> list[dict[str, float]]:
    return [{name: value * (1 + 0.001 * k) for name, value in ms.items()} for k in range(count)]


@pytest.mark.parametrize(
    ("timed", "expected"),
    [
        (rounds(native=10.0, torchao=8.0, transformer_engine=9.0), "torchao"),
        (rounds(native=10.0, torchao=12.0, transformer_engine=9.0), "transformer_engine"),
        (rounds(native=10.0, torchao=10.0, transformer_engine=11.0), "native"),
        (rounds(native=10.0), "native"),
        (rounds(torchao=10.0, transformer_engine=9.0), "transformer_engine"),
        (rounds(torchao=10.0, transformer_engine=11.0), "torchao"),
        (rounds(native=10.0, transformer_engine=8.0) + rounds(2, native=10.0, torchao=1.0), "transformer_engine"),
        (rounds(3, native=10.0, torchao=8.0), ""),
        ([], ""),
    ],
)
def test_the_fastest_of_those_that_were_timed_wins(timed: list[dict[str, float]], expected: str) -> None:
    row = fastest(timed, ALL, "cuda")
    assert row.get("backend", "") == expected
    if expected == "torchao" and "native" in timed[0]:
        assert (row["speedup"], row["low"], row["high"]) == (1.25, 1.25, 1.25)
        assert row["reason"] == "1.25x [1.25, 1.25] over native, timed beside it"


def test_what_is_faster_by_chance_alone_does_not_win() -> None:
    noisy = [{"native": 10.0, "torchao": 10.0 * (1.2 if k % 2 else 0.8)} for k in range(8)]
    row = fastest(noisy, ALL, "cuda")
    assert row["backend"] == "native"
    assert row["reason"].startswith("no other is surely faster: torchao is ")


def by_backend(simulated: SimulatedScript) -> list[DuelSpec]:
    return [spec for _, spec in simulated.calls if isinstance(spec, DuelSpec) and spec.by_backend]


def searched(factor: Mapping[str, float | None], **changes: Any) -> tuple[SimulatedScript, Search, SearchResult]:
    simulated = script(library_factor=lambda name: factor.get(name, 1.0), **changes)
    made, result = search(simulated, options(trials=8))
    return simulated, made, result


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("factor", "winner"),
    [
        ({"torchao": 0.8, "transformer_engine": 0.9}, "torchao"),
        ({"torchao": 0.95, "transformer_engine": 0.7}, "transformer_engine"),
        ({"torchao": 1.1, "transformer_engine": 1.2}, "native"),
        ({"torchao": None, "transformer_engine": 0.7}, "transformer_engine"),
        ({"torchao": 0.8, "native": None, "transformer_engine": None}, "torchao"),
    ],
)
def test_a_search_takes_the_fastest_for_what_it_runs_from_there_on_and_for_its_policy(
    here: Path,  # noqa: F811
    factor: Mapping[str, float | None],
    winner: str,
) -> None:
    simulated, made, result = searched(factor)
    (spec,) = by_backend(simulated)
    assert {probe.id: named_backend(probe.policy) for probe in spec.probes} == {name: name for name in ALL}
    told = [note for note in result.notes if note.startswith("quantised layers are run by ")]
    assert len(told) == 1
    assert told[0].startswith(f"quantised layers are run by {winner}: with ")
    policy = load_policy(here / result.policy)
    rows = policy.evidence["backends"]
    assert rows.keys() == {name for name, recipe in policy.recipes.items() if recipe.scaled}
    assert {row["backend"] for row in rows.values()} == {winner}
    if winner != "native" and "native" not in factor:
        assert all(row["low"] <= row["speedup"] <= row["high"] for row in rows.values())
    later = simulated.calls[[call is spec for _, call in simulated.calls].index(True) + 1 :]
    trained = [s.policy for _, s in later if isinstance(s, TrainSpec) and s.policy and able(s.policy)]
    timed = [p.policy for _, s in later if isinstance(s, DuelSpec) for p in s.probes if able(p.policy)]
    assert trained
    assert timed
    assert {named_backend(document) for document in (*trained, *timed)} == {winner}
    assert [record.name for record in made.records if BACKENDS in record.tags]


def test_a_search_that_goes_on_takes_what_it_had_decided(installed: set[str], here: Path) -> None:  # noqa: F811
    factor = {"torchao": 0.8}
    first = script(library_factor=lambda name: factor.get(name, 1.0))
    search(first, options(trials=7, study="mine"))
    again = script(library_factor=lambda name: factor.get(name, 1.0))
    made = engine(again, replace(options(trials=9, study="mine"), resume=True))
    result = made.run()
    assert len(by_backend(first)) == 1
    assert by_backend(again) == []
    rows = load_policy(here / result.policy).evidence["backends"]
    assert {row["backend"] for row in rows.values()} == {"torchao"}


@pytest.mark.usefixtures("installed")
def test_a_script_that_ends_soon_has_further_processes_for_its_duel_of_backends(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One process of it had two rounds, which tell nothing: six are an interval."""
    whole = SimulatedRunner._duel

    def ends_soon(self: SimulatedRunner, spec: DuelSpec) -> TrialResult:
        result = whole(self, spec)
        answer = result.answer
        assert isinstance(answer, DuelRounds)
        short = replace(answer, rounds=answer.rounds[:2], steps=60)  # room for all of them
        return replace(result, answer=short) if spec.by_backend else result

    monkeypatch.setattr(SimulatedRunner, "_duel", ends_soon)
    simulated, _, result = searched({"torchao": 0.5})
    assert len(by_backend(simulated)) == 3
    rows = load_policy(here / result.policy).evidence["backends"]
    assert {row["backend"] for row in rows.values()} == {"torchao"}


@pytest.mark.parametrize("changes", [{"backend": "native"}, {"target": "h100"}, {"space": "ampere-bf16"}])
def test_no_duel_is_run_where_there_is_nothing_to_decide(
    installed: set[str],
    here: Path,  # noqa: F811
    changes: dict[str, Any],
) -> None:
    simulated = script(device="cpu") if "target" in changes else script()
    _, result = search(simulated, options(trials=6, **changes))
    assert by_backend(simulated) == []
    assert "backends" not in load_policy(here / result.policy).evidence
    installed.clear()
    simulated = script()
    search(simulated, options(trials=6, study="alone"))
    assert by_backend(simulated) == [], "one backend alone is able"
