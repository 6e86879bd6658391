"""Answers of one model, pool and hour as the bytes of an object.

    magic "NEAPTRAF", version u8, encrypted u8 (0 or 1), size of the contents u32, then the contents, by zlib, encrypted
    if said so; all numbers are little-endian.
    contents: model id and pool (u16 length and UTF-8 each), hour u32, number of answers u32, then of each answer:
    id (16 bytes), router version u32, numerics id (u16 length and UTF-8), numbers of prompt's and answer's tokens u32
    u32, the token ids u32 each.

A reader believes nothing: sizes are bounded before memory is taken, and every byte must be accounted for.
"""

import struct
import zlib
from array import array
from collections.abc import Sequence
from sys import byteorder

from shared.errors import Corrupt
from shared.traffic.answer import ID_BYTES, ServedAnswer
from shared.traffic.encryption import ADDED_BYTES, decrypt, encrypt

MAGIC, VERSION = b"NEAPTRAF", 1
# The size of an object's contents at most. A batch ends before it has more.
MAX_CONTENT_BYTES = 4 << 20
_HEAD = struct.Struct("<8sBBI")
# zlib adds at most this to what it cannot make smaller (RFC 1951: 5 bytes for each block, RFC 1950: 6).
MAX_OBJECT_BYTES = _HEAD.size + MAX_CONTENT_BYTES + MAX_CONTENT_BYTES // 1000 + 64 + ADDED_BYTES
_U16, _U32, _PAIR = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<II")
_TOKEN_BYTES = 4


def content_bytes(answer: ServedAnswer) -> int:
    """Bytes of an answer in the contents, its place included."""
    texts = len(answer.model_id) + len(answer.pool) + len(answer.numerics_id)
    return ID_BYTES + 64 + 4 * texts + _TOKEN_BYTES * answer.num_tokens


def encode(answers: Sequence[ServedAnswer], key: bytes | None = None) -> bytes:
    """Encode answers of one model, pool and hour, at least one, with at most MAX_CONTENT_BYTES (`content_bytes`)."""
    first = answers[0]
    assert all((a.model_id, a.pool, a.hour) == (first.model_id, first.pool, first.hour) for a in answers)
    parts = [_text(first.model_id), _text(first.pool), _PAIR.pack(first.hour, len(answers))]
    for answer in answers:
        parts += [answer.id, _U32.pack(answer.router_version), _text(answer.numerics_id)]
        parts += [_PAIR.pack(len(answer.prompt_ids), len(answer.answer_ids))]
        parts += [_swapped(array("I", ids)).tobytes() for ids in (answer.prompt_ids, answer.answer_ids)]
    content = b"".join(parts)
    assert len(content) <= MAX_CONTENT_BYTES
    data = zlib.compress(content)
    head = _HEAD.pack(MAGIC, VERSION, key is not None, len(content))
    return head + (data if key is None else encrypt(key, data, head + _place(first.model_id, first.pool, first.hour)))


def decode(data: bytes, model_id: str, pool: str, hour: int, key: bytes | None = None) -> list[ServedAnswer]:
    """Decode an object that was found at the place of `model_id`, `pool` and `hour`. Raises Corrupt."""
    if len(data) < _HEAD.size:
        raise Corrupt("the object is cut")
    magic, version, is_encrypted, num_bytes = _HEAD.unpack_from(data)
    if (magic, version) != (MAGIC, VERSION) or is_encrypted > 1 or num_bytes > MAX_CONTENT_BYTES:
        raise Corrupt("the object has another format")
    head, packed = data[: _HEAD.size], data[_HEAD.size :]
    if is_encrypted:
        if key is None:
            raise Corrupt("the object is encrypted, and there is no key")
        packed = decrypt(key, packed, head + _place(model_id, pool, hour))
    elif key is not None:
        # Whoever may write the objects but has no key could forge them otherwise.
        raise Corrupt("the object is not encrypted, and there is a key")
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(packed, num_bytes + 1)
    except zlib.error as error:
        raise Corrupt("the object's contents are damaged") from error
    if len(content) != num_bytes or not unpacking.eof or unpacking.unused_data:
        raise Corrupt("the object's contents have another size")
    return _Reader(content).answers(model_id, pool, hour)


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def answers(self, model_id: str, pool: str, hour: int) -> list[ServedAnswer]:
        if (self._text(), self._text()) != (model_id, pool):
            raise Corrupt("the object belongs to another model or pool")
        found_hour, num_answers = _PAIR.unpack(self._take(_PAIR.size))
        if found_hour != hour:
            raise Corrupt("the object belongs to another hour")
        answers = []
        for _ in range(num_answers):  # each takes bytes that are there, so a forged number ends soon
            answer_id = self._take(ID_BYTES)
            (router_version,) = _U32.unpack(self._take(_U32.size))
            numerics_id = self._text()
            sizes = _PAIR.unpack(self._take(_PAIR.size))
            prompt_ids, answer_ids = map(self._tokens, sizes)
            answers.append(
                ServedAnswer(model_id, pool, router_version, numerics_id, hour, prompt_ids, answer_ids, answer_id)
            )
        if self._at != len(self._content):
            raise Corrupt("the object has bytes that belong to no answer")
        return answers

    def _tokens(self, number: int) -> "array[int]":
        ids = array("I")
        ids.frombytes(self._take(number * _TOKEN_BYTES))
        return _swapped(ids)

    def _text(self) -> str:
        (size,) = _U16.unpack(self._take(_U16.size))
        try:
            return self._take(size).decode()
        except UnicodeDecodeError as error:
            raise Corrupt("the object has a text that is none") from error

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._content):
            raise Corrupt("the object's contents are cut")
        taken = self._content[self._at : end]
        self._at = end
        return taken


def _text(text: str) -> bytes:
    data = text.encode()
    return _U16.pack(len(data)) + data


def _place(model_id: str, pool: str, hour: int) -> bytes:
    return _text(model_id) + _text(pool) + _U32.pack(hour)


def _swapped(ids: "array[int]") -> "array[int]":
    if byteorder == "big":
        ids.byteswap()
    return ids
