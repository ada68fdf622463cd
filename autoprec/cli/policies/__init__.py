"""Commands about files: show, validate, diff, export, import, schema; none of them runs a script."""
