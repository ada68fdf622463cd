"""Commands about files: show, validate, export, import; none of them runs a script."""
