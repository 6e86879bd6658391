"""Counts the messages in a request before they become objects: an empty one takes two bytes, and forty times as much
once it is parsed."""

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from shared.errors import InvalidInput

# Fewer bytes hold too few messages to matter.
FREE_BYTES = 1 << 18
MAX_MESSAGES = 1 << 15


def check_outline(kind: Any, data: bytes) -> None:
    """Raises InvalidInput (REQUEST_TOO_COMPLEX) if `data`, a serialised message of class `kind`, has more than
    MAX_MESSAGES in its repeated fields, and DecodeError if it is none."""
    if len(data) > FREE_BYTES:
        _count(kind.DESCRIPTOR, data, 0)


def _count(descriptor: Any, data: bytes, found: int) -> int:
    """`found` plus the messages in the repeated fields of a message and of those in it."""
    return _within(descriptor, outline_of(descriptor).FromString(data), found)


def _within(descriptor: Any, parsed: Any, found: int) -> int:
    for field in _message_fields(descriptor):
        if not field.is_repeated:
            if parsed.HasField(field.name):
                found = _within(field.message_type, getattr(parsed, field.name), found)
            continue
        parts = getattr(parsed, field.name)
        found += len(parts)
        if found > MAX_MESSAGES:
            raise InvalidInput(
                f"the request has more than {MAX_MESSAGES} messages in its lists", reason="REQUEST_TOO_COMPLEX"
            )
        if _message_fields(field.message_type):
            for part in parts:
                found = _count(field.message_type, part, found)
    return found


@cache
def _message_fields(descriptor: Any) -> list[Any]:
    return [field for field in descriptor.fields if field.message_type is not None]


@cache
def outline_of(descriptor: Any) -> Any:
    """The class of the same message with its message fields alone, where a repeated one is bytes: they are not
    parsed."""
    file = descriptor_pb2.FileDescriptorProto(name="outline.proto", package="outline", syntax="proto3")
    added: set[str] = set()

    def add(described: Any) -> str:
        name: str = described.full_name.replace(".", "_")
        if name not in added:
            added.add(name)
            message = file.message_type.add(name=name)
            for field in _message_fields(described):
                made = message.field.add(name=field.name, number=field.number)
                if field.is_repeated:
                    made.label, made.type = made.LABEL_REPEATED, made.TYPE_BYTES
                else:
                    made.label, made.type = made.LABEL_OPTIONAL, made.TYPE_MESSAGE
                    made.type_name = f".outline.{add(field.message_type)}"
        return name

    name, pool = add(descriptor), descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"outline.{name}"))
