"""Pages of lists: https://google.aip.dev/158.

A page token holds where the next page begins and a digest of the request without its page fields, so it is of use only
with the same request. Clients must treat it as opaque.
"""

import base64
import binascii
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shared.errors import InvalidInput

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
# A page of records whose size is not bounded ends here.
# Below the 4 MiB that clients of gRPC accept unless they are told otherwise.
MAX_PAGE_BYTES = 2 << 20
_DIGEST_BYTES = 12

T = TypeVar("T")


def read_page(request: Any) -> tuple[int, str]:
    """Return the most results that `request` asks for and the cursor of its page token, "" for the first page.

    Raises InvalidInput: BAD_PAGE_SIZE for a negative size, BAD_PAGE_TOKEN for a token that did not come with an answer
    to the same request.
    """
    if request.page_size < 0:
        raise InvalidInput(
            f"page_size is {request.page_size}; it must not be negative",
            reason="BAD_PAGE_SIZE",
            metadata={"field": "page_size"},
        )
    return min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE), _cursor(request)


def read_numbered_page(request: Any) -> tuple[int, int | None]:
    """The same for a list whose cursors are numbers. The cursor of the first page is None."""
    limit, cursor = read_page(request)
    if cursor and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 20):
        raise _bad_token()
    return limit, int(cursor) if cursor else None


def page_token(request: Any, cursor: str | int) -> str:
    """Return the token with which the same request gets the page that begins at `cursor`."""
    return base64.urlsafe_b64encode(_digest(request) + str(cursor).encode()).decode()


def named_page(request: Any, items: Sequence[T], name: Callable[[T], str]) -> tuple[Sequence[T], str]:
    """Return one page of `items`, which are sorted by `name`, and the token of the next page, "" on the last one."""
    limit, after = read_page(request)
    rest = [item for item in items if name(item) > after]
    token = page_token(request, name(rest[limit - 1])) if len(rest) > limit else ""
    return rest[:limit], token


def _cursor(request: Any) -> str:
    if not request.page_token:
        return ""
    try:
        token = base64.b64decode(request.page_token, altchars=b"-_", validate=True)
        digest, cursor = token[:_DIGEST_BYTES], token[_DIGEST_BYTES:].decode()
    except (binascii.Error, ValueError):
        digest, cursor = b"", ""
    if digest != _digest(request) or not cursor:
        raise _bad_token()
    return cursor


def _bad_token() -> InvalidInput:
    return InvalidInput(
        "page_token is not from an answer to the same request; start again without it",
        reason="BAD_PAGE_TOKEN",
        metadata={"field": "page_token"},
    )


def _digest(request: Any) -> bytes:
    bare = type(request)()
    bare.CopyFrom(request)
    bare.ClearField("page_size")
    bare.ClearField("page_token")
    contents = bare.DESCRIPTOR.full_name.encode() + b"\0" + bare.SerializeToString(deterministic=True)
    return hashlib.sha256(contents).digest()[:_DIGEST_BYTES]
