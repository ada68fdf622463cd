"""Planted secrets of thirty-five kinds, printed as scripts print them: none survives, and ordinary text does.

Texts that took time with the square of their length once take a share of a second.
"""

from __future__ import annotations

import json
import random
import re
import string
import time

import pytest

from autoprec.support import redact
from autoprec.support.redact import HIDDEN, Redactor, redact_text, remember

_RANDOM = random.Random(0)


def _core(letters: str, count: int) -> str:
    return "".join(_RANDOM.choices(letters, k=count))


ALNUM = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
#: Tokens that are known by their look, wherever they stand.
TOKENS = {
    "hugging face": "hf_" + _core(ALNUM, 34), "openai": "sk-proj-" + _core(ALNUM, 40),
    "anthropic": "sk-ant-api03-" + _core(ALNUM, 80), "stripe": "sk_live_" + _core(ALNUM, 24),
    "github": "ghp_" + _core(ALNUM, 36), "github fine": "github_pat_" + _core(ALNUM, 50),
    "gitlab": "glpat-" + _core(ALNUM, 20), "gitlab runner": "glrt-" + _core(ALNUM, 20),
    "aws": "AKIA" + _core(string.ascii_uppercase + string.digits, 16), "google": "AIza" + _core(ALNUM, 35),
    "google oauth": "GOCSPX-" + _core(ALNUM, 28), "slack": "xoxb-" + _core(string.digits, 12) + "-" + _core(ALNUM, 24),
    "slack app": "xapp-1-" + _core(ALNUM, 40), "npm": "npm_" + _core(ALNUM, 36), "pypi": "pypi-AgEI" + _core(ALNUM, 60),
    "sendgrid": "SG." + _core(ALNUM, 22) + "." + _core(ALNUM, 43), "vault": "hvs." + _core(ALNUM, 24),
    "databricks": "dapi" + _core(HEX, 32), "nvidia": "nvapi-" + _core(ALNUM, 60), "groq": "gsk_" + _core(ALNUM, 50),
    "replicate": "r8_" + _core(ALNUM, 37), "wandb": "wandb_v1_" + _core(ALNUM, 40),
    "langsmith": "lsv2_pt_" + _core(HEX, 32) + "_" + _core(HEX, 10),
    "jwt": "eyJ" + _core(ALNUM, 30) + ".eyJ" + _core(ALNUM, 40) + "." + _core(ALNUM, 43),
}  # fmt: skip
#: Values that only their name gives away: printed as each of these.
NAMED = {
    "assignment": "WANDB_API_KEY={}", "export": "export SSHPASS='{}'", "json": '{{"api_key": "{}"}}',
    "yaml": "password: {}",
    "python": "dict(token='{}')", "tuple": "('--api-key', '{}')", "pair": "('password', '{}')",
    "list of options": "['train.py', '--hf-token', '{}', '--lr', '1']", "xml attribute": '<db password="{}"/>',
    "header": "Authorization: Bearer {}", "url": "https://me:{}@host/x", "query": "https://host/x?api_key={}&y=1",
    "unclosed": 'secret="{}', "cookie": "Cookie: session={}; path=/",
}  # fmt: skip
#: How scripts and their loggers print a line.
PRINTED = {
    "plain": "{}",
    "repr": repr("a line\n{}\nanother"),
    "coloured": "\x1b[2m2026-11-23\x1b[0m [\x1b[32minfo\x1b[0m] \x1b[1m{}\x1b[0m",
    "json": json.dumps({"message": "started with {}"}),
}
#: What training scripts print and reports need: none of it may go.
ORDINARY = [
    "step 120 loss 2.3412 tokens/s 12,345 lr 3.0e-04",
    "tokens=1024 max_tokens=2048 tokens_per_s=51234.5",
    "{'loss': 2.31, 'grad_norm': 0.98, 'tokens': 4096}",
    "fingerprint sha256:0ecdacfde044a116367551316c66f146",
    "0ecdacfde044a116367551316c66f1460ecdacfde044a116367551316c66f146",
    "commit 8ef3f56a0c1d4e2f9b7a6c5d4e3f2a1b0c9d8e7f",
    "saved /home/User7/projects/Experiment12/checkpoints/step-00012000/model.pt",
    "hf_hub_download: models--meta-llama--Llama-3.1-8B/snapshots",
    "loading s3://bucket/path/to/key.json and gs://data@x/y",
    "pad_token=<pad> eos_token=</s> tokenizer=gpt2 patience=3",
    "keys: ['input_ids', 'attention_mask', 'labels']",
    "attention layers.0.self_attn.q_proj.weight torch.Size([4096, 4096])",
    'File "/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125, in forward',
    "KeyError: 'labels'",
    "epoch 3 |####      | 40% 400/1000 [00:12<00:18, 33.2it/s, loss=0.31]",
    "first_pass=3 of 7, second_pass: 12 ms, author: me, compass: north",
]
PEM = [
    "-----BEGIN OPENSSH PRIVATE KEY-----",
    *(_core(ALNUM + "+/", 70) for _ in range(5)),
    _core(ALNUM, 33) + "=",
    "-----END OPENSSH PRIVATE KEY-----",
]
PGP = ["-----BEGIN PGP PRIVATE KEY BLOCK-----", "", *(_core(ALNUM + "+/", 64) for _ in range(4)), "=aB3d",
       "-----END PGP PRIVATE KEY BLOCK-----"]  # fmt: skip


