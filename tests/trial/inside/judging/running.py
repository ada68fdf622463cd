"""Judging a script inside this process: hooks are installed, the script runs until its first step is judged."""

import runpy
import sys
import traceback
from pathlib import Path

import torch

from autoprec.graph.report import GraphReport
from autoprec.trial.inside.first_step import FirstStep
from autoprec.trial.inside.judging.judge import Judge
from autoprec.trial.inside.observe.hooks import Hooks


class _Judged(BaseException):
    """Ends the script."""


def judged(script: Path) -> GraphReport:
    """Return the recorded and judged step of a script."""
    hooks, out, judges = Hooks(), list[GraphReport](), list[Judge]()

    def done(report: GraphReport) -> None:
        out.append(report)
        raise _Judged

    def arrived(found, module, args, kwargs):  # type: ignore[no-untyped-def]
        judges.append(Judge(found, hooks, done))
        judges[0].start(running=False)

    hooks.install()
    argv, sys.argv = sys.argv, [str(script)]
    threads = torch.get_num_threads()
    try:
        FirstStep(hooks, arrived, lambda why: None).watch()
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _Judged:
            pass
        if not out:
            try:
                judges[0].end()
            except _Judged:
                pass
    finally:
        hooks.remove()
        sys.argv = argv
        torch.set_num_threads(threads)
    return GraphReport.from_json(out[0].to_json())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print("==", name)
        try:
            report = judged(Path(name))
        except Exception:
            traceback.print_exc()
            continue
        assert report.judged is not None
        for one in report.judged.observations:
            print("  ", one.code, one.where.rpartition("/")[2], one.operator, one.module, one.dtypes, {k: (f"{v:.3g}" if isinstance(v, float) else v) for k, v in one.figures.items()}, one.also and [a.rpartition("/")[2] for a in one.also])
        print("   looked", report.judged.looked_at, report.judged.unseen)
