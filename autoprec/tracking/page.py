"""MLflow's web server for one reader, in one process: ``python -m autoprec.tracking.page PORT``.

``mlflow server`` imports MLflow twice (a command that starts a worker) and starts consumers of a job queue that a page
of runs does not need: 10 processes and three times the CPU time before the first answer. This is the same application
in one process. Its start page opens with MLflow's assistant closed; whoever has opened or closed it finds it so again.
Where a version of MLflow has other names, ``mlflow server`` is run as its users run it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

#: The variable by which ``mlflow server``, too, is told its store.
STORE = "MLFLOW_BACKEND_STORE_URI"
#: What MLflow's interface remembers in the browser, where nothing is remembered yet.
_REMEMBERED = {
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
    "mlflow.workflowType_v1": '"machine_learning"',
}


def opened(page: str) -> str:
    """Return MLflow's start page with the defaults of a first visit set before its scripts run."""
    lines = (f"localStorage.getItem({k!r})??localStorage.setItem({k!r},{v!r});" for k, v in _REMEMBERED.items())
    return page.replace("<head>", f"<head><script>try{{{''.join(lines)}}}catch{{}}</script>", 1)


def _application() -> Any:
    """Return MLflow's ASGI application on the store that :data:`STORE` names.

    Raises:
        ImportError: this MLflow has no such application.
        AttributeError: this MLflow has other names for what is needed.
    """
    server = importlib.import_module("mlflow.server")
    # what `mlflow server` hands to its worker; artifacts are read from where the runs say they are
    os.environ[server.BACKEND_STORE_URI_ENV_VAR] = os.environ[STORE]

    @server.app.after_request  # type: ignore[untyped-decorator]
    def greet(response: Any) -> Any:
        from flask import request

        if request.path == "/" and response.mimetype == "text/html":
            response.direct_passthrough = False  # the file is sent as a stream
            response.set_data(opened(response.get_data(as_text=True)))
        return response

    return importlib.import_module("mlflow.server.fastapi_app").app


def main(port: int) -> None:
    """Serve the store that ``MLFLOW_BACKEND_STORE_URI`` names on 127.0.0.1, until the process is ended."""
    os.environ |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    try:
        application = _application()
        uvicorn = importlib.import_module("uvicorn")
    except (ImportError, AttributeError):
        command = [sys.executable, "-P", "-m", "mlflow", "server"]
        os.execv(command[0], [*command, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"])
    uvicorn.run(application, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]))
