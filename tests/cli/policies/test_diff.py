"""``autoprec show A B``."""

from pathlib import Path

from tests.cli.helpers import autoprec


def other(policy_file: Path, old: str, new: str) -> Path:
    path = policy_file.with_name("other.yaml")
    path.write_text(policy_file.read_text().replace(old, new), encoding="utf-8")
    return path


def test_no_difference_is_exit_0(policy_file: Path) -> None:
    found = autoprec("show", policy_file, policy_file)
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("no difference")


def test_a_difference_is_exit_1_and_names_its_place(policy_file: Path) -> None:
    found = autoprec("show", policy_file, other(policy_file, "default: bf16", "default: keep"))
    assert (found.code, found.out) == (1, "default: bf16 -> keep\n")


def test_evidence_is_shown_and_does_not_count(policy_file: Path) -> None:
    found = autoprec("show", policy_file, other(policy_file, "seeds: 4", "seeds: 8"))
    assert found.code == 0
    assert found.out.splitlines()[1:] == ["(evidence.seeds: 4 -> 8)"]


def test_json(policy_file: Path) -> None:
    found = autoprec("show", "--json", policy_file, other(policy_file, ", gemms: {wgrad: bf16}", ""))
    assert found.code == 1
    assert found.json() == {
        "same": False,
        "differences": [
            {
                "where": "layers['blocks.*.fc']",
                "a": {"recipe": "fp8", "gemms": {"wgrad": "bf16"}},
                "b": {"recipe": "fp8"},
            }
        ],
    }


def test_a_policy_that_is_not_valid_is_exit_2_not_1(policy_file: Path) -> None:
    assert autoprec("show", policy_file, other(policy_file, "default: bf16", "default: x")).code == 2
