"""export/stacks."""
