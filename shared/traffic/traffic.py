"""Answers that workers served, kept in the registry's folder or bucket for routers to learn from.

    traffic/<model id, '/' as '!'>/<pool>/<hour>-<number of tokens>-<sha256 of the bytes>

The interface, all of which blocks:

- `Traffic.write(answers)` keeps answers, which may be of several models, pools and hours (workers).
- `Traffic.batches(model_id, pool)` lists what there is, oldest first, without reading it: hours, tokens, bytes.
- `Traffic.read(model_id, pool, max_tokens=..)` gives the answers, each once (whoever learns).
- `Traffic.forget` and `Traffic.expire` remove, `Traffic.expire_if_due` for all processes once an hour.

An answer of one pool cannot reach another's router: the pool is in the object's path, a reader lists one pool's folder,
and an object that says something else within is not read.

Whatever lies under traffic/ may be cut, forged, too large or there twice. It is then left out, counted and logged.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from uuid import uuid4

import structlog

from shared.digests import digest_of
from shared.errors import Corrupt
from shared.pool_names import check_pool
from shared.registry.contents import hexadecimal_of
from shared.registry.factory import open_store
from shared.registry.names import check_model_id
from shared.registry.store import Store, StoredObject
from shared.registry.sweep import PART_S, PARTS
from shared.traffic.answer import HOUR_S, ServedAnswer
from shared.traffic.encoding import MAX_CONTENT_BYTES, MAX_OBJECT_BYTES, content_bytes, decode, encode
from shared.traffic.encryption import read_key

FOLDER = "traffic"
RETENTION_S = 7 * 24 * 3600.0
MAX_READ_TOKENS = 4 << 20
# What is dated later than this, from a clock that was wrong, would outlive its time: it is removed, too.
_AHEAD_S = 24 * 3600.0
EXPIRE_EVERY_S = 3600.0
# Empty; written whenever somebody begins to remove what is old.
_EXPIRY = "notes/traffic-expiry"
_NAME = re.compile(r"([0-9]{8})-([0-9]{8})-([0-9a-f]{64})")
_PART = re.compile(r"[0-9a-f]{32}")

log = structlog.get_logger("neap.traffic")


@dataclass(frozen=True)
class Batch:
    """An object: `num_tokens` in answers that ended in the Unix hour `hour`. `written_s`: by the store's clock.

    Its name says so, and a forged one may lie; `read` finds out.
    """

    stored: StoredObject
    hour: int
    num_tokens: int
    digest: str


@dataclass(frozen=True)
class KeptAnswers:
    """`skipped`: objects, or repeated answers, that were left out, by reason."""

    answers: tuple[ServedAnswer, ...]
    skipped: Mapping[str, int]


@dataclass(frozen=True)
class Removed:
    num_objects: int
    num_bytes: int


def open_traffic(registry: str, key_file: Path | None = None) -> "Traffic":
    """Open what is kept in `registry` (as `open_registry`). Raises InvalidInput (BAD_REGISTRY, BAD_TRAFFIC_KEY)."""
    return Traffic(open_store(registry), None if key_file is None else read_key(key_file))


class Traffic:
    """Thread-safe. Methods raise the store's errors. With a `key`, objects are encrypted and no others are read."""

    def __init__(self, store: Store, key: bytes | None = None) -> None:
        self._store = store
        self._key = key

    def write(self, answers: Iterable[ServedAnswer]) -> None:
        """Keep answers: an object for each model, pool and hour among them, or several. An error leaves the rest
        unwritten. An answer of more than MAX_CONTENT_BYTES raises Corrupt, before anything is written."""
        for batch in list(_batches(answers)):
            data = encode(batch, self._key)
            num_tokens = sum(answer.num_tokens for answer in batch)
            name = f"{batch[0].hour:08d}-{num_tokens:08d}-{hexadecimal_of(digest_of(data))}"
            self._store.create(f"{_folder(batch[0].model_id, batch[0].pool)}/{name}", data)

    def models(self) -> list[str]:
        return [name.replace("!", "/") for name in self._store.folders(FOLDER)]

    def pools(self, model_id: str) -> list[str]:
        return self._store.folders(f"{FOLDER}/{_encoded(model_id)}")

    def batches(self, model_id: str, pool: str) -> list[Batch]:
        """List a pool's objects by their hours. Objects with other names are left out."""
        found = map(_batch_of, self._store.objects(_folder(model_id, pool)))
        return sorted((batch for batch in found if batch is not None), key=lambda batch: batch.stored.name)

    def read(self, model_id: str, pool: str, *, max_tokens: int = MAX_READ_TOKENS) -> KeptAnswers:
        """Read what is kept, newest hours first, until there are `max_tokens`. Answers are in the order of their
        hours."""
        kept: list[list[ServedAnswer]] = []
        ids: set[bytes] = set()
        skipped: Counter[str] = Counter()
        num_tokens = 0
        for batch in reversed(self.batches(model_id, pool)):
            if num_tokens >= max_tokens:
                skipped["TOO_MANY_TOKENS"] += 1
                continue
            try:
                answers = self._answers(batch, model_id, pool)
            except Corrupt as error:
                skipped[error.reason] += 1
                log.warning("an object of served answers is left out", path=batch.stored.path, problem=error.message)
                continue
            new = list({answer.id: answer for answer in answers if answer.id not in ids}.values())
            skipped["REPEATED"] += len(answers) - len(new)
            ids.update(answer.id for answer in new)
            num_tokens += sum(answer.num_tokens for answer in new)
            kept.append(new)
        in_order = tuple(answer for new in reversed(kept) for answer in new)
        return KeptAnswers(in_order, dict(+skipped))

    def _answers(self, batch: Batch, model_id: str, pool: str) -> list[ServedAnswer]:
        data = self._store.get(batch.stored.path, _check_size)
        if data is None:  # removed since it was listed
            return []
        if hexadecimal_of(digest_of(data)) != batch.digest:
            raise Corrupt("its bytes have another digest than its name")
        answers = decode(data, model_id, pool, batch.hour, self._key)
        if sum(answer.num_tokens for answer in answers) != batch.num_tokens:
            raise Corrupt("it has another number of tokens than its name says")
        return answers

    def forget(self, pool: str, *, model_id: str | None = None, before_s: float | None = None) -> Removed:
        """Remove what is kept of a pool, for one model or all of them: all of it, or every hour that began before
        `before_s` (Unix seconds)."""
        check_pool(pool)
        models = self.models() if model_id is None else [check_model_id(model_id)]
        objects = (found for model in models for found in self._store.objects(f"{FOLDER}/{_encoded(model)}/{pool}"))
        return self._remove(found for found in objects if before_s is None or _began_s(found) < before_s)

    def expire(self, retention_s: float = RETENTION_S) -> Removed:
        """Remove what was written more than `retention_s` ago by the store's clock, or a day later than now, and what
        killed processes had begun to write into a folder more than a day ago. Also what is no object of ours."""
        self._store.replace(_EXPIRY, b"")
        now_s = self._now_s()
        answers = self._remove(
            found
            for found in self._store.objects(FOLDER)
            if not -_AHEAD_S <= now_s - found.last_modified_s <= retention_s
        )
        parts = self._remove(
            found
            for found in self._store.objects(PARTS)
            if _PART.fullmatch(found.name) and now_s - found.last_modified_s > PART_S
        )
        return Removed(answers.num_objects + parts.num_objects, answers.num_bytes + parts.num_bytes)

    def expire_if_due(self, retention_s: float = RETENTION_S) -> Removed | None:
        """`expire`, or None if any process has begun to within `EXPIRE_EVERY_S`: it lists all that is kept, so a
        thousand workers must not each do it. Two that ask within milliseconds may both do it, which harms nothing."""
        if self._store.exists(_EXPIRY) and 0 <= self._now_s() - self._store.last_modified_s(_EXPIRY) < EXPIRE_EVERY_S:
            return None
        return self.expire(retention_s)

    def _now_s(self) -> float:
        path = f"{PARTS}/{uuid4().hex}"  # a sweep removes it where this process dies
        self._store.create(path, b"")
        try:
            return self._store.last_modified_s(path)
        finally:
            self._store.remove(path)

    def _remove(self, objects: Iterable[StoredObject]) -> Removed:
        num_objects = num_bytes = 0
        for found in list(objects):
            self._store.remove(found.path)
            num_objects += 1
            num_bytes += found.size_bytes
        return Removed(num_objects, num_bytes)


