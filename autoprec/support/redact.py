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
_WEAK = re.compile(
    r"(?:ssh|db|pg|my|sudo|smtp|mail|ldap|root|admin)?pass|pwd|pw|pat|cred|creds|auth|authorization|bearer|cookie|jwt|otp|token|tokens|key|keys"
)
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
#: Tokens that carry their maker's prefix, by the characters that follow it; in braces the fewest of them. Prefixes and
#: lengths are those of gitleaks' rules (github.com/gitleaks/gitleaks, config/gitleaks.toml, MIT) and of the makers.
_PREFIXED = {
    "A-Za-z0-9": (
        *("hf_{16}", "api_org_{16}", "[sr]k_(?:live|test)_{10}", "gh[pousr]_{20}", "npm_{30}", "dapi{32}", "r8_{30}"),
        *(
            "do[opr]_v1_{30}",
            "shp(?:at|ca|pa|ss)_{16}",
            "AGE-SECRET-KEY-1{20}",
            "pul-{30}",
            "rubygems_{32}",
            "ntn_{30}",
        ),
        *("lin_api_{30}", "secret_{40}", "EAAC{40}", "CLOJARS_{30}", "sbp_{30}", "fw_{20}", "phc_{30}", "pplx-{30}"),
        *("xai-{30}", "whsec_{16}", "wandb_v1_{10}", "PMAK-{20}", r"dp\.(?:ct|pt|st|sa|scim|audit)\.{16}"),
        "A(?:KIA|SIA|BIA|CCA){16}",
    ),
    "A-Za-z0-9_-": (
        *("sk-{16}", "github_pat_{20}", "gl(?:pat|rt|dt|ptt|cbt|ft|soat|agent|oas|imt|ffct)-{16}", "AIza{30}"),
        *(r"ya29\.{20}", "GOCSPX-{16}", "xox[abeoprs]-{10}", "xapp-{10}", "xwfp-{10}", "pypi-{30}", r"hv[sbr]\.{20}"),
        *("nvapi-{20}", "gsk_{20}", "lsv2_(?:pt|sk)_{10}", "dckr_pat_{16}", "figd_{30}", "glsa_{20}", "glc_{20}"),
        *("tskey-{16}", "tgp_v1_{16}", "AT[AC]TT3{30}", "AGE-PLUGIN-{20}", "wandb_v1_{10}"),
    ),
    "A-Za-z0-9_.+/=-": (r"SG\.{32}", "eyJ{24}", "sntry[su]_{30}"),
}
#: What may stand before a token: no letter, digit or dash; but an escape such as the ``\\n`` of a ``repr``.
_BEFORE = r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrtbf]))"
_SECRET_VALUE = re.compile(
    rf"{_BEFORE}(?:"
    + "|".join(
        re.sub(r"\{(\d+)\}$", rf"[{follows}]{{\1,}}+", prefix)
        for follows, prefixes in _PREFIXED.items()
        for prefix in prefixes
    )
    + ")"
)
_KEY_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")
_KEY_END = re.compile(r"-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")
#: A line of a key whose beginning was cut off: base64 of the lengths that keys are wrapped to; no digest, no path.
_KEY_LINE = re.compile(
    r"(?=(?:.{64}|.{70}|.{76})$)(?=.*[a-z])(?=.*[A-Z])(?=.*\d)(?!.*[a-z]{8})(?!/(?:home|root|usr|tmp|mnt|data|opt|var|etc|srv|scratch|work)/)[A-Za-z0-9+/]{60,76}={0,2}$"
)
#: Lines after which a key that was begun is taken for a mention of one.
_KEY_LINES = 400
_HOOK = re.compile(r"(https://(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/)[^\s\"']+")
#: Schemes in which a lone name before the ``@`` is a user's or a container's.
_NAMED = r"(?!(?:ssh|git\+ssh|sftp|rsync|hdfs|s3|gs|abfss?|wasbs?|postgres|mysql|mariadb|mssql|oracle|mongodb)\b)"
_URL_LOGIN = re.compile(
    r"((?<![a-z0-9+.-])[a-z][a-z0-9+.-]*+://)[^/\s:@\"']{0,200}+:(?!\d+(?:[/?#]|$))[^\s\"']{0,500}@"
    rf"|((?<![a-z0-9+.-]){_NAMED}[a-z][a-z0-9+.-]*+://)[^/\s\"'?#]{{1,500}}@",
    re.IGNORECASE,
)
_URL_QUERY = re.compile(r"([?&;#])([\w.%-]++)(=)([^\s&;#\"']++)")
_SIGNATURE = re.compile(r"(?:^|[-_])(?:sig|signature)$", re.IGNORECASE)
_HEADER = re.compile(
    r"(?i)(\b(?:proxy-)?authorization[\"']?\s{0,9}[:=]\s{0,9}[\"']?(?:bearer|basic|token|digest|negotiate|apikey)\s{1,9}"
    r"|\bbearer\s{1,9}(?=[^\s\"']{0,40}[\d._~+/=-]))([^\"'\s]++)"
)
_COOKIE = re.compile(r"(?i)(\b(?:set-)?cookie:\s{0,9})([^\"'\r\n]++)")
_LOGIN = re.compile(r"(\blogin\s{1,9}\S++\s{1,9}password\s{1,9}|\bsshpass\s{1,9}-p\s{0,9})(\S++)")
_WORDS = "pass|pwd|pw(?!m)|pat|secret|key|token|auth|cred|cookie|jwt|otp|bearer"
#: A name with such a word in it, from its first character on, at most 80 before the word.
_NAME = rf"(?=[\w.+-]{{0,80}}?(?:{_WORDS}))[\w.+-]++"
_QUOTED = r'"(?:\\.|[^"\\\n])*+(?:"|(?=\n)|$)|\'(?:\\.|[^\'\\\n])*+(?:\'|(?=\n)|$)'
#: A value as a shell, Python or JSON writes it: quoted and bare pieces, one after the other.
_VALUE = rf"""(?![{{(\[])((?:{_QUOTED}|\\["'][^"'\\\n]*+(?:\\["'])?|\\.|[^\s,;&"'\\)}}\]<]|<(?!/))++)"""
_ASSIGNED = re.compile(rf"(?i)(?<![\w.+-])({_NAME})(\\?[\"']?\s{{0,9}}(?:=>?|:(?!//))\s{{0,9}}){_VALUE}")
#: ``--hf-token abc`` inside a text: an option's name and its value, apart.
_OPTION = re.compile(rf"(?i)(?<!\S)(?=-)({_NAME})(\s{{1,9}})(?!-){_VALUE}")
_OPTION_DASH = re.compile(
    r"(?i)(?<!\S)(?=-)([\w.-]*(?:passw|passphrase|passcode|secret)[\w-]*+)(\s{1,9})(-[A-Za-z0-9]\S*+)"
)
_USER_OPTION = re.compile(
    r"(?i)(?<!\S)(--?(?=[\w.-]{0,80}(?:user|username|login|userpwd|userpass)\b)[\w.-]++[\s=]{1,9}[\"']?[^:\s/\"']++:)"
    r"(?!\d+\b)([^\s/\"']++)"
)
#: A name and its value as two items: of a list of options, a tuple, an XML element, or ``name: N, value: V``.
_PAIRS = (
    re.compile(
        rf"""(?i)(?<=["'\s=:])({_NAME})(["']?\s{{0,9}}[,;]?\s{{0,9}}["']?value["']?\s{{0,9}}[:=]\s{{0,9}}["']?)([^\s"',}}<]++)"""
    ),
    re.compile(rf"""(?i)(?<=["'])({_NAME})(["']\s{{0,9}},\s{{0,9}}["'])((?:\\.|[^"'\\\n])++)"""),
    re.compile(rf"(?i)(?<=<)({_NAME})((?:\s[^<>\n]{{0,200}})?>)([^<\n]++)"),
)
#: Escape sequences of a terminal: a colour between a name and its value would part them.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]{0,40}[ -/]{0,9}[@-~]|\][^\x07\x1b]{0,999}(?:\x07|\x1b\\)|[@-Z\\-_])")
#: A line without any of these in small letters holds nothing that a pattern would hide.
_TRIGGER = re.compile(
    rf"{_WORDS}|sig|user|login|://|hf_|api_org|sk-|_live_|_test_|whsec|gh[pousr]_|github_|gl[a-z]{{2,6}}-|aiza|ya29|"
    r"gocspx|xox|xapp|xwfp|npm_|pypi-|sg\.|hv[sbr]\.|dapi|nvapi|gsk_|r8_|_v1_|shp[acs]|lsv2|-----|age-|pul-|dckr|"
    r"ruby|lin_|ntn_|figd|pmak|eaac|sntry|glsa|glc_|tskey|dp\.|clojars|sbp_|nrak|phc_|pplx|xai-|fw_|at[ac]tt3|eyj|"
    r"a(?:kia|sia|bia|cca)"
)
#: Characters of such lines in one text after which further ones are hidden whole: nothing prints so much of them.
_MOST = 1_000_000

