"""Generates docs/reference.md from the protos and the source: `python -m neap_engine.reference > docs/reference.md`."""
