"""Hands neap's log lines to Python's `logging`, as a library should. The services write their own (`shared.rpc.logs`)."""

import structlog


def log_to_logging() -> None:
    """Sends what neap logs to the loggers `neap.*` and below, unless the application has configured structlog itself.

    structlog's own default would print every line on standard output.
    """
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
