"""Structured logs on stderr: one JSON object a line, or colours on a terminal. stdout stays free for what programs read."""

import logging
import sys
from contextlib import suppress
from typing import Any

import structlog
from structlog.tracebacks import ExceptionDictTransformer


class _StderrLogger(structlog.PrintLogger):
    """Drops what cannot be written: where the log's disk is full, whoever logs must live on, and most of all say why it fails."""

    def msg(self, message: str) -> None:
        with suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def configure_logging(level: str = "info", *, json_lines: bool | None = None) -> None:
    """Set structlog up for this process. `json_lines` None: JSON unless stderr is a terminal.

    Tracebacks come without local variables: those may hold prompts, or the password in a registry's URL.
    """
    as_json = not sys.stderr.isatty() if json_lines is None else json_lines
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        processors += [
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ]
    else:
        processors.append(
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        )
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # Looked up at every line: whoever replaces sys.stderr meant it.
        logger_factory=lambda *_: _StderrLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
