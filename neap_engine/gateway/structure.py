"""Bounds the number of values in a JSON body while it arrives, because a value of two bytes becomes an object of a
hundred."""

from shared.errors import InvalidInput

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
