"""The answer of a search that ended because no further run would have paid, kept for a search that resumes it.

Resuming such a study under the same options could only start the script to measure its reference again, and then say
what was said before; where times are measured, the new reference's noise might make one more trial seem to pay.
So its answer is kept beside the study, with everything that it depends on and that is known before the script starts.
"""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autoprec.errors import AutoPrecError
from autoprec.graph.report import GraphReport
from autoprec.policy import Policy, load_policy
from autoprec.support.files import finite, read_document, with_checksum, without_checksum, write_json
from autoprec.support.redact import redact_arguments
from autoprec.trial.command import ScriptCommand
from autoprec.trial.source import source_digests
from autoprec.tuning.events import SearchInfo
from autoprec.tuning.options import SearchOptions, versions
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.target import devices_here

#: How :attr:`SearchResult.stopped` begins where no option of :data:`_MAXIMA` can make the search go on.
_ENDED = ("converged", "exhausted")
#: Maxima, which a search by our sampler that ended before them has not felt (others plan by the number of trials), and
#: what says only how or where it is run or kept.
_MAXIMA = ("trials",)
_ELSEWHERE = (
    *("command", "output", "study", "storage", "resume", "track"),
    *("workers", "engine"),
)
#: What is reported of a search anew, from the options of the one that resumes it.
_REPORTED_ANEW = ("study_dir", "storage", "trials", "resume_command", "options", "folder")
_FILE = "answer.json"


def asked(options: SearchOptions, command: ScriptCommand) -> dict[str, Any]:
    """Return what was asked, as far as a resumed search might go on otherwise: options, files, versions, machine."""
    left_out = (*_MAXIMA, *_ELSEWHERE) if options.sampler == "ours" else _ELSEWHERE
    out = {key: value for key, value in asdict(options).items() if key not in left_out}
    out["script"] = shlex.join(redact_arguments(options.command))
    files = {name: Path(name) for name in (options.space, options.calibration) if name}
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if path.is_file()}
    out |= {"sources": source_digests(command), "files": digests}
    return out | {"versions": versions(), "device": devices_here()}


def keep_answer(folder: Path, question: dict[str, Any], info: SearchInfo, result: SearchResult, records: int) -> None:
    """Keep an answer that another run could not change; any other is left to a resumed search, and no earlier one kept.

    Args:
        folder: of the study, with the policy in ``best.yaml``.
        question: from :func:`asked`.
        info, result: what was reported at the start, and the answer.
        records: how many runs the study holds.
    """
    if result.verdict == "undecided" or result.cut_short or not result.stopped.startswith(_ENDED):
        (folder / _FILE).unlink(missing_ok=True)  # ``best.yaml`` is not its policy any more
        return
    known = {key: value for key, value in asdict(info).items() if key not in _REPORTED_ANEW}
    document = {"asked": question, "records": records, "info": known, "result": result.to_json()}
    write_json(folder / _FILE, with_checksum(finite(document)), indent=None)


def kept_answer(
    folder: Path, question: dict[str, Any], records: int
) -> tuple[dict[str, Any], GraphReport, SearchResult, Policy] | None:
    """Return (what was reported at the start, the recorded step, the answer, its policy).

    None where a resumed search might find another answer, or a file of this one is gone.
    """
    path = folder / _FILE
    if not path.exists():
        return None
    try:
        found = without_checksum(read_document(path), where=str(path))
        if found["asked"] != finite(question) or found["records"] != records:
            return None
        info = found["info"] | {"groups": {name: tuple(layers) for name, layers in found["info"]["groups"].items()}}
        graph = GraphReport.from_json(read_document(folder / "graph.json"))
        result = SearchResult.from_json(found["result"])
        return info | {"notes": tuple(info["notes"])}, graph, result, load_policy(folder / "best.yaml")
    except (AutoPrecError, KeyError, TypeError, ValueError):  # damaged, or of another version: asked again
        return None
