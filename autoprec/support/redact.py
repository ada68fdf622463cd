"""What must not be written down or sent to a tracking server: secrets in arguments, texts and addresses.

Names and shapes are known patterns; a password in an argument called ``--hint`` is nobody's to recognise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

__all__ = ["HIDDEN", "redact", "redact_arguments", "redact_text", "redact_uri"]

HIDDEN = "[hidden]"
_SECRET_NAME = re.compile(
    r"(pass(word|wd|phrase)?|secret|api[-_]?key|access[-_]?key|private[-_]?key|auth(orization)?|"
    r"(?:^|[-_.])(token|key|pat|pwd)|[-_]token|credential)s?$",
    re.IGNORECASE,
)
#: Tokens that carry their maker's prefix: Hugging Face, OpenAI, GitHub, GitLab, AWS, Google, Slack, W&B-like, JWT.
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|"
    r"AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|xox[abpr]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)
_URL_LOGIN = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"(?i)\b([\w.-]*(?:password|passwd|secret|api[-_]?key|access[-_]?key|token|credential)[\w-]*)(\s*[=:]\s*)"
    r"(\"[^\"]*\"|'[^']*'|[^\s,;&]+)"
)
#: ``--hf-token abc`` inside a text: an option's name and its value, apart.
_OPTION = re.compile(
    r"(?i)(?<!\S)(--?[\w.-]*(?:password|passwd|passphrase|secret|api[-_]?key|access[-_]?key|token|credential)s?)"
    r"(\s+)(?!-)(\"[^\"]*\"|'[^']*'|[^\s,;&]+)"
)


def _is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(name.lstrip("-")) is not None


def redact_text(text: str) -> str:
    """Hide logins in URLs, ``NAME=value`` and ``--name value`` of secret-looking names, tokens with a known prefix."""
    text = _URL_LOGIN.sub(rf"\1{HIDDEN}@", text)
    text = _SECRET_VALUE.sub(HIDDEN, text)
    text = _OPTION.sub(lambda m: m[1] + m[2] + HIDDEN, text)
    return _ASSIGNED.sub(lambda m: m[1] + m[2] + HIDDEN, text)


def redact_uri(uri: str) -> str:
    """Hide the login of a tracking or database address; everything else stays readable."""
    parts = urlsplit(uri)
    if not parts.scheme or "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=f"{HIDDEN}@{parts.netloc.rpartition('@')[2]}"))


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Hide the value after ``--secret-name`` and in ``--secret-name=value``; see :func:`redact_text` for the rest."""
    out: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("--"):
            out.append(HIDDEN)
        elif argument.startswith("-") and equals and _is_secret_name(name):
            out.append(f"{name}={HIDDEN}")
        else:
            out.append(redact_text(argument))
        hide_next = argument.startswith("-") and not equals and _is_secret_name(argument)
    return out


def redact(value: Any, name: str = "") -> Any:
    """Return plain data with secrets hidden: by key name, by look, and in lists read as a command line."""
    if isinstance(value, Mapping):
        return {str(key): redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(item, str) for item in value):
            return redact_arguments(value)
        return [redact(item, name) for item in value]
    if isinstance(value, str):
        return HIDDEN if name and value and _is_secret_name(name) else redact_text(value)
    return value
