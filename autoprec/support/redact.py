"""What must not be written down or sent to a tracking server: secrets in arguments, texts and addresses.

A secret is known by the name it is given under (``--private-key``, ``HF_TOKEN=``), by its look (``hf_...``, a login in
an address), or because it was seen under such a name before: what :func:`remember` has found in a command line and in
the environment is hidden wherever it turns up. A password in an argument called ``--hint`` cannot be recognised.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "[hidden]"
#: A name is split into words at these, and where a small letter is followed by a capital.
_SPLIT = re.compile(r"[-_.:/\s+\"'\\]+|(?<=[a-z0-9])(?=[A-Z])")
#: Names whose value is a secret wherever in the name this stands, its separators left out ...
_STRONG = re.compile(r"passw|passphrase|passcode|secret|apikey|accesskey|privatekey|signingkey|credential|authtoken")
#: ... or that end so ...
_ALWAYS = re.compile(r"(?:pwd|pw|creds?|auth|authorization|bearer|cookie|jwt|otp)\d*")
#: ... or so. Settings end like that, too (``--pad-token``, ``--text-key``, ``--num-pass``): there the word before it
#: decides, or the value.
_SOMETIMES = re.compile(r"(?:.*-)??(\w*?)-?(?:pass|pat|tokens?|keys?)[-\d]*")
_OF_A_LOGIN = frozenset({"", "api", "access", "auth", "hf"})
#: Last words of a name that says where a secret is, or what it is like.
_ABOUT = re.compile(r"(?:file|path|dir|len|length|name|type|env|var|mode|method|column|field|size|dim|count|format)s?$")
_COUNT = re.compile(r"[+-]?\d*[\d_,.]*(?:e[+-]?\d+)?[kmbgt]?i?b?", re.IGNORECASE)
#: What no setting looks like: letters and digits mixed, too long for ``layer_12``.
_RANDOM = re.compile(r"(?![<\[*/])(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[^\s*]{8,}")
#: Values that tell nothing: switches, marks such as ``<pad>`` and ``[MASK]``, and names of an environment's variable.
_PLAIN = re.compile(
    r"(?:true|false|none|null|yes|no|on|off|auto|default)?$|<[^<>]{1,30}>$|\[[A-Za-z_]{1,30}\d*\]$|"
    r"\$\{?[\w.:,]+\}?$|env:\w+$",
    re.IGNORECASE,
)
#: A path of plain names, as ``GPG_KEY=/usr/share/keys`` has; a key in base64 may begin with a slash as well.
_PATH = re.compile(r"(?:/[a-z0-9_.-]{1,40}){1,30}/?")
#: Tokens that carry their maker's prefix (those of gitleaks' rules that a training script may meet), at the beginning
#: of a word or after an escape such as the ``\\n`` of a ``repr``.
_TOKEN = re.compile(
    r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt]))(?=[\w.-]{20})(?:"
    r"(?:hf_|api_org_|gh[pousr]_|npm_|dapi|r8_|wandb_v1_|A(?:KIA|SIA)|[sr]k_(?:live|test)_)[A-Za-z0-9]{16,}+"
    r"|(?:sk-|github_pat_|glpat-|glrt-|AIza|ya29\.|GOCSPX-|xox[a-z]-|xapp-|pypi-|hvs\.|nvapi-|gsk_|lsv2_)[\w-]{16,}+"
    r"|(?:eyJ|SG\.)[\w.+/=-]{24,}+)"
)
_KEY = re.compile(r"-----(BEGIN|END) (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")
#: A line of a key that comes alone: base64 of the lengths that keys are wrapped to; not a digest, not a path.
_KEY_LINE = re.compile(
    r"(?=(?:.{64}|.{70}|.{76})$)(?=.*[a-z])(?=.*[A-Z])(?=.*\d)(?!.*[a-z]{8})"
    r"(?!/(?:home|root|usr|tmp|mnt|data|opt|var|etc|srv|scratch|work)/)[A-Za-z0-9+/]{60,76}={0,2}$"
)
#: ``login u password p`` of a netrc file, in one line or a line each, and ``sshpass -p p``.
_LOGIN = re.compile(
    r"(\b(?:machine|login|account|default)\s{1,9}(?:\S++\s{1,9})?password\s{1,9}|^\s{0,20}password\s{1,9}(?=\S+\s*$)"
    r"|\bsshpass\s{1,9}-p\s{0,9})(\S++)"
)
#: Lines after which a key that was begun is taken for a mention of one.
_KEY_LINES = 400
_URL_LOGIN = re.compile(
    r"((?<![a-z0-9+.-])[a-z][a-z0-9+.-]*+://)[^/\s:@\"']{0,200}+:(?!\d+(?:[/?#]|$))[^\s\"']{0,500}@"
    r"|((?<![a-z0-9+.-])https?://)[^/\s\"'?#]{1,500}@",
    re.IGNORECASE,
)
_URL_QUERY = re.compile(r"([?&;#])([\w.%-]++)(=)([^\s&;#\"']++)")
_WORDS = "pass|pwd|pw(?!m)|pat|secret|key|token|auth|cred|cookie|jwt|otp|bearer"
#: A line without any of these in small letters, and without a token, holds nothing to hide.
_TRIGGER = re.compile(rf"{_WORDS}|://|-----")
#: A name with such a word in it, from its first character on, at most 80 before the word.
_NAME = rf"(?=[\w.+-]{{0,80}}?(?:{_WORDS}))[\w.+-]++"
_QUOTED = r'"(?:\\.|[^"\\\n])*+(?:"|(?=\n)|$)|\'(?:\\.|[^\'\\\n])*+(?:\'|(?=\n)|$)'
#: A value as a shell, Python or JSON writes it: quoted and bare pieces, one after the other.
_VALUE = rf"""(?![{{(\[])((?:{_QUOTED}|\\["'][^"'\\\n]*+(?:\\["'])?|\\.|[^\s,;&"'\\)}}\]<]|<(?!/))++)"""
#: ``NAME=value``, ``"name": value``, ``Authorization: Bearer value``, and two items of a list in quotes ...
_ASSIGNED = re.compile(
    rf"(?i)(?<![\w.+-])({_NAME})"
    r"(\\?[\"']?\s{0,9}(?:=>?|:(?!//))\s{0,9}(?:(?:bearer|basic|token|digest)\s{1,9})?|[\"']\s{0,9},\s{0,9}(?=[\"']))"
    rf"{_VALUE}"
)
#: ... and ``--hf-token abc``: an option's name and its value, apart.
_OPTION = re.compile(rf"(?i)(?<!\S)(?=-)({_NAME})(\s{{1,9}})(?!-){_VALUE}")
#: Escape sequences of a terminal: a colour between a name and its value would part them.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]{0,40}[ -/]{0,9}[@-~]|\][^\x07\x1b]{0,999}(?:\x07|\x1b\\)|[@-Z\\-_])")

#: Secrets that were seen under their names, longest first.
_known: list[str] = []


def _is_secret(name: str, value: str) -> bool:
    value = value.strip("\\\"'")
    words = [word.lower() for word in _SPLIT.split(name) if word]
    if not words or _PLAIN.match(value) or _ABOUT.search(words[-1]):
        return False
    if _STRONG.search("".join(words)) or _ALWAYS.fullmatch(words[-1]):
        return True
    found = _SOMETIMES.fullmatch("-".join(words))
    if found is None or _COUNT.fullmatch(value):
        return False
    return found[1] in _OF_A_LOGIN or _RANDOM.match(value) is not None


def _hide(found: re.Match[str]) -> str:
    return found[1] + found[2] + (HIDDEN if _is_secret(found[1], found[3]) else found[3])


def _hide_query(found: re.Match[str]) -> str:
    secret = found[2].lower() in ("sig", "signature") or _is_secret(found[2], found[4])
    return found[1] + found[2] + found[3] + (HIDDEN if secret else found[4])


class Redactor:
    """Hides secrets in a text that comes piece by piece; a private key may go on from one piece to the next."""

    def __init__(self) -> None:
        self._key_lines = 0  # left of a key that was begun

    def __call__(self, text: str) -> str:
        """Return the next piece (whole lines, but for the last) with its secrets hidden.

        Takes time in proportion to its length, whatever it holds.
        """
        if "\x1b" in text:
            text = _ESCAPES.sub("", text)
        for secret in _known:
            text = text.replace(secret, HIDDEN)
        lines = _TOKEN.sub(HIDDEN, text).splitlines(keepends=True)
        return "".join(map(self._shown, lines))

    def _shown(self, line: str) -> str:
        if 60 < len(line) < 80 and _KEY_LINE.match(line.strip()):
            return _whole(line)
        return self._line(line) if self._key_lines or _TRIGGER.search(line.lower()) else line

    def _line(self, line: str) -> str:
        """Return what is shown of a line; of a private key only that there was one."""
        mark = _KEY.search(line)
        inside, self._key_lines = self._key_lines > 0, max(0, self._key_lines - 1)
        if mark is not None and mark[1] == "BEGIN":
            ends = line.find("-----END", mark.end())
            self._key_lines = 0 if ends >= 0 else _KEY_LINES
            return _whole(line, _redact_line(line[: mark.end()]) + HIDDEN + line[ends:].rstrip() * (ends >= 0))
        if mark is not None:
            self._key_lines = 0
            return f"{HIDDEN}{_redact_line(line[mark.start() :])}"
        return _whole(line) if inside else _redact_line(line)


def _whole(line: str, shown: str = HIDDEN) -> str:
    """Return what is shown for a line of which nothing is, its end kept."""
    body = line.rstrip("\r\n")
    return (shown if body.strip() else body) + line[len(body) :]


def _redact_line(text: str) -> str:
    text = _LOGIN.sub(rf"\1{HIDDEN}", redact_uri(text))
    return _OPTION.sub(_hide, _ASSIGNED.sub(_hide, text))


def redact_text(text: str) -> str:
    """Hide logins in URLs, ``NAME=value`` and ``--name value`` of secret-looking names, tokens with a known prefix.

    Escape sequences of a terminal are left out. Takes time in proportion to the text's length, whatever it holds.
    """
    return Redactor()(text)


def redact_uri(uri: str, *, hidden: str = HIDDEN) -> str:
    """Hide the login of a tracking or database address, and secrets among its parameters; the rest stays readable.

    With another word than :data:`HIDDEN` the login is left to the caller.
    """
    if "://" not in uri:
        return uri
    uri = _URL_QUERY.sub(lambda found: _hide_query(found).replace(HIDDEN, hidden), uri)
    return uri if hidden != HIDDEN else _URL_LOGIN.sub(rf"\1\2{HIDDEN}@", uri)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Hide the value after ``--secret-name`` and in ``--secret-name=value``; see :func:`redact_text` for the rest."""
    out: list[str] = []
    before = ""  # the option that waits for its value
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if before and not argument.startswith("-") and _is_secret(before, argument):
            out.append(HIDDEN)
        elif equals and name and "://" not in name and _is_secret(name, value):
            out.append(f"{name}={HIDDEN}")
        else:
            out.append(redact_text(argument))
        before = argument if argument.startswith("-") and not equals else ""
    return out


def _is_word(value: str) -> bool:
    """Say whether a value may as well be a word of the language, or a number."""
    mixed = value != value.lower() and value[1:] != value[1:].lower() and value != value.upper()
    return value.isdigit() or (value.isalpha() and len(value) < 12 and not mixed)


def remember(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Hide from now on, wherever it turns up, what is a secret in a command line or the environment.

    A value that may as well be a word of the language is hidden in its own place only.
    """
    found = []
    for argument, shown in zip(arguments, redact_arguments(arguments), strict=True):
        if shown != argument and HIDDEN in shown:
            head, _, tail = shown.partition(HIDDEN)
            found.append(argument[len(head) : len(argument) - len(tail)])
    for name, value in (os.environ if environment is None else environment).items():
        if not _PATH.fullmatch(value) and _is_secret(name, value):
            found.append(value)
    # also as Python, JSON and a shell write it, whose quotes part it
    found += [piece for value in found for piece in re.split(r"[\s\"'\\]+", value)]
    found = [value for value in found if len(value) >= 8 and not _is_word(value)]
    _known[:] = sorted({*_known, *found}, key=len, reverse=True)


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
