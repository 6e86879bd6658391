"""The scripted service and the runner of the tests of the command line."""

from tests.neap_engine.cli.conftest import neap, service

__all__ = ["neap", "service"]
