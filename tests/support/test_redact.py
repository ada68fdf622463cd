"""Secrets stay here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.support.redact import HIDDEN, redact, redact_arguments, redact_text, redact_uri


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--api-key", "abc", "--lr", "1"], ["--api-key", HIDDEN, "--lr", "1"]),
        (["--hf_token=abc"], [f"--hf_token={HIDDEN}"]),
        (["--token", "abc"], ["--token", HIDDEN]),
        (["--password=x", "train.py"], [f"--password={HIDDEN}", "train.py"]),
        (["--tokens", "512", "--max-tokens=4"], ["--tokens", HIDDEN, "--max-tokens=[hidden]"]),
        (["--data", "s3://user:pw@host/x"], ["--data", f"s3://{HIDDEN}@host/x"]),
        (["WANDB_API_KEY=abc"], [f"WANDB_API_KEY={HIDDEN}"]),
        (["--model", "hf_" + "a" * 30], ["--model", HIDDEN]),
        (["--epochs", "3"], ["--epochs", "3"]),
    ],
)
def test_arguments(arguments: list[str], expected: list[str]) -> None:
    assert redact_arguments(arguments) == expected


def test_nested_settings() -> None:
    found = redact({"auth": {"password": "x"}, "lr": 0.1, "secret": "", "argv": ["--key", "y"], "n": None})
    assert found == {"auth": {"password": HIDDEN}, "lr": 0.1, "secret": "", "argv": ["--key", HIDDEN], "n": None}


def test_addresses_keep_what_is_no_secret() -> None:
    assert redact_uri("http://me:pw@host:5000/x") == f"http://{HIDDEN}@host:5000/x"
    assert redact_uri("sqlite:////a/b.db") == "sqlite:////a/b.db"


def test_text_of_failures() -> None:
    text = redact_text("GET http://u:p@h/ failed, token=abc123 and AKIA" + "A" * 16 + " of --api-key s3cr3t -v")
    assert "abc123" not in text
    assert "u:p" not in text
    assert "s3cr3t" not in text
    assert text.endswith("-v")
    assert "AKIA" not in text


@given(st.text(min_size=1, max_size=40))
def test_redaction_is_stable(text: str) -> None:
    assert redact_text(redact_text(text)) == redact_text(text)
