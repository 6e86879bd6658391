"""Reads and checks the JSON body of a request, within bounds of size and time."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from neap_engine.gateway.errors import refused
from neap_engine.gateway.schema import STORED, members, suggestion
from shared.blocking import BlockingPool
from shared.errors import Cancelled, InvalidInput, NeapError
from shared.shares import Hold

# Objects and lists. A chat of so many messages is beyond any context.
MAX_CONTAINERS = 16_384
# Values that a comma separates, such as token ids.
MAX_VALUES = 524_288


class Structure:
    """Counts brackets and commas outside of strings, chunk by chunk, without parsing."""

    def __init__(self) -> None:
        self._num_containers = 0
        self._num_values = 0
        self._is_in_string = False
        # A backslash at the end of a chunk, which belongs to the next character.
        self._backslash = b""

    def add(self, chunk: bytes) -> None:
        """Raises InvalidInput (BODY_TOO_LARGE) if the body has more values than are allowed."""
        text = (self._backslash + chunk).replace(b"\\\\", b"")
        self._backslash = b"\\" if text.endswith(b"\\") else b""
        parts = text.replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._is_in_string :: 2])
        self._is_in_string ^= len(parts) % 2 == 0
        self._num_containers += outside.count(b"{") + outside.count(b"[")
        self._num_values += outside.count(b",")
        for count, most, what in (
            (self._num_containers, MAX_CONTAINERS, "objects and lists"),
            (self._num_values, MAX_VALUES, "values"),
        ):
            if count > most:
                raise InvalidInput(
                    f"the body has more than {most} {what}", reason="BODY_TOO_LARGE", metadata={"max_values": str(most)}
                )


# A body of this size takes at most a few milliseconds.
INLINE_BYTES = 16 * 1024


T = TypeVar("T")


class BodyParser:
    """Parses one large body at a time. Clients take turns: those with many large bodies do not hold up the others."""

    def __init__(self) -> None:
        self._pool = BlockingPool(1, name="gateway-parser")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def parse(self, client: str, body: bytes, parse: Callable[[bytes], T]) -> T:
        """Raises as `parse` does."""
        if len(body) <= INLINE_BYTES:
            return parse(body)
        turn = self._turns.get(client)
        if turn is None:
            turn = self._turns[client] = asyncio.Lock()
        async with turn:
            parsed = await self._pool.call(_parsed, body, parse)
        if isinstance(parsed, NeapError):
            raise parsed
        return parsed


def _parsed(body: bytes, parse: Callable[[bytes], T]) -> T | NeapError:
    try:
        return parse(body)
    except NeapError as error:
        # Its traceback and its cause hold the parsed body, until the client has read the answer.
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)


# Most of a refused request's body that is read and dropped, so that its sender sees the answer.
DROPPED_BYTES = 64 << 20
# Most fields of one JSON object. Each unknown one is an error object while the body is checked.
MAX_FIELDS = 1024

M = TypeVar("M", bound=BaseModel)


async def read_body(scope: Scope, receive: Receive, hold: Hold, *, max_bytes: int, timeout_s: float) -> bytes:
    """Return the body. `hold` is told how many bytes have arrived, and may raise.

    Raises InvalidInput (BODY_TOO_LARGE, REQUEST_TIMEOUT), Cancelled if the client has gone.
    """
    declared = next((value for key, value in scope["headers"] if key == b"content-length"), b"0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    structure = Structure()
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in _chunks(receive):
                if len(body) + len(chunk) > max_bytes:
                    raise _too_large(max_bytes)
                hold(len(body) + len(chunk))
                structure.add(chunk)
                body += chunk
    except TimeoutError as error:
        raise InvalidInput(f"the body has not arrived within {timeout_s:g} s", reason="REQUEST_TIMEOUT") from error
    return bytes(body)


async def drop_body(receive: Receive, timeout_s: float) -> None:
    """Read the rest of the body and drop it, within `DROPPED_BYTES` and `timeout_s`."""
    num_bytes = 0
    with suppress(TimeoutError, Cancelled):
        async with asyncio.timeout(timeout_s):
            async for chunk in _chunks(receive):
                num_bytes += len(chunk)
                if num_bytes > DROPPED_BYTES:
                    return


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client has closed the connection", reason="CLIENT_GONE")
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


def _too_large(max_bytes: int) -> InvalidInput:
    return InvalidInput(
        f"the body is larger than {max_bytes} bytes", reason="BODY_TOO_LARGE", metadata={"max_bytes": str(max_bytes)}
    )


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. Raises InvalidInput (BAD_JSON)."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise refused("the body is not UTF-8", reason="BAD_JSON") from error
    except RecursionError as error:
        raise refused("the body is nested too deeply", reason="BAD_JSON") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise refused(f"the body is not JSON: {error.msg} at {where}", reason="BAD_JSON") from error
    except ValueError as error:  # NaN and Infinity, or an integer with too many digits
        raise refused("the body has a number that is not valid", reason="BAD_JSON") from error
    if not isinstance(value, dict):
        raise refused("the body must be a JSON object", reason="BAD_JSON")
    return value


def validated(kind: type[M], fields: dict[str, Any]) -> M:
    """Build `kind` from `fields`.

    Raises InvalidInput (UNKNOWN_FIELD, UNSUPPORTED_FIELD, INVALID_INPUT) that names the first wrong field.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    # A value that fits no member of a union has an error for each. The deepest one is about the member that was meant.
    of_first_field = [problem for problem in errors if problem["loc"][:1] == errors[0]["loc"][:1]]
    first = max(of_first_field, key=lambda problem: len(problem["loc"]))
    if first["type"] == "unsupported_field":
        field = _path((*first["loc"], first["msg"]))
        if first["msg"] in STORED:
            said = f"{field} is not supported here: nothing is stored, so send the whole conversation in the request"
            raise refused(said, field, reason="UNSUPPORTED_FIELD")
        raise refused(f"{field} is not supported here with this value; leave it out", field, reason="UNSUPPORTED_FIELD")
    field = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        parent, dot, _ = field.rpartition(".")
        meant = suggestion(kind, first["loc"])
        hint = f"; did you mean {parent}{dot}{meant}?" if meant else ""
        raise refused(f"the field {field} is not known{hint}", field, reason="UNKNOWN_FIELD")
    raise refused(f"{field or 'the body'}: {first['msg']}", field)


def _path(location: tuple[int | str, ...]) -> str:
    """Format a location as "messages[0].content". Names that pydantic adds for the members of a union are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in members():
            path += f".{part[:64]}" if path else part[:64]
        elif not path:
            path = repr(part[:64])
    return path


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(pairs) > MAX_FIELDS:
        raise refused(f"an object has more than {MAX_FIELDS} fields", reason="BAD_JSON")
    if len(fields) < len(pairs):
        raise refused("an object has a field twice", reason="BAD_JSON")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
