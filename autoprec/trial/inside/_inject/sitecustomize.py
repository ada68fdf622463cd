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


class _TorchFinder:
    """A meta-path finder that runs ``autoprec.trial.inside.agent.install`` right after torch has been executed.

    ``importlib.util.find_spec("torch")`` may be called without an import following: the finder stays until torch has
    really been executed.
    """

    busy = False

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]  # noqa: ARG002
        if name != "torch" or self.busy:
            return None
        import importlib.util

        self.busy = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self.busy = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


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


def _install() -> None:
    from autoprec.trial.inside import agent

    agent.install(os.environ["AUTOPREC_TRIAL"])


_chain()
if os.environ.get("AUTOPREC_TRIAL"):
    _find_autoprec()
    _isolate()
    sys.meta_path.insert(0, _TorchFinder())
