"""What must not be written down or sent to a tracking server: secrets in arguments, texts and addresses.

A secret is known by the name it is given under (``--private-key``, ``HF_TOKEN=``), by its look (``hf_...``, a login in
an address), or because it was seen under such a name before: what :func:`remember` has found in a command line and in
the environment is hidden wherever it turns up. A password in an argument called ``--hint`` is nobody's to recognise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "[hidden]"
#: A name is split into words at these, and where a small letter is followed by a capital.
_SPLIT = re.compile(r"[-_.:/\s+\"'\\]+|(?<=[a-z0-9])(?=[A-Z])")
#: Names whose value is a secret wherever in the name this stands, its separators left out.
_STRONG = re.compile(r"passw|passphrase|passcode|secret|apikey|accesskey|privatekey|signingkey|credential|authtoken")
#: ... or whose last word is one of these (a token or a key may be of another kind, see below).
_WEAK = re.compile(r"pass|pwd|pw|pat|cred|creds|auth|authorization|bearer|cookie|jwt|otp|token|tokens|key|keys")
#: Last words of a name that says where a secret is, or what it is like.
_ABOUT = re.compile(r"(?:file|path|dir|len|length|name|type|env|var|mode|method|column|field|size|dim|count|format)s?$")
#: What a script marks text with (``pad_token``) ...
_MARKERS = re.compile(
    r"pad|bos|eos|unk|mask|sep|cls|stop|special|image|audio|video|start|end|begin|placeholder|initializer|"
    r"instance|class|prefix|suffix|modifier|trigger|sot|eot|boi|eoi|separator|delimiter"
)
#: ... looks things up by (``--text-key caption``) ...
_LOOKED_UP = re.compile(
    r"image|images|text|label|labels|input|inputs|output|target|data|dataset|sort|group|primary|foreign|"
    r"column|field|dir|json|index|batch|loss|metric|metrics|monitor|feature|features|caption|prompt|query|"
    r"state|dict|checkpoint|ckpt|model|message|messages|audio|video|source|src|tgt|id|name|cache|hash|best|"
    r"public|h5|hdf5|npz|lmdb|config|class|split|task|answer|answers|question|completion|response|content|"
    r"role|instruction|document|sentence|latent|attn|mask|score|reward|chosen|rejected|join|partition|row|"
    r"time|timestamp|graph|node|edge|log|tag|weight|weights|param|params|prng|rng|sample|url|shard|width|"
    r"height|bucket|chat|context|num|n"
)
#: ... passes over, or matches (``--num-pass 2``, ``--layer-pat``).
_PASSES = re.compile(r"num|n|first|second|single|one|two|multi|forward|backward|by|low|high|band|max")
_PATTERNS = re.compile(r"file|name|glob|regex|match|include|exclude|layer")
_COUNTERS = re.compile(r"max|min|num|n|per|total")
_COUNT = re.compile(r"[+-]?\d[\d_,.]*(?:e[+-]?\d+)?[kmbgt]?i?b?", re.IGNORECASE)
_SMALL = re.compile(r"[+-]?\d{0,4}(?:\.\d*)?")
#: Values that tell nothing: switches, marks such as ``<pad>`` and ``[MASK]``, and names of an environment's variable.
_PLAIN = re.compile(
    r"(?:true|false|none|null|yes|no|on|off|auto|default)?$|<[^<>]{1,30}>$|\[[A-Za-z_]{1,30}\d*\]$|"
    r"\$\{?[\w.:,]+\}?$|env:\w+$",
    re.IGNORECASE,
)
#: Tokens that carry their maker's prefix: Hugging Face, OpenAI, GitHub, GitLab, AWS, Google, Slack, JWT and others.
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|[sr]k_(?:live|test)_\w{10,}|gh[pousr]_[A-Za-z0-9]{20,}|"
    r"github_pat_\w{20,}|glpat-[\w-]{16,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|xox[abprs]-[\w-]{10,}|"
    r"npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|SG\.[\w-]{16,}\.[\w-]{16,}|hvs\.[\w-]{20,}|dapi[0-9a-f]{32}|"
    r"nvapi-[\w-]{20,}|gsk_\w{20,}|r8_\w{30,}|dop_v1_\w{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)
_PEM = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_HOOK = re.compile(r"(https://(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/)[^\s\"']+")
#: Schemes in which a lone name before the ``@`` is a user's or a container's.
_NAMED = r"(?!(?:ssh|git\+ssh|sftp|rsync|hdfs|s3|gs|abfss?|wasbs?|postgres|mysql|mariadb|mssql|oracle|mongodb)\b)"
_URL_LOGIN = re.compile(
    r"(\b[a-z][a-z0-9+.-]*://)[^/\s:@\"']*:(?!\d+(?:[/?#]|$))[^\s\"']*@"
    rf"|(\b{_NAMED}[a-z][a-z0-9+.-]*://)[^/\s\"'?#]+@",
    re.IGNORECASE,
)
_URL_QUERY = re.compile(r"([?&;])([\w.%-]+)(=)([^\s&;#\"']+)")
_SIGNATURE = re.compile(r"(?:^|[-_])(?:sig|signature)$", re.IGNORECASE)
_HEADER = re.compile(
    r"(?i)(\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token|digest|negotiate|apikey)\s+"
    r"|\b(?:set-)?cookie:\s*|\bbearer\s+(?=[^\s\"']*[\d._~+/=-]))([^\"'\r\n]*?[^\s\"']+)(?=[\"'\r\n]|\s|$)"
)
_LOGIN = re.compile(r"(\blogin\s+\S+\s+password\s+)(\S+)")
_NAMES = r"[\w.+-]*(?:pass|pwd|pw\b|pat|secret|key|token|auth|cred|cookie|jwt|otp|bearer)[\w-]*"
#: A value as a shell, Python or JSON writes it: quoted and bare pieces, one after the other.
_VALUE = r"""(?![{(\[])((?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\\["'].*?\\["']|\\.|[^\s,;&"'\\)}\]])+)"""
_ASSIGNED = re.compile(rf"(?i)(?<![\w.-])(-{{0,2}}{_NAMES})(\\*[\"']?\s*(?:=|:(?!//))\s*){_VALUE}")
#: ``--hf-token abc`` inside a text: an option's name and its value, apart.
_OPTION = re.compile(rf"(?i)(?<!\S)(--?{_NAMES})(\s+)(?!-){_VALUE}")
_OPTION_DASH = re.compile(r"(?i)(?<!\S)(--?[\w.-]*(?:passw|passphrase|passcode|secret)[\w-]*)(\s+)(-[A-Za-z0-9]\S*)")
_USER_OPTION = re.compile(
    r"(?i)(?<!\S)(--?(?:[\w.-]*[-_.])?(?:user|username|login|userpwd|userpass)[\s=]+[\"']?[^:\s/\"']+:)(?!\d+\b)([^\s/\"']+)"
)
_USER = re.compile(r"(?:^|[-_.])(?:user|username|login|userpwd|userpass)$", re.IGNORECASE)

#: Secrets that were seen under their names, longest first.
_known: list[str] = []


def _is_secret(name: str, value: str) -> bool:
    value = value.strip("\\\"'")
    if _PLAIN.match(value):
        return False
    words = [word.lower() for word in _SPLIT.split(name) if word]
    if not words or _ABOUT.search(words[-1]):
        return False
    if _STRONG.search("".join(words)):
        return True
    *before, last = words
    last = last.rstrip("0123456789") or (before.pop() if before else "")
    kind = before[-1] if before else ""
    if last.endswith(("token", "tokens")) and not _WEAK.fullmatch(last):
        last, kind = "token", re.sub(r"tokens?$", "", last)  # ``hftoken``, ``padtoken``
    if last in ("token", "tokens"):
        counted = last == "tokens" or any(map(_COUNTERS.fullmatch, before)) or _SMALL.fullmatch(value)
        return not _MARKERS.fullmatch(kind) and not (counted and _COUNT.fullmatch(value))
    if last in ("key", "keys"):
        return not _LOOKED_UP.fullmatch(kind) and not (last == "keys" and not before)
    if last in ("pass", "pat"):
        return not (_PASSES if last == "pass" else _PATTERNS).fullmatch(kind)
    return _WEAK.fullmatch(last) is not None


def _hide(found: re.Match[str]) -> str:
    return found[1] + found[2] + (HIDDEN if _is_secret(found[1], found[3]) else found[3])


def _hide_query(found: re.Match[str]) -> str:
    secret = _SIGNATURE.search(found[2]) or _is_secret(found[2], found[4])
    return found[1] + found[2] + found[3] + (HIDDEN if secret else found[4])


def _hide_login(found: re.Match[str]) -> str:
    login = found[0].partition("://")[2]
    return found[0] if login in ("git@", f"{HIDDEN}@") else f"{found[1] or found[2]}{HIDDEN}@"


def redact_text(text: str) -> str:
    """Hide logins in URLs, ``NAME=value`` and ``--name value`` of secret-looking names, tokens with a known prefix."""
    for secret in _known:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    text = _PEM.sub(rf"\1{HIDDEN}\2", text)
    if "://" in text:
        text = _HOOK.sub(rf"\1{HIDDEN}", _URL_LOGIN.sub(_hide_login, text))
        text = _URL_QUERY.sub(_hide_query, text)
    text = _SECRET_VALUE.sub(HIDDEN, text)
    for pattern in (_HEADER, _LOGIN, _USER_OPTION):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return _ASSIGNED.sub(_hide, _OPTION.sub(_hide, _OPTION_DASH.sub(_hide, text)))


def redact_uri(uri: str, *, hidden: str = HIDDEN) -> str:
    """Hide the login of a tracking or database address, and secrets among its parameters; the rest stays readable.

    With another word than :data:`HIDDEN` the login is left to the caller.
    """
    uri = _URL_QUERY.sub(lambda found: _hide_query(found).replace(HIDDEN, hidden), uri)
    if hidden != HIDDEN:
        return uri
    if "://" not in uri:
        return uri
    scheme, _, rest = uri.partition("://")
    netloc, slash, path = rest.partition("/")
    if "@" not in netloc:  # a password may hold a slash
        return _URL_LOGIN.sub(_hide_login, uri)
    return f"{scheme}://{HIDDEN}@{netloc.rpartition('@')[2]}{slash}{path}"


def _argument(name: str, value: str) -> str:
    """Return one value of an option, hidden if it is a secret, or in part where it is a user and a password."""
    if _is_secret(name, value):
        return HIDDEN
    user, colon, password = value.partition(":")
    if colon and user and password and "/" not in value and not password.isdigit() and _USER.search(name):
        return f"{user}:{HIDDEN}"
    return redact_text(value)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Hide the value after ``--secret-name`` and in ``--secret-name=value``; see :func:`redact_text` for the rest."""
    out: list[str] = []
    before = ""  # the option that waits for its value
    for argument in arguments:
        name, equals, value = argument.partition("=")
        strong = _STRONG.search("".join(_SPLIT.split(before)).lower()) is not None
        if before and (not argument.startswith("-") or (strong and not argument.startswith("--"))):
            out.append(_argument(before, argument))
            if before.endswith("s") and strong and out[-1] == HIDDEN:
                continue  # ``--api-keys a b``
        elif equals and name and "://" not in name and _is_secret(name, value):
            out.append(f"{name}={HIDDEN}")
        elif equals and name.startswith("-"):
            out.append(f"{name}={_argument(name, value)}")
        else:
            out.append(redact_text(argument))
        before = argument if argument.startswith("-") and not equals else ""
    return out


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
        if not value.startswith("/") and _is_secret(name, value):
            found.append(value)
    # also as Python, JSON and a shell write it, whose quotes part it
    found += [piece for value in found for piece in re.split(r"[\s\"'\\]+", value)]
    found = [value for value in found if len(value) >= 8 and not value.isalpha() and not value.isdigit()]
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
