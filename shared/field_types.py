"""The types and limits of a dataclass's fields, which its callers may not have checked."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from numbers import Real
from operator import index
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from neap_client.fields import FIELDS

from shared.errors import InvalidInput

NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    NoneType: "None",
}
MAX_SHOWN_CHARACTERS = 60


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def check_types(record: Any, reason: str = "INVALID_INPUT") -> None:
    """Gives the fields of a dataclass the types that they are declared with. Call it first in `__post_init__`.

    Numbers may be numpy's; a truth value is no number. Any iterable but a text, bytes and a mapping makes a tuple or a
    set. Literals and mappings are left to the class. Raises `InvalidInput` with `reason`; its metadata names the field.
    """
    hints = _hints(record.__class__)
    for field in fields(record):
        value, hint = getattr(record, field.name), hints[field.name]
        try:
            converted = _converted(value, hint)
        except (TypeError, OverflowError) as error:
            shown = repr(value)
            if len(shown) > MAX_SHOWN_CHARACTERS:
                shown = f"a {type(value).__name__}"
            why = f"{field.name} is {shown}; it must be {_described(hint)}"
            raise InvalidInput(why, reason=reason, metadata={"field": field.name}) from error
        object.__setattr__(record, field.name, converted)  # it may be frozen; this is still construction


def check_limits(record: Any, message: str, reason: str = "INVALID_INPUT", prefix: str = "") -> None:
    """Compares the fields of a dataclass with the limits of those of the same name in a message of the protos.
    Raises `InvalidInput` with `reason`; its metadata names the field, after `prefix`."""
    for field in FIELDS[message].values():
        value = getattr(record, field.name, None)
        if value is not None and field.kind != "message" and (why := field.refusal(value)):
            raise InvalidInput(why, reason=reason, metadata={"field": prefix + field.name})


def check_whole(name: str, value: Any, least: int) -> None:
    """Raises `InvalidInput` for what is no whole number of at least `least`."""
    try:
        is_enough = _converted(value, int) >= least
    except TypeError:
        is_enough = False
    if not is_enough:
        raise InvalidInput(f"{name} is {value!r}; it must be {NAMES[int]} of at least {least}")


def _converted(value: Any, hint: Any) -> Any:
    """Raises TypeError."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        for argument in arguments:
            with suppress(TypeError):
                return _converted(value, argument)
        raise TypeError
    if kind in (tuple, frozenset):
        if isinstance(value, str | bytes | Mapping):
            raise TypeError
        # A prompt may have many tokens, so they go the shortest way.
        return kind(map(index, value) if arguments[0] is int else [_converted(item, arguments[0]) for item in value])
    if not isinstance(hint, type) or (isinstance(value, hint) and type(value) is not bool):
        return value
    if type(value) is bool and hint is not bool:
        raise TypeError
    if hint is int:
        return index(value)
    if hint is float and isinstance(value, Real):
        return float(value)
    if not isinstance(value, hint):
        raise TypeError
    return value


def _described(hint: Any) -> str:
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(map(_described, arguments))
    if kind in (tuple, frozenset):
        return f"a list in which each is {_described(arguments[0])}"
    return NAMES.get(hint) or str(getattr(hint, "__name__", hint))
