"""Structured logs on stderr: one JSON object a line, or colours on a terminal. stdout stays free for what programs read."""

import logging
import sys
from contextlib import suppress
from typing import Any, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer

from shared.plain_text import one_line


class _StderrLogger(structlog.WriteLogger):
    """Drops lines that cannot be written. If the disk of the log is full, the service must live on and report why it fails."""

    def msg(self, message: str) -> None:
        with suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def configure_logging(level: str = "info", *, json_lines: bool | None = None) -> None:
    """Set structlog up for this process. `json_lines` None: JSON unless stderr is a terminal.

    Tracebacks come without local variables: those may hold prompts, or the password in a registry's URL.
    """
    as_json = is_json(json_lines)
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
        processors += [
            _escaped,
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
        ]
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # Looked up at every line: whoever replaces sys.stderr meant it.
        logger_factory=lambda *_: _StderrLogger(real(sys.stderr)),
        cache_logger_on_first_use=False,
    )


def is_json(json_lines: bool | None) -> bool:
    """The meaning of `json_lines`: None chooses JSON unless stderr is a terminal."""
    return not sys.stderr.isatty() if json_lines is None else json_lines


def real(stream: TextIO) -> TextIO:
    """`stream` itself, or the stream that it replaces if a service logs its output (`shared.rpc.service_logs`)."""
    return getattr(stream, "stream", stream)


def _escaped(logger: Any, name: str, event: Any) -> Any:
    """For terminals; JSON has escapes of its own. Tracebacks, which are rendered later, keep their lines."""
    return {key: one_line(v) if isinstance(v, str) else v for key, v in event.items()}
