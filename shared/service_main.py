"""How every service's process begins and ends."""

import asyncio
import faulthandler
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from shared.config import settings_from_command_line
from shared.errors import NeapError
from shared.process_settings import ProcessSettings
from shared.rpc.logs import configure_logging, log_stdout, report_start_failure
from shared.rpc.tracing import export_traces

S = TypeVar("S", bound=ProcessSettings)


def run_service(
    kind: type[S],
    program: str,
    name: str,
    serve: Callable[[S], Coroutine[None, None, int]],
    argv: Sequence[str] | None = None,
) -> int:
    """Read settings from flags and environment, and run `serve` with them. `name`: of the service in traces.

    Returns the process' exit status: that of `serve`, or 2 if the service cannot start with these settings.
    """
    configure_logging()
    faulthandler.enable()  # native code that ends the process leaves its place in the log
    try:
        settings = settings_from_command_line(kind, program, argv)
        configure_logging(settings.log_level)
        log_stdout()
        with export_traces(settings.exports_traces, name):
            return asyncio.run(serve(settings))
    except NeapError as error:
        report_start_failure(error)
        return 2