@pytest.fixture(autouse=True)
def forgotten() -> None:
    redact._known.clear()


def test_there_are_thirty_five_kinds() -> None:
    assert len(TOKENS) + len(NAMED) + len((PEM, PGP)) >= 35


@pytest.mark.parametrize("printed", PRINTED)
@pytest.mark.parametrize("kind", TOKENS)
def test_a_token_is_known_by_its_look(kind: str, printed: str) -> None:
    for line in (TOKENS[kind], f"using {TOKENS[kind]} now"):
        shown = redact_text(PRINTED[printed].replace("{}", line))
        assert TOKENS[kind][-16:] not in shown
        assert HIDDEN in shown


@pytest.mark.parametrize("printed", ["plain", "coloured"])
@pytest.mark.parametrize("way", NAMED)
def test_a_value_is_known_by_its_name(way: str, printed: str) -> None:
    for secret in ("Zq7x7Kv3Wmmm", "correct-horse9", "Tr0ub4dor&3x" if "quote" in way else "Tr0ub4dor3x"):
        shown = redact_text(PRINTED[printed].replace("{}", NAMED[way].format(secret)))
        assert secret not in shown, shown
        assert HIDDEN in shown


def test_a_coloured_name_does_not_part_it_from_its_value() -> None:
    assert "s3cr3tvalue" not in redact_text("\x1b[36mapi_key\x1b[0m=\x1b[35ms3cr3tvalue\x1b[0m")  # structlog's default


@pytest.mark.parametrize("key", [PEM, PGP], ids=["pem", "pgp"])
@pytest.mark.parametrize("prefix", ["", "INFO:root: "])
def test_a_private_key_is_hidden_line_by_line(key: list[str], prefix: str) -> None:
    stream = Redactor()
    shown = "".join(stream(f"{prefix}{line}\n") for line in ["before", *key, "after: loss 1.0"])
    whole = redact_text("".join(f"{prefix}{line}\n" for line in ["before", *key, "after: loss 1.0"]))
    for text in (shown, whole):
        assert not [line for line in key[1:-1] if line and line in text]
        assert f"{prefix}before" in text
        assert f"{prefix}after: loss 1.0" in text


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_output_survives(text: str) -> None:
    assert redact_text(text + "\n") == text + "\n"


@pytest.mark.parametrize(
    ("value", "hidden"),
    [
        ("/wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLE", True),
        ("correcthorsebattery", True),
        ("QwErTyUiOp", True),
        ("training", False),
        ("/usr/share/keys1", False),
    ],
)
def test_values_of_the_environment(value: str, hidden: bool) -> None:
    remember([], {"MY_SECRET_KEY": value})
    assert (value not in redact_text(f"got {value} here")) is hidden


UNITS = [
    "1+", "key=", "token", "a_key ", 'key="', "key='\\\"", "://", "a://", "https://u:", "&token=", "--key ", "bearer ",
    "login a ", "cookie:", "hf_", "eyJa.", "\x1b[", "\x1b]", "-----BEGIN A ", "-----BEGIN PRIVATE KEY-----",
    "-----END PRIVATE KEY-----", "<key ", "'key', '", "'key value", "A", "\\", "key=\\", '"', "pat/", "-key-", " key:",
]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_time_is_in_proportion_to_length(unit: str) -> None:
    """300 kB of one line, and of lines; what is not in proportion takes a minute. The slowest took 0.4 s on an EPYC."""
    line = unit * (300_000 // len(unit))
    lines = (unit * (100 // len(unit) + 1) + "\n") * 3_000
    for text in (line, lines):
        began = time.process_time()
        redact_text(text)
        assert time.process_time() - began < 1.0


def test_the_line_that_stopped_a_search() -> None:
    began = time.process_time()
    assert redact_text("1+" * 50_000) == "1+" * 50_000
    assert time.process_time() - began < 0.5


def test_escapes_are_left_out_and_text_stays() -> None:
    assert redact_text("\x1b[1;31mloss\x1b[0m 2.5 \x1b]0;title\x07ok\x1b[K") == "loss 2.5 ok"
    assert not re.search("\x1b", redact_text("\x1b[2Kkey\x1b[0m"))
