"""Output, error handling and options that all commands share."""

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from neap_client.addresses import with_scheme
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text

from shared.errors import InvalidInput, NeapError
from shared.plain_text import one_line, printable

P = ParamSpec("P")
T = TypeVar("T")


class PlainConsole(Console):
    """A console that escapes control characters in all text it prints, because text comes from services, files and
    models.

    Only rich's own control codes reach the terminal.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # `segment.control` marks codes from rich itself, such as a progress bar's cursor movements.
            yield segment if segment.control else segment._replace(text=printable(segment.text))


out = PlainConsole(highlight=False, soft_wrap=True)
err = PlainConsole(stderr=True, highlight=False, soft_wrap=True)

DEFAULT_CALIBRATOR = "127.0.0.1:7070"
DEFAULT_WORKER = "127.0.0.1:7071"
TRACEBACK_VARIABLE = "NEAP_TRACEBACK"
# What to do about failures that gRPC itself reports.
HINTS = {
    "GRPC_UNAVAILABLE": "does a service run at this address (`neap serve calibrator`, `neap serve worker`)? --tls-ca "
    "or --tls, before the command, are for services with TLS and for no others",
    "NOT_READY": "--wait SECONDS waits for it",
    "GRPC_UNIMPLEMENTED": "another service runs at this address: --worker names an inference worker, --calibrator a "
    "calibration service",
}


def checked_address(address: str) -> str:
    """Return `address`. Raises BadParameter if it cannot be one."""
    try:
        with_scheme(address)
    except InvalidInput as error:
        raise typer.BadParameter(error.message) from error
    return address


Calibrator = Annotated[
    str, typer.Option("--calibrator", help="Address of the calibration service, HOST:PORT.", callback=checked_address)
]
Worker = Annotated[
    str, typer.Option("--worker", help="Address of the inference worker, HOST:PORT.", callback=checked_address)
]
Model = Annotated[
    str,
    typer.Option("--model", help="Id of the model. Needed only if the service is configured with more than one model."),
]
ServedModel = Annotated[
    str, typer.Option("--model", help="Id of the model. Needed only if the worker serves more than one model.")
]
RegistryUrl = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="URL",
        help="Registry of the services: a folder, or an s3:// or redis:// URL. Default: NEAP_REGISTRY, which is the "
        "better place for a URL with a password, or a folder under --data-dir.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Data folder of the services. It holds the registry if none is named. Default: the user's data folder.",
    ),
]


def exit_on_error(command: Callable[P, T]) -> Callable[P, T]:
    """Wrap a command so that it fails with one line on standard error and exit code 1, never with a traceback.

    For development, NEAP_TRACEBACK=1 shows the traceback of an unexpected error.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except NeapError as error:
            err.print(error_line(error))
            raise typer.Exit(1) from error
        except BrokenPipeError as error:  # as with `| head -1`: whoever reads has had enough. rich does the same
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
            raise typer.Exit(1) from error
        except OSError as error:
            fail(f"{error.filename or 'system'}: {error.strerror or error}")
        except Exception as error:
            if os.environ.get(TRACEBACK_VARIABLE):
                raise
            fail(f"unexpected {type(error).__name__}: {error} ({TRACEBACK_VARIABLE}=1 shows the traceback)")

    return run


def print_line(text: str) -> None:
    """Print `text` as one line. It may contain text from a service."""
    out.print(one_line(text), markup=False)


def table_cell(text: str) -> Text:
    """Return `text` for a table cell without interpreting it as rich markup, which a plain str would be."""
    return Text(one_line(text))


def fail(message: str) -> NoReturn:
    """Print the message to standard error as one line and exit with code 1."""
    err.print(_error_line(message))
    raise typer.Exit(1)


def error_line(error: NeapError) -> str:
    """Return one line about the error, with what to do about it, as rich markup."""
    hint = f"; {HINTS[error.reason]}" if error.reason in HINTS else ""
    return _error_line(f"{error.message} [{error.reason}]{hint}")


def _error_line(message: str) -> str:
    return f"[bold red]error:[/] {escape(one_line(' '.join(message.split())))}"


def format_time(timestamp: Any) -> str:
    """Format a protobuf Timestamp in UTC, to the second."""
    return datetime.fromtimestamp(timestamp.seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def print_message(message: Message, **more: object) -> None:
    """Print a message, and `more` fields, as one line of JSON, in protobuf's JSON mapping with the field names of the
    proto."""
    print_json(MessageToDict(message, preserving_proto_field_name=True) | more)


def print_json(document: Mapping[str, Any]) -> None:
    print(printable(json.dumps(document, ensure_ascii=False)), flush=True)


def with_flags(
    run: Callable[..., T], command: Callable[..., T], flags: Iterable[inspect.Parameter], *, without: str = ""
) -> Callable[..., T]:
    """Return `run` with the name, the help and the parameters of `command`, except for `without`, and with `flags`."""
    functools.update_wrapper(run, command)
    of_command = inspect.signature(command).parameters.values()
    inherited = [parameter for parameter in of_command if parameter.name != without]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*inherited, *flags)]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
