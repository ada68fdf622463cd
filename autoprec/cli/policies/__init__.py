"""Commands about files: show, validate, export, lint."""
