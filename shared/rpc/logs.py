"""Structured logs on stderr: one JSON object per line, or coloured text on a terminal. stdout is left to output for
programs."""

import logging
import sys
from contextlib import suppress
from typing import Any, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer

from shared.plain_text import one_line


class _StderrLogger(structlog.WriteLogger):
    """Drops lines that cannot be written, so that a service survives a full log disk and can report its errors."""

    def msg(self, message: str) -> None:
        with suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def configure_logging(level: str = "info", *, json_lines: bool | None = None) -> None:
    """Set up structlog for this process. If `json_lines` is None, lines are JSON unless stderr is a terminal.

    Tracebacks contain no local variables, because these may hold prompts or the password in a registry's URL.
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
        processors += [_escaped, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # sys.stderr is looked up for every line, so that replacing it takes effect.
        logger_factory=lambda *_: _StderrLogger(underlying_stream(sys.stderr)),
        cache_logger_on_first_use=False,
    )


def is_json(json_lines: bool | None) -> bool:
    """Resolve `json_lines`: None means JSON unless stderr is a terminal."""
    return not sys.stderr.isatty() if json_lines is None else json_lines


def underlying_stream(stream: TextIO) -> TextIO:
    """Return the underlying stream if `stream` is a LineLogger (`shared.rpc.service_logs`), otherwise `stream`
    itself."""
    return getattr(stream, "stream", stream)


def _escaped(logger: Any, name: str, event: Any) -> Any:
    """Escape control characters for a terminal. JSON escapes them itself.
    Tracebacks are rendered later and keep their lines."""
    return {key: one_line(v) if isinstance(v, str) else v for key, v in event.items()}
