"""Found first on PYTHONPATH by every Python process of a trial: isolates it, and loads the hooks when torch comes.

Nothing but the standard library is used here and nothing happens without the environment variable. A sitecustomize
of the user's or of the system is run first, as it would have been.
"""

import os
import sys


def _chain() -> None:
    import importlib.machinery
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _find_autoprec() -> None:
    """Make the package importable in scripts' processes when it runs from a checkout."""
    import importlib.util

    if importlib.util.find_spec("autoprec") is None:
        here = os.path.dirname(os.path.abspath(__file__))
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(here))))


def _isolate() -> None:
    """Before the script's first line: nothing of the user's is changed, and nothing random differs between trials."""
    import json

    try:
        with open(os.environ["AUTOPREC_TRIAL"]) as stream:
            config = json.load(stream)
    except OSError:  # the trial is over, this process only has not been ended yet
        return
    if config["mode"] == "run":
        return
    from autoprec.trial.inside.isolate.entropy import repeat_entropy
    from autoprec.trial.inside.isolate.isolation import isolate
    from autoprec.trial.inside.isolate.timers import stop_timers

    isolate(config)
    stop_timers()
    repeat_entropy(int(config.get("seed_offset", 0)))


def _when_torch_comes() -> None:
    from autoprec.support.living import uncollected
    from autoprec.trial.inside.patching import after_import

    def install(_torch: object) -> None:
        with uncollected():
            from autoprec.trial.inside import agent

        agent.install(os.environ["AUTOPREC_TRIAL"])

    # Dynamo, which torch imports with the first optimizer, is as large as the rest of torch.
    after_import({"torch": [install], "torch._dynamo": []})


_chain()
# A script may start an older Python, to which AutoPrec's files are not Python.
if os.environ.get("AUTOPREC_TRIAL") and sys.version_info >= (3, 11):
    _find_autoprec()
    _isolate()
    _when_torch_comes()
