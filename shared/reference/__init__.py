"""Generates docs/reference.md from the protos and the source: `python -m shared.reference > docs/reference.md`."""
