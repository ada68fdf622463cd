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
#: Names whose value is a secret whatever it looks like; a name that goes on with ``_file`` and the like holds a place.
_SECRET_NAME = re.compile(
    r"(?:password|passwd|passphrase|secret|api[-_]?key|access[-_]?key|private[-_]?key|credential)"
    r"(?![\w-]*(?:file|path|dir|len|length|name)s?$)[\w-]*$|"
    r"(?:(?:^|[-_.])(?:pass|pwd|pat|token|key)|auth(?:orization)?|[-_]token)s?(?:[-_]?\d+)?$",
    re.IGNORECASE,
)
#: Tokens of text, which a script marks (``pad_token``) or counts (``--max-tokens 512``, ``tokens=32``).
_MARKER = re.compile(
    r"(?:^|[-_.])(?:pad|bos|eos|unk|mask|sep|cls|stop|special|image|audio)[-_]?tokens?$", re.IGNORECASE
)
_COUNTER = re.compile(r"tokens$|(?:^|[-_.])(?:max|min|num|n|per)[-_]token$", re.IGNORECASE)
_COUNT = re.compile(r"[+-]?\d[\d_,.]*(?:e[+-]?\d+)?[kmbgt]?i?b?", re.IGNORECASE)
#: Tokens that carry their maker's prefix: Hugging Face, OpenAI, GitHub, GitLab, AWS, Google, Slack, W&B-like, JWT.
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|"
    r"AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|xox[abpr]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)
_URL_LOGIN = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)
_NAMES = r"[\w.-]*(?:pass|pwd|pat|secret|key|token|auth|credential)[\w-]*"
_VALUE = r"(\"[^\"]*\"|'[^']*'|[^\s,;&]+)"
_ASSIGNED = re.compile(rf"(?i)(?<![\w.-])(-{{0,2}}{_NAMES})([\"']?\s*[=:]\s*){_VALUE}")
#: ``--hf-token abc`` inside a text: an option's name and its value, apart.
_OPTION = re.compile(rf"(?i)(?<!\S)(--?{_NAMES})(\s+)(?!-){_VALUE}")


def _is_secret(name: str, value: str) -> bool:
    name = name.strip("\"'").lstrip("-")
    if _MARKER.search(name) or _SECRET_NAME.search(name) is None:
        return False
    return not (_COUNTER.search(name) and _COUNT.fullmatch(value.strip("\"'")))


def _hide(found: re.Match[str]) -> str:
    return found[1] + found[2] + (HIDDEN if _is_secret(found[1], found[3]) else found[3])


def redact_text(text: str) -> str:
    """Hide logins in URLs, ``NAME=value`` and ``--name value`` of secret-looking names, tokens with a known prefix."""
    text = _URL_LOGIN.sub(rf"\1{HIDDEN}@", text)
    text = _SECRET_VALUE.sub(HIDDEN, text)
    return _ASSIGNED.sub(_hide, _OPTION.sub(_hide, text))


def redact_uri(uri: str) -> str:
    """Hide the login of a tracking or database address; everything else stays readable."""
    parts = urlsplit(uri)
    if not parts.scheme or "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=f"{HIDDEN}@{parts.netloc.rpartition('@')[2]}"))


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Hide the value after ``--secret-name`` and in ``--secret-name=value``; see :func:`redact_text` for the rest."""
    out: list[str] = []
    before = ""  # the option that waits for its value
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if before and not argument.startswith("--") and _is_secret(before, argument):
            out.append(HIDDEN)
        elif argument.startswith("-") and equals and _is_secret(name, value):
            out.append(f"{name}={HIDDEN}")
        else:
            out.append(redact_text(argument))
        before = argument if argument.startswith("-") and not equals else ""
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
        return HIDDEN if name and value and _is_secret(name, value) else redact_text(value)
    return value
