import gc
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# Set before anything imports Hugging Face: tests never ask a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# For the services that tests start; see set_num_threads below.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from shared.cpus import wait_briefly

# As services do: where a test takes two threads, one that waits would take the core from other tests.
wait_briefly()

# A shell ignores SIGINT for what it runs in the background, and children inherit that: tests of Ctrl-C would wait.
signal.signal(signal.SIGINT, signal.default_int_handler)
# jsonschema would make 38 grammars of it, of a second in each process; no test asks for such a format.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

# A machine with a GPU may have torch and transformers alone: tests/gpu asks for no more.
if find_spec("hypothesis"):
    from hypothesis import settings

    # How long an example takes says nothing beside other work.
    settings.register_profile("neap", deadline=None)
    settings.load_profile("neap")
if find_spec("redis") and find_spec("obstore"):
    from tests.registry_servers import own_redis, own_s3, s3, start_redis  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    """The process that only hands tests out to others is forked for them, once it has imported the tests."""
    if getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput"):
        if sys.platform.startswith("linux") and not config.option.collectonly:
            from tests.forked_workers import fork_workers

            fork_workers(config)
        return
    # Until all tests are imported, which makes a million objects that stay: collections take a third of that time.
    gc.disable()
    import torch
    import transformers

    # Tiny models: a second thread costs more than it brings, most of all beside other work.
    torch.set_num_threads(1)
    torch.manual_seed(0)  # imports what it needs
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.hookimpl(trylast=True)  # of the tests that run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with a test of a longer limit than usual come first: handed out whole, none is left alone at the end."""
    usual_s = float(config.getini("timeout"))
    longest: dict[Path, float] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, usual_s), limit.args[0] if limit else 0)
    items.sort(key=lambda item: -longest[item.path])


def pytest_collection_finish() -> None:
    """What is imported by now is never free: each full collection, as after loading a model, would walk all of it."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> Iterator[None]:
    """Each model that is loaded collects garbage: of one module of tests, not of whatever all have imported."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    # torch.manual_seed formats a stack for each kind of device, which takes longer than the rest of a small test.
    seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """What a test makes of logging, a command in this process say, ends with it."""
    yield
    if structlog := sys.modules.get("structlog"):
        structlog.reset_defaults()
