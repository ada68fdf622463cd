"""What is wrong with the options alone is said before the script is started."""

from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import AutoPrecError, FileError, SpaceError, UnknownNameError, UsageError
from autoprec.tuning.checks import check_early, check_scale
from autoprec.tuning.options import SearchOptions


def options(tmp_path: Path, **values: Any) -> SearchOptions:
    return SearchOptions(command=("train.py",), **{"output": str(tmp_path / "policy.yaml"), **values})


def test_good_options_pass_and_nothing_is_written(tmp_path: Path) -> None:
    check_early(options(tmp_path))
    full = {"target": "h100", "space": "hopper-fp8", "cost_scale": "width=16", "backend": "emulated"}
    check_early(options(tmp_path, **full, storage=f"sqlite:///{tmp_path}/x.db"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"target": "h1000"}, UnknownNameError, "did you mean 'h100'"),
        ({"space": "hoper-fp8"}, UnknownNameError, "did you mean 'hopper-fp8'"),
        ({"space": "./nowhere.yaml"}, SpaceError, "no such file"),
        ({"cost_scale": "widht=3"}, UsageError, "did you mean 'width'"),
        ({"cost_scale": "width=-3"}, UsageError, "width"),
        ({"cost_scale": "width=16"}, UsageError, "without --target"),
        ({"backend": "nativ"}, UnknownNameError, "did you mean 'native'"),
        ({"storage": "nonsense://x"}, UsageError, "not a database URL"),
        ({"storage": "not a url"}, UsageError, "not a database URL"),
        ({"output": "/proc/nowhere/p.yaml"}, FileError, "its folder does not exist"),
    ],
)
def test_bad_options(
    tmp_path: Path, values: dict[str, Any], error: type[AutoPrecError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoprec.tuning.workers.slots.visible_gpus", lambda environment: ())
    with pytest.raises(error, match=says) as caught:
        check_early(options(tmp_path, **values))
    assert caught.value.exit_code == 2


def test_a_scale_of_the_device_at_hand_is_fine_where_that_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.tuning.workers.slots.visible_gpus", lambda environment: ("0",))
    assert check_scale("width=16", "auto").width == 16


def test_nothing_but_a_policy_is_replaced_by_one(tmp_path: Path) -> None:
    script, earlier, empty = tmp_path / "train.py", tmp_path / "policy.yaml", tmp_path / "empty.yaml"
    script.write_text("import torch\n")
    (tmp_path / "config.yaml").write_text("width: 3\n")
    earlier.write_text("schema: autoprec.policy/1\ndefault: edited by hand\n")
    empty.touch()
    for other in (script, tmp_path / "config.yaml"):
        with pytest.raises(FileError, match="is not an AutoPrec policy") as caught:
            check_early(options(tmp_path, output=str(other)))
        assert caught.value.exit_code == 2
    assert script.read_text() == "import torch\n"
    for policy in (earlier, empty, tmp_path / "none.yaml"):
        check_early(options(tmp_path, output=str(policy)))
