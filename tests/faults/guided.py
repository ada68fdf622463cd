"""The same inputs' judge under atheris, which looks for inputs that reach new code: ``python -m tests.faults.guided``.

    python -m tests.faults.guided COUNT SEED FOLDER

Prints the JSON object of :mod:`tests.faults.fuzzing`. The package is imported under instrumentation, so this is a
process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["autoprec", "yaml"]):
    from tests.faults.bad_documents import policy_seeds, space_seeds
    from tests.faults.fuzzing import Fuzz, warm


def main() -> None:
    """Feed COUNT inputs; libFuzzer never returns, so the process ends at the last one."""
    count, seed, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for index, raw in enumerate([*policy_seeds(), *space_seeds()]):
        (corpus / f"{index}").write_bytes(raw)
    fuzz = Fuzz(folder)
    warm(fuzz)
    left = [count]

    def one(raw: bytes) -> None:
        fuzz.load("space" if b"autoprec.policy.space" in raw else "policy", raw)
        left[0] -= 1
        if left[0] == 0:
            print(json.dumps(fuzz.report()), flush=True)
            os._exit(0)

    atheris.Setup(["fuzz", f"-seed={seed + 1}", "-max_len=4096", "-verbosity=0", str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
