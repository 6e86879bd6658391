"""Hands neap's log lines to Python's `logging`, as a library should.
The services write their own (`shared.rpc.logs`)."""

from typing import Any

import structlog
from structlog.typing import EventDict

_render = structlog.processors.KeyValueRenderer(key_order=["event"])


def log_to_logging() -> None:
    """Sends what neap logs to the loggers `neap.*` and below, unless the application has configured structlog itself.

    structlog's own default would print every line on standard output.
    """
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, _as_logging_arguments],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _as_logging_arguments(logger: Any, name: str, event: EventDict) -> tuple[tuple[object], dict[str, Any]]:
    """The line, and the exception for `logging` to show."""
    exception = event.pop("exc_info", None)
    return (_render(logger, name, event),), {"exc_info": exception}
