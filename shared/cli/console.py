"""What every command shares: where it writes, how it fails, the options that recur."""

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import platformdirs
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from shared.errors import NeapError
from shared.plain_text import one_line, printable

P = ParamSpec("P")
T = TypeVar("T")


class PlainConsole(Console):
    """Whatever is printed, a terminal gets no control character but rich's own: text comes from services, files and models."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # A segment's own control codes (a progress bar moves the cursor) come from rich.
            yield segment if segment.control else segment._replace(text=printable(segment.text))


out = PlainConsole(highlight=False, soft_wrap=True)
err = PlainConsole(stderr=True, highlight=False, soft_wrap=True)

DEFAULT_CALIBRATOR = "127.0.0.1:7070"
DEFAULT_WORKER = "127.0.0.1:7071"
TRACEBACK_VARIABLE = "NEAP_TRACEBACK"

Calibrator = Annotated[
    str, typer.Option("--calibrator", help="HOST:PORT of the calibration service.")
]
Worker = Annotated[str, typer.Option("--worker", help="HOST:PORT of the inference worker.")]
Model = Annotated[str, typer.Option("--model", help="The model's id, as the service names it.")]


def default_data_dir() -> Path:
    """The folder the services use by default, too; `make demo` passes .neap instead."""
    return Path(platformdirs.user_data_dir("neap"))


def guarded(command: Callable[P, T]) -> Callable[P, T]:
    """A command that fails with one line on stderr and exit code 1, never with a traceback.

    NEAP_TRACEBACK=1 lets unexpected errors through, for people who work on neap.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except NeapError as error:
            fail(f"{error.message} [{error.reason}]")
        except OSError as error:
            fail(f"{error.filename or 'system'}: {error.strerror or error}")
        except Exception as error:
            if os.environ.get(TRACEBACK_VARIABLE):
                raise
            fail(
                f"unexpected {type(error).__name__}: {error} "
                f"({TRACEBACK_VARIABLE}=1 shows the traceback)"
            )
        raise AssertionError("fail() returned")

    return run


def say_line(text: str) -> None:
    """`text`, which may hold what a service said, as one line."""
    out.print(one_line(text), markup=False)


def cell(text: str) -> Text:
    """`text`, from a service, as it is: in a table's cell a str would be read as rich's markup."""
    return Text(one_line(text))


def fail(message: str) -> None:
    """Say why on stderr, as one line, and end with exit code 1."""
    err.print(f"[bold red]error:[/] {escape(one_line(' '.join(message.split())))}")
    raise typer.Exit(1)


def escape(text: str) -> str:
    """`text` so that rich prints it as it is."""
    from rich.markup import escape as escaped

    return escaped(text)
