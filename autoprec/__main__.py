"""``python -m autoprec`` and the ``autoprec`` console script."""

from __future__ import annotations


def main() -> None:
    """Run the command line; leaves with the exit code of docs/exit-codes.md."""
    from autoprec.cli import cli
    from autoprec.cli.clock import process_began

    cli.main(prog_name="autoprec", obj=process_began())


if __name__ == "__main__":
    main()
