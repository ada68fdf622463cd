"""The checksum line: damage is refused wherever it is, layout and comments are free, and one deletion allows edits."""

import random
from pathlib import Path

import pytest
import yaml

from autoprec.errors import PolicyError
from autoprec.policy import Policy, load_policy, parse_policy, save_policy
from autoprec.precision.recipes import BUILTIN_RECIPES

POLICY = Policy.model_validate(
    {
        "recipes": {"bf16": BUILTIN_RECIPES["bf16"], "fp8_rowwise": BUILTIN_RECIPES["fp8_rowwise"]},
        "layers": [{"match": "*.fc", "recipe": "fp8_rowwise", "gemms": {"wgrad": "bf16"}}],
        "evidence": {"speedup": 1.31, "reason": "naïve", "seeds": 4},
        "guard": {"metrics": ["loss_gap"], "thresholds": {"loss_gap": 0.02}, "fallback": ["script"]},
    }
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_policy(POLICY, tmp_path / "policy.yaml")


def test_an_emitted_policy_begins_with_its_checksum(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# checksum sha256:")
    assert "delete this line" in first
    assert load_policy(path) == POLICY


def test_a_policy_without_evidence_has_none_and_loads(tmp_path: Path) -> None:
    path = save_policy(POLICY.model_copy(update={"evidence": {}}), tmp_path / "p.yaml")
    assert path.read_text().startswith("schema:")
    load_policy(path)


def test_cut_at_any_byte_it_is_refused_or_whole(path: Path) -> None:
    whole = path.read_bytes()
    accepted = []
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            assert load_policy(path) == POLICY
            accepted.append(length)
        except PolicyError:
            pass
    assert accepted == [len(whole) - 1], "only the last line break may be missing"


def test_flipped_bits_are_refused_or_change_nothing(path: Path) -> None:
    whole, chance, refused = path.read_bytes(), random.Random(1), 0
    for _ in range(1500):
        raw = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 8])):
            raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        path.write_bytes(raw)
        try:
            assert load_policy(path) == POLICY
        except PolicyError:
            refused += 1
    assert refused > 1000


def test_an_edit_is_refused_with_the_way_out_and_accepted_without_the_line(path: Path) -> None:
    text = path.read_text().replace("wgrad: bf16", "wgrad: keep")
    with pytest.raises(PolicyError, match="delete its first line") as caught:
        parse_policy(text, where="policy.yaml")
    assert caught.value.where == "policy.yaml"
    assert parse_policy(text.partition("\n")[2]).layers[0].gemms == {"wgrad": "keep"}


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "# adopted for run 7\n\n" + text + "\n# looks good   \n",
        lambda text: text.replace("default: keep", "default:    keep   # as it is"),
        lambda text: text.splitlines()[0] + "\n" + yaml.safe_dump(yaml.safe_load(text)),
        lambda text: yaml.safe_dump(yaml.safe_load(text), sort_keys=False),
    ],
    ids=["crlf", "comments", "layout", "another tool, line kept", "another tool, line lost"],
)
def test_what_changes_no_value_is_accepted(path: Path, change) -> None:  # type: ignore[no-untyped-def]
    assert parse_policy(change(path.read_text())) == POLICY


def test_a_comment_of_ones_own_is_no_checksum_line() -> None:
    assert parse_policy("# checksum it yourself\nschema: autoprec.policy/1\n") == Policy()


def test_a_damaged_line_is_refused(path: Path) -> None:
    with pytest.raises(PolicyError, match="checksum does not match"):
        parse_policy(path.read_text().replace("# checksum", "# chdcksum"))
