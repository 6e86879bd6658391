"""Structured logs on stderr: one JSON object per line, or coloured text on a terminal. stdout is left to output for
programs. In a service's process all output becomes log lines, including logs, warnings and prints of libraries."""

import atexit
import io
import logging
import os
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer

from shared.errors import NeapError
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
    """Return the underlying stream if `stream` is a LineLogger (`shared.rpc.logs`), otherwise `stream`
    itself."""
    return getattr(stream, "stream", stream)


def _escaped(logger: Any, name: str, event: Any) -> Any:
    """Escape control characters for a terminal. JSON escapes them itself.
    Tracebacks are rendered later and keep their lines."""
    return {key: one_line(v) if isinstance(v, str) else v for key, v in event.items()}


# Libraries with progress bars read these when they are imported.
_NO_PROGRESS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
# gRPC's C++ core writes directly to the file descriptor. It reads this when the first server or channel is created.
_NO_GRPC_LINES = {"GRPC_VERBOSITY": "NONE"}
# Packages whose log lines of every level are passed on. Other packages' are from warnings on.
_OWN_PACKAGES = ("inference_service", "calibrator_service", "shared", "neap")


def log_all_output() -> None:
    """Turn everything written to stderr into JSON lines, unless stderr is a terminal. For the main module of a service.

    This includes `logging`, `warnings`, uncaught exceptions in any thread and prints to stderr. Progress bars are
    switched off. A crash of the interpreter itself is written unchanged. `configure_logging` sets the level.
    """
    if not is_json(None) or isinstance(sys.stderr, LineLogger):
        return
    _draw_no_progress()
    sys.stderr = _logged(sys.stderr, "neap.stderr")
    configure_logging(json_lines=True)
    _log_through_structlog()
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback, args.thread)
    sys.unraisablehook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def log_stdout() -> None:
    """Log what is printed to stdout from now on, if `log_all_output` is in effect.
    A server still prints its address."""
    if isinstance(sys.stderr, LineLogger) and not isinstance(sys.stdout, LineLogger):
        sys.stdout = _logged(sys.stdout, "neap.stdout")


def report_start_failure(error: NeapError) -> None:
    """Report why a service cannot start: as a log line, or as a sentence on a terminal."""
    if is_json(None):
        structlog.get_logger("neap").critical("cannot start", why=error.message, reason=error.reason)
    else:
        print(f"error: {error.message} ({error.reason})", file=sys.stderr, flush=True)


class LineLogger(io.TextIOBase):
    """Replaces a stream and logs each line that is written to it. `stream` is the replaced stream. Thread-safe."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self.stream = stream
        self._name = name
        self._lock = threading.RLock()
        self._begun = ""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def write(self, text: str) -> int:
        # A progress bar that is redrawn begins with a carriage return.
        with self._lock:
            *lines, self._begun = (self._begun + text).replace("\r", "\n").split("\n")
        for line in lines:
            if line.strip():
                structlog.get_logger(self._name).warning(line)
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def finish(self) -> None:
        """Log a last line that has no line end."""
        if self._begun:
            self.write("\n")


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            structlog.get_logger(record.name).log(
                record.levelno,
                record.getMessage(),
                logger=record.name,
                **({"exc_info": record.exc_info} if record.exc_info else {}),
            )
        except Exception:
            self.handleError(record)


def _logged(stream: TextIO, name: str) -> LineLogger:
    logger = LineLogger(stream, name)
    atexit.register(logger.finish)
    return logger


def _log_through_structlog() -> None:
    """Route `logging` through structlog, including loggers to which libraries have added their own handlers."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            for handler in list(logger.handlers):
                if isinstance(handler, logging.StreamHandler | _Handler):
                    logger.removeHandler(handler)
                    logger.propagate = True
    logging.root.addHandler(_Handler())
    # structlog's level filters these loggers.
    for name in _OWN_PACKAGES:
        logging.getLogger(name).setLevel(logging.DEBUG)


def _draw_no_progress() -> None:
    for name, value in (_NO_PROGRESS | _NO_GRPC_LINES).items():
        os.environ.setdefault(name, value)
    for module, function in (
        ("transformers.utils.logging", "disable_progress_bar"),
        ("huggingface_hub.utils", "disable_progress_bars"),
        ("datasets", "disable_progress_bars"),
    ):
        if module in sys.modules:
            getattr(sys.modules[module], function)()


def _uncaught(
    kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None, thread: Any = None
) -> None:
    if error is None or issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    fields = {} if thread is None else {"thread": thread.name}
    structlog.get_logger("neap").critical("uncaught exception", exc_info=(kind, error, traceback), **fields)
