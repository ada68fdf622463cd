"""``autoprec schema``: the JSON Schema of the files AutoPrec reads, for editors and other programs."""

from __future__ import annotations

import json

import click

from autoprec.cli.echo import echo


@click.command("schema")
@click.argument("kind", type=click.Choice(["policy", "space"]))
def schema(kind: str) -> None:
    """Print the JSON Schema (draft 2020-12) of policy or space files."""
    if kind == "policy":
        from autoprec.policy import Policy

        document = Policy.model_json_schema(by_alias=True)
    else:
        from autoprec.policy.space import SearchSpace

        document = SearchSpace.model_json_schema(by_alias=True)
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}
    echo(json.dumps(document, indent=2))