def _batches(answers: Iterable[ServedAnswer]) -> Iterator[Sequence[ServedAnswer]]:
    """Answers as the objects that they make."""

    def place(answer: ServedAnswer) -> tuple[str, str, int]:
        return check_model_id(answer.model_id), check_pool(answer.pool), answer.hour

    for _, group in groupby(sorted(answers, key=place), key=place):
        batch: list[ServedAnswer] = []
        num_bytes = 0
        for answer in group:
            more_bytes = content_bytes(answer)
            if more_bytes > MAX_CONTENT_BYTES:
                raise Corrupt(f"an answer of {answer.num_tokens} tokens is too long to be kept")
            if num_bytes + more_bytes > MAX_CONTENT_BYTES:
                yield batch
                batch, num_bytes = [], 0
            batch.append(answer)
            num_bytes += more_bytes
        yield batch


def _encoded(model_id: str) -> str:
    return check_model_id(model_id).replace("/", "!")


def _folder(model_id: str, pool: str) -> str:
    return f"{FOLDER}/{_encoded(model_id)}/{check_pool(pool)}"


def _batch_of(found: StoredObject) -> Batch | None:
    match = _NAME.fullmatch(found.name)
    return None if match is None else Batch(found, int(match[1]), int(match[2]), match[3])


def _began_s(found: StoredObject) -> float:
    """When the hour of an object began. What is no object of ours counts as old."""
    batch = _batch_of(found)
    return float("-inf") if batch is None else float(batch.hour * HOUR_S)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_OBJECT_BYTES:
        raise Corrupt(f"it has {num_bytes} bytes, more than {MAX_OBJECT_BYTES}")
