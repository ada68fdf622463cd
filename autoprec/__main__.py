"""``python -m autoprec`` and the ``autoprec`` console script."""

from __future__ import annotations

import time

#: Objects made before the collector looks for cycles. A command imports a million that stay, and with Python's default
#: of 700 they are walked again and again: a sixth of the time until it begins.
_COLLECT_AT = 100_000


def main() -> None:
    """Run the command line; leaves with the exit code of docs/cli.md."""
    began = time.monotonic()
    from autoprec.support.living import uncollected

    with uncollected(within=_COLLECT_AT):
        from autoprec.cli import cli

        cli.main(prog_name="autoprec", obj=began)


if __name__ == "__main__":
    main()