_USER = re.compile(r"(?:^|[-_.])(?:user|username|login|userpwd|userpass)$", re.IGNORECASE)

#: A path of plain names, as ``GPG_KEY=/usr/share/keys`` has; a key in base64 may begin with a slash as well.
_PATH = re.compile(r"(?:/[a-z0-9_.-]{1,40}){1,30}/?")

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
            if secret in text:
                text = text.replace(secret, HIDDEN)
        left, out = _MOST, []
        for line in text.splitlines(keepends=True):
            if 60 < len(line) < 80 and _KEY_LINE.match(line.strip()):
                line = _whole(line)
            elif self._key_lines or _TRIGGER.search(line.lower()):
                left -= len(line)
                line = self._redacted(line) if left > 0 else _whole(line)
            out.append(line)
        return "".join(out)

    def _redacted(self, line: str) -> str:
        """Return what is shown of a line: of a private key only its first and its last."""
        begin = _KEY_BEGIN.search(line) if "-----BEGIN" in line else None
        end = _KEY_END.search(line) if "-----END" in line else None
        inside, self._key_lines = self._key_lines > 0, max(0, self._key_lines - 1)
        if end is not None and (begin is None or begin.start() < end.start()):
            self._key_lines = 0
            head = _redact_line(line[: begin.end()]) if begin is not None else ""
            return f"{head}{HIDDEN}{end[0]}{_redact_line(line[end.end() :])}"
        if begin is not None:
            self._key_lines = _KEY_LINES
            return _whole(line, f"{_redact_line(line[: begin.end()])}{HIDDEN}")
        return _whole(line) if inside else _redact_line(line)


def _whole(line: str, shown: str = HIDDEN) -> str:
    """Return what is shown for a line of which nothing is, its end kept."""
    body = line.rstrip("\r\n")
    return (shown if body.strip() else body) + line[len(body) :]


def _redact_line(text: str) -> str:
    if "://" in text:
        text = _HOOK.sub(rf"\1{HIDDEN}", _URL_LOGIN.sub(_hide_login, text))
        text = _URL_QUERY.sub(_hide_query, text)
    text = _SECRET_VALUE.sub(HIDDEN, text)
    for pattern in (_HEADER, _COOKIE, _LOGIN, _USER_OPTION):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    for pattern in (_OPTION_DASH, _OPTION, _ASSIGNED, *_PAIRS):
        text = pattern.sub(_hide, text)
    return text


def redact_text(text: str) -> str:
    """Hide logins in URLs, ``NAME=value`` and ``--name value`` of secret-looking names, tokens with a known prefix.

    Escape sequences of a terminal are left out. Takes time in proportion to the text's length, whatever it holds.
    """
    return Redactor()(text)


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
