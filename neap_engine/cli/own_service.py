"""A calibration service for one command: started with the settings of the environment, stopped when the command
ends."""

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neap_engine.cli.processes import ServiceProcess

# Opening a registry whose servers hang takes 20 s.
START_TIMEOUT_S = 120.0


@contextmanager
def calibration_service() -> Iterator[str]:
    """Yield the address of the service, on loopback. Its log is a file that errors quote. SIGTERM acts like Ctrl-C.

    Raises Unavailable if the service does not start.
    """
    # A job in a container is told to end by SIGTERM, which process number 1 would otherwise ignore.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="neap-") as folder:
            log = Path(folder) / "calibrator.log"
            with ServiceProcess("calibrator", "calibrator_service", [], log) as service:
                yield service.wait_serving(START_TIMEOUT_S)
    finally:
        signal.signal(signal.SIGTERM, before)
