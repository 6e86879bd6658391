"""Errors with the stable reason that a client sees."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.errors import NeapError


@contextmanager
def raises(
    kind: type[NeapError], reason: str, *, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[NeapError]]:
    """Fails unless the block raises a `kind` with this reason."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert caught.value.reason == reason
