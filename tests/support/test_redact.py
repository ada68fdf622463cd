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
        (["--tokens", "s3cret", "--hf-tokens=a1b2"], ["--tokens", HIDDEN, f"--hf-tokens={HIDDEN}"]),
        (["--token", "12345", "--text-key", "a_caption"], ["--token", "12345", "--text-key", "a_caption"]),
        (["--wandb.api_key", "abc", "-v"], ["--wandb.api_key", HIDDEN, "-v"]),
        (["--new-token", "abc12defg", "--password-hash=x"], ["--new-token", HIDDEN, f"--password-hash={HIDDEN}"]),
        (["SECRET_KEY_BASE=abc", "--max-token=abc12defg"], [f"SECRET_KEY_BASE={HIDDEN}", f"--max-token={HIDDEN}"]),
        (["HF_TOKEN=abc", "MY_TOKEN_2=abc12defg"], [f"HF_TOKEN={HIDDEN}", f"MY_TOKEN_2={HIDDEN}"]),
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


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://host/db?user=me&password=pw", f"postgresql://host/db?user=me&password={HIDDEN}"),
        ("https://tok@host/x", f"https://{HIDDEN}@host/x"),
        ("http://me:p/w@host:5000/x", f"http://{HIDDEN}@host:5000/x"),
        ("http://host:5000/x@1", "http://host:5000/x@1"),
    ],
)
def test_an_address_shows_no_login_and_no_secret_parameter(uri: str, shown: str) -> None:
    assert redact_uri(uri) == redact_text(uri) == redact_uri(shown) == shown


@pytest.mark.parametrize("uri", ["ssh://git@github.com/a/b", "abfss://data@acc.dfs.core.windows.net/x", "s3://a@b/c"])
def test_a_name_in_an_address_is_not_a_login(uri: str) -> None:
    assert redact_text(uri) == uri


def test_text_of_failures() -> None:
    text = redact_text("GET http://u:p@h/ failed, token=abc123 and AKIA" + "A" * 16 + " of --api-key s3cr3t -v")
    assert "abc123" not in text
    assert "u:p" not in text
    assert "s3cr3t" not in text
    assert text.endswith("-v")
    assert "AKIA" not in text


#: A switch is not a secret, whatever its name.
PLAIN = {"true", "false", "none", "null", "yes", "auto", "off", "default"}
#: What training scripts are given: none of it is a secret, and a resume command without it cannot be run.
ORDINARY = [
    ["--max-tokens", "512", "--tokens=4"],
    ["--cost-scale", "width=16,depth=4,tokens=32"],
    ["--tokenizer", "gpt2", "tokenizer=gpt2", "--tokenizer_name=bert"],
    ["--pad-token", "<pad>", "eos_token=</s>", "--max_new_tokens", "20"],
    ["--total-train-tokens=1.5B", "--tokens", "10_000", "--context_tokens", "4k"],
    ["--num-key-value-heads", "4", "--keyword=x", "--compass", "north", "--patience", "3", "--author", "me"],
    ["--password-file", "/run/p", "api_key_path=keys", "--max-token", "8"],
    ["--passes", "60", "model.num_tokens=8", "data.path=s3://bucket/x"],
]


@pytest.mark.parametrize("arguments", ORDINARY, ids=" ".join)
def test_ordinary_arguments_are_left_alone(arguments: list[str]) -> None:
    assert redact_arguments(arguments) == arguments
    assert redact_text(" ".join(arguments)) == " ".join(arguments)


@given(
    st.sampled_from(["tokens", "max-tokens", "num_tokens", "tokens-per-step", "data.max_tokens"]),
    st.integers(0, 10**12),
)
def test_a_number_of_tokens_is_never_hidden(name: str, count: int) -> None:
    for words in ([f"--{name}", str(count)], [f"--{name}={count}"], [f"{name}={count}"]):
        assert redact_arguments(words) == words
        assert redact_text(" ".join(words)) == " ".join(words)


@given(
    st.sampled_from(["--token", "--hf-token", "--api-key", "--wandb_api_key", "--password", "--client.secret"]),
    st.from_regex(r"[A-Za-z0-9]{3,30}", fullmatch=True).filter(
        lambda text: not text.isdigit() and text.lower() not in PLAIN
    ),
)
def test_a_secret_is_hidden_however_it_is_written(name: str, secret: str) -> None:
    bare = name.lstrip("-")
    for words in ([name, secret], [f"{name}={secret}"]):
        assert HIDDEN in redact_arguments(words)[-1]
        assert secret not in redact_arguments(words)[-1].replace(bare, "").replace(HIDDEN, "")
    for text in (f"{name} {secret}", f"{bare}={secret}", f'{{"{bare}": "{secret}"}}'):
        assert HIDDEN in redact_text(text)


@given(st.text(min_size=1, max_size=40))
def test_redaction_is_stable(text: str) -> None:
    assert redact_text(redact_text(text)) == redact_text(text)


KEY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"


@pytest.mark.parametrize(
    "line",
    [
        KEY,
        f"  {KEY}\n",
        KEY + "MzEfYy",  # OpenSSH wraps at 70
        KEY + "MzEfYyjiWA4R",  # MIME at 76
        "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAABlwAAAAdzc2gtcn",
    ],
)
def test_a_line_of_a_private_key_is_known_by_itself(line: str) -> None:
    assert redact_text(line).strip() == HIDDEN
    assert redact_text(line).endswith("\n") == line.endswith("\n")


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("machine api.wandb.ai login user password pa55w0rd", "pa55w0rd"),
        ("machine h password pa55w0rd login u", "pa55w0rd"),
        ("default login u password hunter", "hunter"),
        ("  password hunter", "hunter"),
        ("login u\npassword hunter\n", "hunter"),
        ("sshpass -p hunter ssh host", "hunter"),
    ],
)
def test_lines_of_a_netrc_are_known(line: str, secret: str) -> None:
    assert secret not in redact_text(line)
    assert HIDDEN in redact_text(line)


@pytest.mark.parametrize(
    "line",
    [
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",  # a digest
        "/home/user/projects/Experiments2024/runs/checkpoints/model/step/10000",
        "=" * 64,
        "the password of the machine was not asked for",
        "machine learning",
        "step 12 loss 0.25 lr 1e-3 tokens 4096 time 0.12 memory 12345 epoch 1",
    ],
)
def test_other_lines_stay_as_they_are(line: str) -> None:
    assert redact_text(line) == line
