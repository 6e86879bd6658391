"""Nonsense for services and loaders: seeded, bounded in time, and said again when it finds something.

`NEAP_FUZZ_S` is how long each target is fuzzed (CI takes the default), `NEAP_FUZZ_SEED` the first seed; case N of a run
has seed + N.
"""

import math
import os
import random
import time
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

SECONDS = float(os.environ.get("NEAP_FUZZ_S", "4"))
SEED = int(os.environ.get("NEAP_FUZZ_SEED", "0"))

_TEXTS = (
    "",
    "tiny",
    "latest",
    "stable",
    "hello",
    "0",
    "-1",
    "99999999999999999999",
    " ",
    "\x00",
    "a\nb\r\n",
    "../../../etc/passwd",
    "/etc/passwd",
    "tiny/../tiny",
    "%s%n{0}${x}",
    "'; DROP TABLE jobs;--",
    "\u202e\ufeff\U0001f600é",
    "\ud7ff\ue000\uffff",
    "sha256:" + "0" * 64,
    "x" * 5000,
    "é" * 300,
)
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 5e-324, 1e-300, 1e308, math.inf, -math.inf, math.nan)
_WIDTHS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def cases(seconds: float = SECONDS) -> Iterator[tuple[int, random.Random]]:
    """(seed, random numbers of that seed) until the time is over, at least ten."""
    end_s = time.monotonic() + seconds
    seed = SEED
    while time.monotonic() < end_s or seed < SEED + 10:
        yield seed, random.Random(seed)
        seed += 1


def random_message(kind: Descriptor, chance: random.Random, depth: int = 0) -> Any:
    """A valid message with whatever its fields can hold; what is named like a model's id often names the model
    "tiny"."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if field.name == "model_id" and chance.random() < 0.7:
            message.model_id = "tiny"
        elif chance.random() < 0.5 and (depth < 6 or field.message_type is None):
            _fill(message, field, chance, depth)
    return message


def _fill(message: Any, field: FieldDescriptor, chance: random.Random, depth: int) -> None:
    if field.is_repeated:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return
        count = chance.choice((0, 1, 1, 2, 3, 20, 300))
        if field.message_type is not None:
            for _ in range(min(count, 5)):
                getattr(message, field.name).append(random_message(field.message_type, chance, depth + 1))
        else:
            getattr(message, field.name).extend(_scalar(field, chance) for _ in range(count))
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(random_message(field.message_type, chance, depth + 1))
    else:
        setattr(message, field.name, _scalar(field, chance))


def _scalar(field: FieldDescriptor, chance: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = chance.choice(_TEXTS)
        return text if field.type == FieldDescriptor.TYPE_STRING else text.encode()
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice((*_FLOATS, chance.random()))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return chance.choice((0, 1, 2, 3, 4, -1, 77, 2**31 - 1))
    low, high = _WIDTHS[kind]
    return chance.choice((0, 1, 2, 3, 7, 100, 1 << 16, low, high, chance.randint(low, high)))


def extremes(message: Any) -> Iterator[tuple[str, Any]]:
    """(what, copy) of a valid message with one number, enum or flag at an extreme, in the messages it holds, too."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            if field.is_repeated or (field.containing_oneof and not message.HasField(field.name)):
                continue
            for what, inner in extremes(getattr(message, field.name)):
                changed = _copy(message)
                getattr(changed, field.name).CopyFrom(inner)
                yield f"{field.name}.{what}", changed
            continue
        for value in _EXTREMES.get(field.cpp_type, ()):
            changed = _copy(message)
            if field.is_repeated:
                getattr(changed, field.name)[:] = [value]
            else:
                setattr(changed, field.name, value)
            yield f"{field.name}={value}", changed


def _copy(message: Any) -> Any:
    copied = type(message)()
    copied.CopyFrom(message)
    return copied


_EXTREMES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_DOUBLE: (*_FLOATS, -1e308),
    FieldDescriptor.CPPTYPE_FLOAT: (math.inf, -math.inf, math.nan),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 77, 2**31 - 1),
    **{kind: (low, high) for kind, (low, high) in _WIDTHS.items()},
}


def mutated(data: bytes, chance: random.Random) -> bytes:
    """`data` with some of its bits flipped, cut, doubled, replaced or moved."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5, 30))):
        at = chance.randrange(len(out) + 1)
        what = chance.randrange(6)
        if what == 0 and at < len(out):
            out[at] ^= 1 << chance.randrange(8)
        elif what == 1:
            del out[at : at + chance.choice((1, 4, 100, 1 << 20))]
        elif what == 2:
            out[at:at] = chance.randbytes(chance.choice((1, 8, 200)))
        elif what == 3:
            out[at:at] = out[max(0, at - 50) : at]
        elif what == 4:
            out[at : at + 8] = chance.choice((b"\xff" * 8, b"\x00" * 8, b"\x7f" + b"\xff" * 7))
        elif what == 5 and at < len(out):
            out[at] = chance.randrange(256)
    return bytes(out)


def garbage(kind: Descriptor, chance: random.Random) -> bytes:
    """What no client would send: random bytes, a valid message that was damaged, or messages nested without end."""
    choice = chance.randrange(3)
    if choice == 0:
        return chance.randbytes(chance.choice((1, 3, 20, 1000, 50_000)))
    if choice == 1:
        return mutated(random_message(kind, chance).SerializeToString(), chance)
    data = b""
    for _ in range(chance.choice((10, 200))):
        data = bytes([chance.choice((0x0A, 0x12, 0x1A, 0x22))]) + _varint(len(data)) + data
    return data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out) + bytes([number])
