"""Adds flags that several commands have to a command. Typer makes a command's flags from its signature."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


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
