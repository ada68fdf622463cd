"""Conformance suites: what every backend and every exporter must pass, ours and yours.

Each is a pytest class to subclass in a test file: :class:`~tests.conformance.backends.BackendSuite` is given a backend,
:class:`~tests.conformance.exporters.ExporterSuite` an exporter and a way to read its files back. They need pytest.
"""

import pytest

# before they are imported: a failing check then shows both sides of its comparison
pytest.register_assert_rewrite("tests.conformance.backends", "tests.conformance.exporters")
