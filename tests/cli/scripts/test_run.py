"""``autoprec run``: the script's output, files and exit code are its own."""

from pathlib import Path

import pytest

from tests.cli.helpers import autoprec


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Record what would be run instead of running it."""
    calls: list[tuple[object, ...]] = []

    def record(command: object, policy: object, *, backend: str, audit: object, run_steps: int | None) -> int:
        calls.append((command, policy, backend, audit, run_steps))
        code = getattr(command, "args", ("0",))[0]
        return int(code) if code.lstrip("-").isdigit() else 0

    monkeypatch.setattr("autoprec.cli.scripts.run.run_script", record)
    return calls


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("3", 3), ("-9", 137), ("-15", 143)])
def test_the_exit_code_is_the_scripts_own(ran: list[object], script: Path, code: str, expected: int) -> None:
    assert autoprec("run", script, code).code == expected
    assert len(ran) == 1


def test_policy_backend_and_audit_are_passed_on(
    ran: list[tuple[object, ...]], script: Path, policy_file: Path, tmp_path: Path
) -> None:
    audit = tmp_path / "audit.json"
    autoprec("run", "--policy", policy_file, "--backend", "emulated", "--audit", audit, "--run-steps", "9",
             script, "0")  # fmt: skip
    (_, policy, backend, where, *rest) = ran[0]
    assert getattr(policy, "default", "") == "bf16"
    assert (backend, where, rest) == ("emulated", audit, [9])


def test_an_audit_replaces_nothing_but_an_audit(
    ran: list[object], script: Path, policy_file: Path, tmp_path: Path
) -> None:
    found = autoprec("run", "--policy", policy_file, "--audit", script, script, "0")
    assert (found.code, ran) == (2, [])
    assert "is not an audit" in found.err
    assert "choose another path with --audit" in found.err
    assert script.read_text(encoding="utf-8") == "print('hello')\n"
    earlier = tmp_path / "audit.json"
    earlier.write_text('{"ok": true, "layers": [], "operators": {}, "did_not_run": {}}', encoding="utf-8")
    assert autoprec("run", "--policy", policy_file, "--audit", earlier, script, "0").code == 0


def test_an_option_that_is_gone_is_refused(ran: list[object], script: Path, policy_file: Path) -> None:
    found = autoprec("run", "--policy", policy_file, "--follow", "every=500", script)
    assert (found.code, ran) == (2, [])
    assert "--follow" in found.err


def test_shares_of_a_run_of_unknown_length_are_refused(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "phases.yaml"
    path.write_text("schema: autoprec.policy/1\nphases: [{from: 0.5, activations: bf16}]\n", encoding="utf-8")
    found = autoprec("run", "--policy", path, script)
    assert found.code == 2
    assert "--run-steps" in found.err


def test_a_bad_policy_is_found_before_the_script_starts(ran: list[object], script: Path, tmp_path: Path) -> None:
    assert autoprec("run", "--policy", tmp_path / "none.yaml", script, "0").code == 2
    assert ran == []


def test_an_audit_that_cannot_be_written_is_found_before_the_script_starts(
    ran: list[object], script: Path, tmp_path: Path
) -> None:
    assert autoprec("run", "--audit", tmp_path, script, "0").code == 2
    assert ran == []


def test_a_missing_script_names_the_nearest_file(tmp_path: Path, script: Path) -> None:
    found = autoprec("run", script.with_name("trian.py"))
    assert found.code == 2
    assert "train.py" in found.err


@pytest.mark.parametrize("late", [("--policy", "p.yaml"), ("--policy=p.yaml",)])
def test_a_policy_behind_the_script_is_refused(ran: list[object], script: Path, late: tuple[str, ...]) -> None:
    found = autoprec("run", script, *late)
    assert found.code == 2
    assert "autoprec run --policy FILE train.py" in found.err
    assert ran == []


def test_a_policy_behind_dashes_or_beside_ours_is_the_scripts(
    ran: list[object], script: Path, policy_file: Path
) -> None:
    autoprec("run", "--policy", policy_file, script, "0", "--policy", "mlp")
    autoprec("run", script, "0", "--", "--policy", "mlp")
    autoprec("run", "--", "python", script, "--policy", "mlp")
    assert len(ran) == 3
