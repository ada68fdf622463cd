"""From documents to policies and back: loading, saving, and errors a person can act on.

The first line of a file that AutoPrec wrote with evidence tells a damaged file from a chosen one. A policy cut off in
the middle is often a smaller valid policy, and one flipped bit is often another valid recipe; both would train quietly
with the evidence of a policy they are not. The line is a comment, so that the schema knows nothing of it, and it comes
first, so that a file cut anywhere has lost its contents before it has lost the line. It is over what the file says, not
how: comments and layout may change, values may not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TypeVar

import yaml

from autoprec.errors import FileError, PolicyError
from autoprec.policy.schema import SCHEMA, Policy
from autoprec.support.files import check_kind, checksum, parse_document, read_text, write_atomic
from autoprec.support.validation import cut, validated

P = TypeVar("P", bound=Policy)

#: What a policy's name begins with that is not a file: :mod:`autoprec.policy.library`.
PUBLISHED = "published:"
#: A policy with one rule for each of 10,000 layers fits; what does not is not a policy, nor worth a second's time.
MAX_POLICY_BYTES = 1024 * 1024
_LINE = re.compile(r"# checksum sha256:([0-9a-f]{16}) \(after an edit by hand, delete this line\)\s*")
#: A comment that holds two of these was a checksum line, whatever happened to the rest of it.
_TRACES = ("checksum", "sha256:", "edit by hand", "delete this line")


def policy_from_dict(document: dict[str, Any], *, where: str = "policy", cls: type[P] = Policy) -> P:  # type: ignore[assignment]
    """Validate a plain-data policy.

    Raises:
        PolicyError: an unknown key, value, recipe or combination; the message names it and the nearest valid one.
    """
    if document.get("schema") != "autoprec.policy/1":
        raise PolicyError(
            f"schema is {cut(repr(document.get('schema')))}, not 'autoprec.policy/1'",
            where=where,
            fix=(
                "a later version wrote it: upgrade autoprec, which here reads autoprec.policy/1"
                if str(document.get("schema")).startswith("autoprec.policy/")
                else "this version of autoprec reads autoprec.policy/1; is it a policy file?"
            ),
        )
    return validated(cls, document, where=where, about="policy-format", error=PolicyError)


def parse_policy(text: str, *, where: str = "policy", cls: type[P] = Policy) -> P:  # type: ignore[assignment]
    """Parse a policy from YAML or JSON text; see :func:`policy_from_dict`."""
    try:
        document = parse_document(text, where=where, most_bytes=MAX_POLICY_BYTES)
    except FileError as error:
        raise PolicyError(error.what, where=error.where, fix=error.fix) from error
    verify_checksum(text, document, where=where)
    return policy_from_dict(document, where=where, cls=cls)


def load_policy(path: Path | str, *, cls: type[P] = Policy) -> P:  # type: ignore[assignment]
    """Load a policy file (YAML or JSON). Data only: nothing is imported or run.

    Raises:
        PolicyError: missing, unreadable, not a valid policy, or not what its checksum line says; or the name of a
            published policy, which is one of no model yet.
    """
    if str(path).startswith(PUBLISHED):
        fix = f"autoprec inspect --json train.py > step.json, then: autoprec show {path} step.json --lean > policy.yaml"
        raise PolicyError("a published policy names roles, and a file with layer names is needed here", fix=fix)
    try:
        text = read_text(path, most_bytes=MAX_POLICY_BYTES)
    except FileError as error:
        raise PolicyError(error.what, where=error.where, fix=error.fix) from error
    return parse_policy(text, where=str(path), cls=cls)


class _Top(dict[str, Any]):
    """The outermost mapping: in block style whatever its length."""


#: Of libyaml, eight times faster, where PyYAML was built with it.
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _PolicyDumper(_Dumper):  # type: ignore[misc]
    """Block style with short leaves in flow style, as docs/policy-format.md writes policies."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _is_short(value: Any) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    items = list(value.values()) if isinstance(value, dict) else value
    return all(not isinstance(i, (dict, list)) or (isinstance(i, dict) and len(i) <= 3) for i in items)


def _on_one_line(data: dict[str, Any]) -> str:
    return str(yaml.dump(data, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10_000)).strip()


