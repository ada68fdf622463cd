"""Every policy that a search leaves behind carries its evidence and a checksum, and says what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.errors import PolicyError
from autoprec.policy import load_policy
from autoprec.tuning.study.run import DUEL
from tests.tuning.test_engine import Searched, here, mine  # noqa: F401


def test_members_of_the_front_are_written_with_what_was_measured(mine: Searched, here: Path) -> None:  # noqa: F811
    made, result = mine.made, mine.result
    files = sorted((made.study_dir / "front").glob("*.yaml"))
    policies = [load_policy(file) for file in files]
    named = [row for row in result.front if any(r.name == row["name"] and r.policy for r in made.records)]
    assert len(policies) == len(named) > 0
    for policy, row in zip(policies, named, strict=True):
        assert policy.evidence["trial"] == row["name"]
        assert policy.evidence["speedup"] == pytest.approx(row["speedup"], rel=1e-3)
        runs = [r for r in made.records if r.name == row["name"] and r.kind != DUEL]
        assert policy.evidence["seeds"] == len(runs)
        gaps = [r["divergence"] for r in runs]
        assert policy.evidence["divergence"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-3)
    for file in (*files, here / "policy.yaml", made.study_dir / "best.yaml"):
        text = file.read_text()
        assert text.startswith("# checksum sha256:")
        file.write_text(text[: len(text) // 2])
        with pytest.raises(PolicyError):
            load_policy(file)
