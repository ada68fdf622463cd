"""``python -m autoprec`` and the ``autoprec`` console script."""

from __future__ import annotations

import time


def main() -> None:
    """Run the command line; leaves with the exit code of docs/cli.md."""
    began = time.monotonic()
    from autoprec.cli import cli

    cli.main(prog_name="autoprec", obj=began)


if __name__ == "__main__":
    main()
