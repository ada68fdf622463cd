"""AutoPrec's tests: they mirror the package one to one; `e2e/` runs whole commands in real processes."""
