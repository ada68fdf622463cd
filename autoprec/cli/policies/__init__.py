"""Commands about files: show, export, lint."""
