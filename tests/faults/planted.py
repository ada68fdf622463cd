"""Ways to pass a secret to a training script, and the search for what was stored of it.

A real search has run with all of them at once (benchmarks/results/2026-11-22_resilience_outside.md).
"""

from __future__ import annotations

import json
import urllib.parse
from pathlib import Path

__all__ = ["COMMAND_LINES", "WAYS", "leaks", "planted"]

COMMAND_LINES = Path(__file__).parent / "command_lines.txt"

#: Each is the arguments of one way; ``{}`` is the secret. ``{q}`` is one with quotes and spaces in it.
WAYS: list[list[str]] = [
    # options and their values
    ["--password", "{}"], ["--passwd", "{}"], ["--pwd", "{}"], ["--pw", "{}"], ["--pass", "{}"], ["--passphrase", "{}"],
    ["--password", "{q}"], ["--password={q}"], ["-password", "{}"], ["--PASSWORD", "{}"],
    ["--private-key", "{}"], ["--private_key={}"], ["--auth", "{}"], ["--key", "{}"], ["--api-key", "{}"],
    ["--apikey", "{}"], ["--api_key={}"], ["--access-key", "{}"], ["--secret-access-key", "{}"], ["--secret", "{}"],
    ["--client-secret={}"], ["--token", "{}"], ["--hf-token", "{}"], ["--hf_token={}"], ["--hftoken", "{}"],
    ["--use_auth_token", "{}"], ["--auth-token={}"], ["--access-token", "{}"], ["--bearer", "{}"], ["--jwt", "{}"],
    ["--otp", "{}"], ["--credential", "{}"], ["--creds={}"], ["--db-pass", "{}"], ["--wandb-key", "{}"],
    ["--wandb.api_key", "{}"], ["--github-pat", "{}"], ["--cookie", "{}"], ["--api-keys", "{}"],
    ["--encryption-key", "{}"], ["--signing_key={}"], ["--webhook-secret", "{}"],
    # spelled otherwise
    ["--apiKey", "{}"], ["--hfToken={}"], ["--clientSecret", "{}"], ["--passw", "{}"], ["--token2", "{}"],
    # hydra, environment, key=value
    ["+logger.api_key={}"], ["++trainer.auth.token={}"], ["HF_TOKEN={}"], ["MY_SERVICE_PASSWORD={q}"],
    ["SECRET_KEY_BASE={}"], ["--env", "WANDB_API_KEY={}"], ["--opts", "user=me,password={},lr=1"],
    ["--logger", "wandb:project=x,api_key={}"],
    # inside a document
    ["--json", '{"user": "me", "password": "{}"}'], ["--json", '{"auth": {"token": "{}"}, "lr": 1}'],
    ["--json", '{\\"api_key\\": \\"{}\\"}'], ["--yaml", "db: {host: h, password: {}}"],
    ["--python", "dict(api_key='{}')"],
    # headers
    ["--header", "Authorization: Bearer {}"], ["-H", "Authorization: Basic {}"], ["-H", "X-Api-Key: {}"],
    ["--header=X-Auth-Token: {}"], ["--header", "Cookie: session={}; other=1"],
    # addresses
    ["--db", "postgresql://me:{}@host/db"], ["--db", "postgresql://host/db?user=me&password={}"],
    ["--repo", "https://{}@github.com/me/x"], ["--repo", "https://me:{}@host/x"], ["--redis", "redis://:{}@host:6379/0"],
    ["--url", "https://host/x?api_key={}&y=1"], ["--url", "https://host/x?sv=1&sig={}"],
    ["--dsn", "https://{}@o1.ingest.io/1"],
    ["--url", "https://host/cb#access_token={}"],
    ["--mongo", "mongodb+srv://me:{}@host/db?x=1"], ["--data", "s3://me:{}@bucket/x"],
    # known by their look
    ["--hint", "hf_{}abcdefghijklmnop"], ["--hint", "sk-{}abcdefghijklmnop"], ["--hint", "ghp_{}abcdefghijklmnopqrst"],
    ["--hint", "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----"],
]  # fmt: skip


def planted() -> tuple[list[list[str]], list[str]]:
    """Return the ways with a secret of its own in each, and for each way what must not be found anywhere."""
    ways, secrets = [], []
    for number, way in enumerate(WAYS):
        core = f"Zq{number:03d}x7Kv{number * 7919 % 997:03d}W"
        forms = {"{}": core, "{q}": f"""a{core}"b '{core}c\\ d{core}"""}
        words = []
        for word in way:
            for place, secret in forms.items():
                word = word.replace(place, secret)
            words.append(word)
        ways.append(words)
        secrets.append(core)
    return ways, secrets


def leaks(folder: Path, secrets: list[str]) -> dict[str, list[str]]:
    """Return, for each secret that was found, the files below a folder that hold it in any spelling."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*")):
        raw = path.read_bytes() if path.is_file() else b""
        texts = [raw, str(path).encode()]
        for secret in secrets:
            spelled = {secret, json.dumps(secret)[1:-1], urllib.parse.quote(secret, safe="")}
            if any(form.encode() in text for form in spelled for text in texts):
                found.setdefault(secret, []).append(str(path.relative_to(folder)))
    return found
