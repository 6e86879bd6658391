"""All that a service's process writes, as log lines: also what libraries log, warn of, print and draw."""

import atexit
import io
import logging
import os
import sys
import threading
from types import TracebackType
from typing import Any, TextIO

import structlog

from shared.errors import NeapError
from shared.rpc.logs import configure_logging, is_json

# Libraries that draw progress read these when they are imported.
_NO_PROGRESS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}
# gRPC's C++ core writes to the file descriptor. It reads this when the first server or channel is made.
_NO_GRPC_LINES = {"GRPC_VERBOSITY": "NONE"}
# Of other packages, warnings and errors only.
_OWN_PACKAGES = ("inference_service", "calibrator_service", "shared", "neap")


def log_all_output() -> None:
    """For the main module of a service. Unless stderr is a terminal, all that is written there becomes JSON lines.

    That holds for `logging`, `warnings`, exceptions that nobody catches in any thread, and whatever prints to stderr; progress
    bars are not drawn. A crash of the interpreter itself is written as it is. `configure_logging` sets the level.
    """
    if not is_json(None) or isinstance(sys.stderr, LineLogger):
        return
    _draw_no_progress()
    sys.stderr = _logged(sys.stderr, "neap.stderr")
    configure_logging(json_lines=True)
    _log_through_structlog()
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(
        args.exc_type, args.exc_value, args.exc_traceback, args.thread
    )
    sys.unraisablehook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def log_stdout() -> None:
    """From here on what is printed is logged, too, where `log_all_output` was called. A server still prints its address."""
    if isinstance(sys.stderr, LineLogger) and not isinstance(sys.stdout, LineLogger):
        sys.stdout = _logged(sys.stdout, "neap.stdout")


def say_why_not(error: NeapError) -> None:
    """For a service that cannot start: a log line, or on a terminal a sentence."""
    if is_json(None):
        structlog.get_logger("neap").critical(
            "cannot start", why=error.message, reason=error.reason
        )
    else:
        print(f"error: {error.message} ({error.reason})", file=sys.stderr, flush=True)


class LineLogger(io.TextIOBase):
    """Stands for a stream, and logs each line that is written to it. `stream`: the real one. Thread-safe."""

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
        # A bar that is drawn anew begins with a carriage return.
        with self._lock:
            *lines, self._begun = (self._begun + text).replace("\r", "\n").split("\n")
        for line in lines:
            if line.strip():
                structlog.get_logger(self._name).warning(line)
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def finish(self) -> None:
        """Logs a last line that was never ended."""
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
    """Also for loggers that libraries have given handlers of their own."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            for handler in list(logger.handlers):
                if isinstance(handler, logging.StreamHandler | _Handler):
                    logger.removeHandler(handler)
                    logger.propagate = True
    logging.root.addHandler(_Handler())
    # What structlog's own level lets through.
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
    kind: type[BaseException],
    error: BaseException | None,
    traceback: TracebackType | None,
    thread: Any = None,
) -> None:
    if error is None or issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    fields = {} if thread is None else {"thread": thread.name}
    structlog.get_logger("neap").critical(
        "uncaught exception", exc_info=(kind, error, traceback), **fields
    )
