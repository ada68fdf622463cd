"""What a launched script itself said: its launcher's own report of the failure comes last, and hides the cause.

``torchrun`` prints its own traceback and a summary after the traceback of the rank that failed, whose lines bear the
name of the rank (``[rank0]: ...``); ``accelerate launch`` prints the traceback of its call of the script.
"""

from __future__ import annotations

import re

_RANK = re.compile(r"^\[rank(\d+)\]: ?")
#: A line of torch elastic's own log: of a rank that failed, or is ended because another one did.
_LOG = re.compile(r"^[EWI]\d{4} \S+ +\d+ .*torch/distributed/(?:elastic/|run\.py)")
_TRACEBACK = "Traceback (most recent call last):"
#: What a launcher's own traceback ends in, and where one of its frames is.
_FRAMES = {
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError": "torch/distributed/",
    "subprocess.CalledProcessError": "accelerate/commands/",
}
#: The summary's last part: the rank that failed first, and what it says of it.
_FIRST = re.compile(r"^Root Cause .*?^ +rank +: (\d+).*?^ +traceback : ([^\n]*)", re.MULTILINE | re.DOTALL)


def own_words(output: str) -> str:
    """Return the output of a launched script without what its launcher says of the failure.

    Of several ranks the one is left that failed first, without its prefix. Where nothing else would be left, or no
    launcher spoke, the output is returned as it is.

    Args:
        output: the end of what the launcher and its ranks printed.
    """
    lines = output.splitlines()
    first = _FIRST.search(output)
    kept = [line for line in _without_reports(lines) if not _LOG.match(line)]
    ranks = {found[1]: None for line in kept if (found := _RANK.match(line))}
    if ranks:
        shown = first[1] if first and first[1] in ranks else next(iter(ranks))
        kept = [_RANK.sub("", line) for line in kept if not (found := _RANK.match(line)) or found[1] == shown]
    if first and first[2].startswith("Signal "):  # such a rank has no last words of its own
        kept.append(f"rank {first[1]}: {first[2]}")
    if kept == lines or not any(line.strip() for line in kept):
        return output
    return "\n".join(kept) + "\n"


def _without_reports(lines: list[str]) -> list[str]:
    """Return the lines without the tracebacks of launchers, and the summary that follows torchrun's."""
    kept: list[str] = []
    begun: int | None = None
    ruled = 0
    for line in lines:
        if ruled:  # torchrun's summary stands between rules of "="; the second but the title's ends it
            ruled -= line.startswith("=====")
            continue
        if line == _TRACEBACK:
            begun = len(kept)
        elif begun is not None and _of_launcher(line, kept[begun:]):
            del kept[begun:]
            begun = None
            ruled = 2 if line.startswith("torch") else 0
            continue
        elif begun is not None and not line.startswith(" "):
            begun = None
        kept.append(line)
    return kept


def _of_launcher(last: str, frames: list[str]) -> bool:
    """Say whether a traceback is a launcher's: a script may fail with the same error."""
    place = _FRAMES.get(last.partition(":")[0])
    return place is not None and any(place in frame for frame in frames)