def _represent_mapping(dumper: yaml.SafeDumper, data: dict[str, Any]) -> yaml.MappingNode:
    flow = not data or (type(data) is dict and _is_short(data) and len(_on_one_line(data)) <= 110)
    return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=flow)


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.SequenceNode:
    flow = all(not isinstance(item, (dict, list)) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_PolicyDumper.add_representer(dict, _represent_mapping)
_PolicyDumper.add_representer(_Top, _represent_mapping)
_PolicyDumper.add_representer(list, _represent_list)
_PolicyDumper.add_representer(tuple, lambda d, v: _represent_list(d, list(v)))


def dump_yaml(document: dict[str, Any]) -> str:
    """Return the YAML text of plain data, keys in the given order, short leaves on one line."""
    # a control character such as NEL, written as it is, would be read back as a line break: then all is escaped
    readable = json.dumps(document, ensure_ascii=False).isprintable()
    parts = []
    for key, value in document.items():
        top = _Top({key: value})
        parts.append(yaml.dump(top, Dumper=_PolicyDumper, sort_keys=False, width=118, allow_unicode=readable))
    return "".join(parts)


def check_replaceable(path: Path | str) -> Path:
    """Find out early whether a policy can be written to ``path``, and that nothing but a policy would be replaced.

    An empty file may be replaced, and so may a policy that is not valid, or that was edited by hand.

    Raises:
        FileError: it cannot be written, or holds something else, such as a training script or its configuration.
    """

    def ours(text: str) -> bool:
        return str(parse_document(text).get("schema")).startswith(SCHEMA.partition("/")[0])

    return check_kind(path, "an AutoPrec policy", ours)


#: What a lean policy keeps of its evidence: what has an effect, and what it was found for.
_LEAN = (
    *(
        "target",
        "source",
        "verdict",
        "speedup",
        "speedup_over_16bit",
        "metric",
        "divergence",
        "gradient_error",
        "seeds",
        "date",
    ),
    *("backends", "instructions", "published"),
)


def lean(policy: Policy) -> dict[str, Any]:
    """Return a policy's document for a repository: what runs, without defaults, and little of the evidence."""
    usual = Policy().to_dict()
    document = policy.to_dict()
    document["evidence"] = {key: value for key, value in policy.evidence.items() if key in _LEAN}
    return {key: value for key, value in document.items() if key == "schema" or value not in (usual.get(key), {})}


def yaml_text(document: dict[str, Any]) -> str:
    """Return a policy's document as YAML; what a search measured begins with a checksum line."""
    text = dump_yaml(document)
    return checksum_line(parse_document(text)) + text if document.get("evidence") else text


def save_policy(policy: Policy, path: Path | str) -> Path:
    """Write a policy atomically, as YAML, or as JSON when the name ends in ``.json``.

    A policy with evidence is what a search measured: its YAML begins with a checksum line (JSON has no comments; cut
    off, it does not parse).
    """
    path = Path(path)
    document = policy.to_dict()
    if path.suffix == ".json":
        return write_atomic(path, json.dumps(document, indent=2, allow_nan=False) + "\n")
    return write_atomic(path, yaml_text(document))


def checksum_line(document: dict[str, Any]) -> str:
    """Return the line to write above the YAML text of a plain-data document (as that text is read back)."""
    return f"# checksum sha256:{checksum(document)} (after an edit by hand, delete this line)\n"


def _lines(text: str) -> list[str]:
    """Return the checksum lines, whole or damaged, among the comments above the first key."""
    out = []
    for line in text.lstrip("\ufeff").split("\n"):
        if line.strip() and not line.startswith("#"):
            break
        if sum(trace in line for trace in _TRACES) >= 2:
            out.append(line)
    return out


def verify_checksum(text: str, document: dict[str, Any], *, where: str) -> None:
    """Refuse a document whose text begins with a checksum line that is not its own; a text without one passes.

    Args:
        text: of the whole file.
        document: what was parsed from it.
        where: the file, for the message.

    Raises:
        PolicyError: the contents, or the line itself, were changed after AutoPrec wrote the file.
    """
    for line in _lines(text):
        found = _LINE.fullmatch(line)
        if found is None or found.group(1) != checksum(document):
            raise PolicyError(
                "the file was changed or damaged after AutoPrec wrote it (its checksum does not match), so its "
                "evidence no longer describes it",
                where=where,
                fix="get the original again; if it was edited on purpose, delete its first line",
            )
