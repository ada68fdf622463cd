"""Published policies as data: every file that ships is valid, and what is wrong with one is said."""

from pathlib import Path

import pytest

from autoprec.errors import PolicyError, UnknownNameError
from autoprec.policy import load_policy
from autoprec.policy.library import Sizes, is_published, published, published_names, read_published
from autoprec.policy.space import Blocks, Choice
from autoprec.precision.recipes import KEEP


def written(folder: Path, body: str) -> Path:
    path = folder / "mine.yaml"
    head = "title: mine\nsource: a paper\ndate: 2026-01\nevidence: [a curve]\n"
    path.write_text(head + body, encoding="utf-8")
    return path


def test_the_policies_that_the_issue_names_are_there() -> None:
    wanted = {"deepseek-v3", "ling-2.0", "nemotron-h", "nvfp4-12b", "nvfp4-12b-tail", "nvfp4-8b", "nemotron-3-super"}
    wanted |= {"torchtitan-nvfp4-8b", "maxtext-nvfp4", "llama4-scout-mxfp8", "gpt-oss-20b", "deepseek-v4", "te-delayed"}
    wanted |= {"te-current"} | {f"torchao-{recipe}" for recipe in ("tensorwise", "rowwise", "rowwise-gw-hp")}
    assert wanted | {f"msamp-o{number}" for number in (1, 2, 3)} <= set(published_names())


@pytest.mark.parametrize("name", published_names())
def test_every_published_policy_says_what_where_and_on_which_evidence(name: str) -> None:
    entry = published(name)
    assert entry.name == name
    assert entry.source
    assert all(len(line) > 10 for line in entry.evidence)
    for choice in map(Choice.parse, entry.choices):
        assert {choice.recipe, *choice.gemms.values()} <= {KEEP, *entry.all_recipes}
    lines = entry.lines()
    assert lines[-1].startswith(("everything", "from "))
    assert len(lines) >= len(entry.rules) + 1


def test_names_carry_a_prefix_and_the_nearest_one_is_named() -> None:
    assert is_published("published:nvfp4-12b")
    assert not is_published("policy.yaml")
    assert published("published:nvfp4-12b:scaled") == published("nvfp4-12b")
    with pytest.raises(UnknownNameError, match=r"unknown published policy 'nvfp4-12'") as caught:
        published("published:nvfp4-12")
    assert caught.value.close == ["nvfp4-12b"]


def test_where_a_file_is_needed_a_published_policy_says_how_it_becomes_one() -> None:
    with pytest.raises(PolicyError, match="names roles") as caught:
        load_policy("published:nvfp4-12b")
    assert "autoprec show published:nvfp4-12b step.json --lean" in caught.value.fix


def test_a_level_brings_its_optimizer() -> None:
    policy = published("msamp-o2").around()
    assert policy.optimizer.exp_avg == "e4m3_tensor"
    assert policy.communication.gradients == "fp8"


def test_the_tail_of_a_run_is_in_words_too() -> None:
    assert published("nvfp4-12b-tail").lines()[-1] == "from 82% of the run on: fprop bf16 where nvfp4 is"


def test_sizes_in_words() -> None:
    line = published("torchao-rowwise").lines()[-2]
    assert line == (
        "what is not an nn.Linear, or where N or K is not a multiple of 16; N <= 2048; K <= 1024; "
        "N <= 4096 and K <= 2048: keep"
    )
    assert not Sizes().text
    assert Sizes().take(3, 5)


def test_blocks_in_words() -> None:
    assert Blocks(first=1).text == "the first block"
    assert Blocks(last=8).text == "the last 8 blocks"
    assert Blocks(last_share=0.15).text == "the last 15% of the blocks"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("use: nvfp5\n", "unknown recipe 'nvfp5'; did you mean 'nvfp4'?"),
        ("use: nvfp4\nrules: [{use: bf16}]\n", "a rule names roles, blocks or both"),
        ("use: nvfp4\nrules: [{use: bf16, roles: [haed]}]\n", "'haed' is not one of"),
        ("use: nvfp4\nrules: [{use: bf16, blocks: {first: 1, last: 2}}]\n", "give one of first, last and last_share"),
        ("activations: bf16\n", "use: Field required"),
        (
            "use: nvfp4\nrules: [{use: bf16, roles: [attention.qkv]}, {use: mxfp8, roles: [attention.k]}]\n",
            r"rules\[1\]: 'attention.k' is named twice in the same blocks, in rules\[0\] as 'attention.qkv'",
        ),
        ("use: nvfp4\nrules: [{use: bf16, roles: [head, head]}]\n", "'head' is named twice"),
        ("use: nvfp4\nlayers: []\n", "layers: unknown key 'layers'"),
    ],
)
def test_a_file_that_is_wrong_says_so(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        read_published(written(tmp_path, body))


def test_one_role_may_differ_by_blocks(tmp_path: Path) -> None:
    body = "use: nvfp4\nrules: [{use: bf16, roles: [mlp.out], blocks: {last: 2}}, {use: mxfp8, roles: [mlp.out]}]\n"
    assert len(read_published(written(tmp_path, body)).rules) == 2
