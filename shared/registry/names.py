"""Checks names of models, aliases, blobs and requests.
The rules are strict so that every backend can use names as keys and paths."""

import hashlib
import re
from collections.abc import Collection, Iterable

from shared.errors import InvalidInput
from shared.plain_text import check_plain_text
from shared.pool_names import DEFAULT_POOL, POOL_PATTERN

_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_MODEL_ID = re.compile(rf"{_SEGMENT}(/{_SEGMENT}){{0,3}}")
_BLOB = re.compile(_SEGMENT)
_ALIAS = re.compile(rf"([a-z0-9._-]{{1,64}})(?:@({POOL_PATTERN}))?")
MAX_MODEL_ID_CHARACTERS = 200
MAX_BLOB_NAME_CHARACTERS = 128
MAX_REQUEST_ID_CHARACTERS = 128
MAX_NOTE_CHARACTERS = 2000


def check_model_id(model_id: str) -> str:
    """Check a model id: up to four segments separated by '/', each beginning with a letter or digit.

    Raises InvalidInput (BAD_MODEL_ID).
    """
    if len(model_id) > MAX_MODEL_ID_CHARACTERS or not _MODEL_ID.fullmatch(model_id):
        raise InvalidInput(
            f"model id {model_id[:MAX_MODEL_ID_CHARACTERS]!r} is not valid: it must have up to four segments separated "
            "by '/', each of letters, digits, '.', '_' and '-' and beginning with a letter or digit, and at most "
            f"{MAX_MODEL_ID_CHARACTERS} characters",
            reason="BAD_MODEL_ID",
        )
    return model_id


def only_model(model_id: str, configured: Collection[str]) -> str:
    """The model that a request means: an empty id is the only one that its service is configured with.
    Raises InvalidInput (MODEL_REQUIRED)."""
    if model_id:
        return model_id
    if len(configured) != 1:
        names = ", ".join(sorted(configured)) or "none"
        raise InvalidInput(
            f"the request names no model, and this service has: {names}",
            reason="MODEL_REQUIRED",
            metadata={"models": names},
        )
    return next(iter(configured))


def check_alias(alias: str) -> str:
    """Check an alias, which may be a pool's: NAME@POOL. Raises InvalidInput (BAD_ALIAS)."""
    found = _ALIAS.fullmatch(alias)
    # An alias of only digits would be read as a version number where both are accepted.
    if found is None or found[1].isdigit() or not found[1].strip("."):
        raise InvalidInput(
            f"alias {alias[:80]!r} is not valid: it must have 1 to 64 lower-case letters, digits, '-', '_' and '.', "
            "and not only digits or only dots; @ and the name of a pool may follow",
            reason="BAD_ALIAS",
        )
    return alias


def alias_in_pool(alias: str, pool: str) -> str | None:
    """Return the alias that callers of `pool` get before `alias`, if their pool has it: None if there is none, because
    their pool is the model's own or the alias names a pool already."""
    return None if pool == DEFAULT_POOL or "@" in alias else f"{alias}@{pool}"


def pool_of_alias(alias: str) -> str | None:
    """Return the pool whose alias it is, None for the model's own."""
    return alias.partition("@")[2] or None


def learning_note(*names: str) -> str:
    """Return the name of the note in which the schedule keeps its state of a model's pool, and that of the lease of the
    model."""
    return f"learning-{_digest(*names)}"


def speeds_note(model_id: str, alias: str) -> str:
    """Return the name of the note in which the judge keeps how fast the versions of an alias were."""
    return f"speeds-{_digest(model_id, alias)}"


def _digest(*names: str) -> str:
    return hashlib.sha256("/".join(names).encode()).hexdigest()[:32]


def check_blob_name(name: str) -> str:
    """Check the name of a blob. Raises InvalidInput (BAD_BLOB_NAME)."""
    if len(name) > MAX_BLOB_NAME_CHARACTERS or not _BLOB.fullmatch(name):
        raise InvalidInput(
            f"blob name {name[:MAX_BLOB_NAME_CHARACTERS]!r} is not valid: it must have letters, digits, '.', '_' and "
            "'-' and begin with a letter or digit",
            reason="BAD_BLOB_NAME",
        )
    return name


def check_request_id(request_id: str) -> str:
    """Check a request id. Raises InvalidInput (BAD_REQUEST_ID)."""
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARACTERS or not request_id.isprintable():
        raise InvalidInput(
            f"request_id must be 1 to {MAX_REQUEST_ID_CHARACTERS} printable characters", reason="BAD_REQUEST_ID"
        )
    return request_id


def check_note(text: str, field: str) -> str:
    """Check the `actor` or `reason` of a change. Raises InvalidInput (NOTE_TOO_LONG, BAD_NOTE)."""
    return check_plain_text(
        text, field, max_characters=MAX_NOTE_CHARACTERS, reason="BAD_NOTE", too_long="NOTE_TOO_LONG"
    )


def check_alias_change(alias: str, actor: str, reason: str) -> None:
    """Check the arguments of an alias change. Raises InvalidInput."""
    check_alias(alias)
    check_note(actor, "actor")
    check_note(reason, "reason")


def check_publication(model_id: str, request_id: str, actor: str) -> None:
    """Check the arguments of a publication other than its contents. Raises InvalidInput."""
    check_model_id(model_id)
    check_request_id(request_id)
    check_note(actor, "actor")


def unique_aliases(aliases: Iterable[str]) -> tuple[str, ...]:
    """Check aliases and return them in order without duplicates."""
    return tuple(dict.fromkeys(check_alias(alias) for alias in aliases))
