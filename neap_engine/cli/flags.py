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
    own = inspect.signature(command).parameters.values()
    kept = [one for one in own if one.name != without]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*kept, *flags)]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
