"""Conformance suites that every backend and every exporter passes."""
