"""Bad input gets a clear error and the right exit code, as early as it can be known, and nothing is lost."""

from pathlib import Path

import pytest

from tests.cli.helpers import Outcome, autoprec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm")]

HEAD = """\
import pathlib, torch
from torch import nn
pathlib.Path("started").touch()
torch.manual_seed(0)
"""
LOOP = """\
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    loss = model(torch.randn(16, 16)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
POLICY = """\
schema: autoprec.policy/1
recipes: {bf16: {format: bf16}}
layers: [{match: "encoder.layers.*", recipe: bf16}]
"""


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def script(body: str, *, steps: int = 100) -> Path:
    path = Path("train.py")
    path.write_text(HEAD + body.replace("STEPS", str(steps)), encoding="utf-8")
    return path


def search(*args: str | Path) -> Outcome:
    return autoprec("search", "-q", "--no-mlflow", *args)


def started() -> bool:
    return Path("started").exists()


# ------------------------------------------------- known from the command line alone: the script never starts
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--trials", "0"], "--trials 0 is too small"),
        (["--trials", "many"], "'many' is not a valid integer"),
        (["--target", "h1000"], "did you mean 'h100'"),
        (["--space", "hoper-fp8"], "did you mean 'hopper-fp8'"),
        (["--space", "nowhere.yaml"], "no such file"),
        (["--max-divergence", "lots"], "max-divergence"),
        (["--max-divergence", "-1%"], "max-divergence"),
        (["--budget", "soon"], "budget"),
        (["--max-memory", "big"], "max-memory"),
        (["--sampler", "knapsac"], "knapsack"),
        (["--backend", "nativ"], "did you mean 'native'"),
        (["--cost-scale", "widht=16"], "width"),
        (["--cost-scale", "width=16"], "--target h100"),
        (["--budget", "2"], "write 2s, 2m or 2h"),
        (["--output", "."], "directory, not a file"),
        (["--output", "/proc/nowhere/policy.yaml"], "its folder does not exist"),
        (["--storage", "nonsense://x"], "storage"),
        (["--no-such-option"], "come after the script"),
    ],
)
def test_a_bad_option_is_refused_before_the_script_starts(options: list[str], says: str) -> None:
    found = search(*options, script(LOOP))
    assert found.code == 2, found.err
    assert says in " ".join(found.err.split())
    assert not started()
    assert found.out == ""


def test_a_missing_script_names_the_nearest_file() -> None:
    script(LOOP)
    found = search("trian.py")
    assert found.code == 2
    assert "trian.py" in found.err
    assert "train.py" in found.err


def test_a_missing_module_and_a_missing_launcher() -> None:
    assert search("-m", "no.such.module").code in (2, 4)
    found = search("--", "torchrum", "train.py")
    assert found.code == 2
    assert "torchrum" in found.err


def test_a_space_with_an_unknown_recipe_names_the_nearest() -> None:
    Path("s.yaml").write_text(
        'schema: autoprec.space/1\nname: s\nbaseline: bf16\nchoices: [{match: "*", choices: [bf16, fp8_rowise]}]\n',
        encoding="utf-8",
    )
    found = search("--space", "s.yaml", script(LOOP))
    assert found.code == 2
    assert "fp8_rowise" in found.err
    assert "fp8_rowwise" in found.err
    assert not started()


# ------------------------------------------------- known once the script runs
def test_a_script_that_raises_shows_its_own_traceback() -> None:
    found = search(script("raise ValueError('the data are missing')"))
    assert found.code == 4
    assert "ValueError: the data are missing" in found.err
    assert "train.py" in found.err
    assert "defect of AutoPrec" not in found.err


def test_a_script_that_leaves_by_itself() -> None:
    found = search(script("import sys; print('usage: give me data'); sys.exit(2)"))
    assert found.code == 4
    assert "give me data" in found.err


def test_a_script_with_a_syntax_error() -> None:
    found = search(script("for in range(3):"))
    assert found.code == 4
    assert "SyntaxError" in found.err


def test_a_script_that_never_calls_backward() -> None:
    body = "model = nn.Linear(8, 8)\nfor _ in range(3): model(torch.randn(4, 8))"
    found = search(script(body))
    assert found.code == 4
    assert "never called backward" in found.err


def test_a_script_without_a_trainable_gemm() -> None:
    body = LOOP.replace(
        "model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))", "model = nn.LayerNorm(16)"
    )
    found = search(script(body))
    assert found.code == 3
    assert "no trainable GEMM" in found.err


def test_fewer_steps_than_asked_is_said_with_the_numbers() -> None:
    found = search("--steps", "20", "--trials", "2", "--force", script(LOOP, steps=8))
    assert found.code == 3, found.err
    assert "8" in found.err
    assert "--steps" in found.err


def test_an_existing_policy_survives_a_search_that_fails() -> None:
    mine = "schema: autoprec.policy/1\n# mine\n"
    Path("policy.yaml").write_text(mine, encoding="utf-8")
    assert search(script("raise ValueError")).code == 4
    assert Path("policy.yaml").read_text(encoding="utf-8") == mine


# ------------------------------------------------- policies
@pytest.mark.parametrize("command", ["run", "check"])
def test_a_policy_for_another_model_names_its_rules_and_the_nearest_layer(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("p.yaml").write_text(POLICY, encoding="utf-8")
    found = autoprec(command, "--policy", "p.yaml", script(LOOP))
    said = found.err + capfd.readouterr().err
    assert found.code == 1, said
    assert "encoder.layers.*" in said
    assert "match no tunable layer" in said


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("layers:", "layer:", "did you mean 'layers'"),
        ("recipe: bf16", "recipe: bf61", "did you mean 'bf16'"),
        ("format: bf16", "format: bf61", "did you mean 'bf16'"),
        ("policy/1", "policy/9", "autoprec.policy/1"),
    ],
)
def test_a_policy_that_is_not_valid_never_reaches_the_script(old: str, new: str, says: str) -> None:
    Path("p.yaml").write_text(POLICY.replace(old, new), encoding="utf-8")
    for command in ("run", "check", "verify"):
        found = autoprec(command, "--policy", "p.yaml", script(LOOP))
        assert found.code == 2
        assert says in " ".join(found.err.split())
    assert not started()
