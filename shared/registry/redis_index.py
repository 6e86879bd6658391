"""An `Index` in Redis 6.2 or later, or Valkey, which all clients of a bucket share.

Two keys per model, with one hash tag, so that a cluster keeps them on one node:

    neap:{<model>}:index    hash: registry, applied, versions, events, aliases (JSON), version:<n> (JSON), request:<id>
    neap:{<model>}:events   stream: ids are <event number>-0, field "event" holds JSON

A model's whole index is in one hash. A server that evicts keys therefore drops all of it at once, which is detected and
repaired.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import redis
import structlog
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from shared.errors import Exhausted, NeapError, PreconditionFailed, Unavailable
from shared.registry.address import RegistryAddress
from shared.registry.base import AliasChange
from shared.registry.index import EVENT_PAGE, Advance, Event, IndexDamaged, ModelState
from shared.registry.journal import (
    VersionRecord,
    change_from_record,
    change_to_record,
    changes_from_records,
    version_from_record,
)
from shared.timeouts import REDIS_ANSWER_S, REDIS_CONNECT_S, REDIS_WAIT_S

# A change of another client is told by the stream. This is for records whose writer died, and for data that Redis lost.
FRESHNESS_S = 30.0

# KEYS index, events; ARGV registry, before (-1: whatever it is), replace ("1": whatever there is goes first), applied,
# number of fields, fields and values, events' first number, events. Returns what is applied now, or -1 when the index
# is another registry's. A stream that is not what it should be is dropped: readers notice by the number of events, and
# have it rebuilt. So is a key of another type, before anything is written: a script that fails halfway is not undone.
_ADVANCE = """
for i, kind in ipairs({'hash', 'stream'}) do
  if redis.call('TYPE', KEYS[i])['ok'] ~= kind then redis.call('DEL', KEYS[i]) end
end
local owner = redis.call('HGET', KEYS[1], 'registry')
if owner and owner ~= ARGV[1] then return -1 end
local applied = tonumber(redis.call('HGET', KEYS[1], 'applied') or '0')
if ARGV[2] ~= '-1' and applied ~= tonumber(ARGV[2]) then return applied or 0 end
if ARGV[3] == '1' then redis.call('DEL', KEYS[1], KEYS[2]) end
redis.call('HSET', KEYS[1], 'registry', ARGV[1], 'applied', ARGV[4])
local at = 6
for _ = 1, tonumber(ARGV[5]) do
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
  at = at + 2
end
local event = tonumber(ARGV[at])
if redis.call('XLEN', KEYS[2]) ~= event - 1 then redis.call('DEL', KEYS[2]) end
for i = at + 1, #ARGV do
  redis.call('XADD', KEYS[2], string.format('%.0f-0', event), 'event', ARGV[i])
  event = event + 1
end
return tonumber(ARGV[4])
"""

# KEYS index, events; ARGV first event, limit. Returns the number there should be, the number there is, and a page.
_EVENTS = """
local count = tonumber(redis.call('HGET', KEYS[1], 'events') or '0')
return {count, redis.call('XLEN', KEYS[2]), redis.call('XRANGE', KEYS[2], ARGV[1], '+', 'COUNT', ARGV[2])}
"""

log = structlog.get_logger("neap.registry")


class RedisIndex:
    """Every call has a bounded duration.

    Methods raise Unavailable (REDIS_UNAVAILABLE, REDIS_REFUSED, ...) and Exhausted (REDIS_FULL).
    """

    may_forget = True

    def __init__(self, address: RegistryAddress, *, freshness_s: float = FRESHNESS_S) -> None:
        self.freshness_s = freshness_s
        self._address = address
        self._registry_id = ""
        with _errors():
            self._client = self._connect()

    def _connect(self) -> Any:
        address = self._address
        options: dict[str, Any] = {
            "socket_connect_timeout": REDIS_CONNECT_S,
            "socket_timeout": REDIS_ANSWER_S,
            "health_check_interval": 30,
            "protocol": 2,
        }
        if address.ssl_ca_certs is not None:
            options["ssl_ca_certs"] = address.ssl_ca_certs
        if address.is_cluster:
            return redis.RedisCluster.from_url(address.redis_url, **options)
        # All commands are safe to repeat. One retry, so that a hanging server is detected within seconds.
        retry = Retry(ExponentialBackoff(cap=0.2, base=0.02), 1)
        return redis.Redis.from_url(address.redis_url, retry=retry, **options)

    def _ask(self, command: Callable[[Any], Any]) -> Any:
        """Return the answer to `command`, which is given the client."""
        with _errors():
            client = self._client
            try:
                return command(client)
            except redis.ResponseError:
                # A demoted server refuses, on connections that outlive a failover. The address may mean another server
                # now, so all connections are made anew. The old client closes its own when the last call is done.
                if self._client is client:
                    self._client = self._connect()
                return command(self._client)

    def open(self, registry_id: str) -> None:
        """Check that the server answers. Logs a warning if it evicts keys when its memory is full."""
        self._registry_id = registry_id
        self._ask(lambda client: client.ping())
        try:
            policy = self._client.info("memory").get("maxmemory_policy", "noeviction")
        except (redis.RedisError, AttributeError):
            return  # not allowed to ask, or a cluster, which answers per node
        if policy != "noeviction":
            log.warning("Redis may drop the registry's index; it is restored when missed", policy=policy)

    def check_writable(self) -> None:
        """Write a key that expires at once."""
        self._ask(lambda client: client.set("neap:probe", "", px=1))

    def state(self, model_id: str) -> ModelState:
        """Return the model's state, empty if it is not in the index.
        Raises PreconditionFailed (INDEX_OF_ANOTHER_REGISTRY)."""
        names = ("registry", "applied", "versions", "events", "aliases")
        with _parsed():
            owner, *counts, encoded = self._ask(lambda client: client.hmget(_keys(model_id)[0], names))
            if owner is None:
                return ModelState()
            self._check_owner(owner)
            changes = changes_from_records(model_id, json.loads(encoded))
            applied, num_versions, num_events = map(int, counts)
            aliases = {change.alias: change for change in changes}
            return ModelState(applied, num_versions, num_events, aliases)

    def _check_owner(self, owner: bytes) -> None:
        if owner.decode("utf-8", "replace") != self._registry_id:
            raise _foreign_index_error()

    def versions(self, model_id: str, numbers: Sequence[int]) -> list[VersionRecord]:
        """Return the records in the order of `numbers`. Raises IndexDamaged if one is missing."""
        if not numbers:
            return []
        fields = [f"version:{number}" for number in numbers]
        with _parsed():
            owner, *texts = self._ask(lambda client: client.hmget(_keys(model_id)[0], ["registry", *fields]))
            if owner is not None:
                self._check_owner(owner)
            return [version_from_record(json.loads(text)) for text in texts]

    def version_of_request(self, model_id: str, request_id: str) -> int | None:
        with _parsed():
            number = self._ask(lambda client: client.hget(_keys(model_id)[0], f"request:{request_id}"))
            return None if number is None else int(number)

    def events(self, model_id: str, after: int) -> list[Event]:
        """Return the next page of events. Raises IndexDamaged if the stream does not match the index."""
        page = (*_keys(model_id), f"{after + 1}-0", EVENT_PAGE)
        with _parsed():
            expected, actual, rows = self._ask(lambda client: client.eval(_EVENTS, 2, *page))
            if expected != actual:
                raise IndexDamaged(f"{actual} events instead of {expected}")
            return [(int(number.split(b"-")[0]), _event(model_id, json.loads(values[1]))) for number, values in rows]

    def wait(self, model_id: str, after: int, timeout_s: float) -> None:
        """Wait until there is an event after `after`, for at most `timeout_s` and at most REDIS_WAIT_S."""
        block_ms = max(1, round(min(timeout_s, REDIS_WAIT_S) * 1000))
        self._ask(lambda client: client.xread({_keys(model_id)[1]: f"{after}-0"}, count=1, block=block_ms))

    def advance(self, model_id: str, step: Advance, *, replace_at: int | None = None) -> int:
        """See `Index.advance`. Events are numbered from 1. Raises PreconditionFailed (INDEX_OF_ANOTHER_REGISTRY)."""
        state = step.state
        fields = {
            "versions": str(state.num_versions),
            "events": str(state.num_events),
            "aliases": json.dumps(list(map(change_to_record, state.aliases.values()))),
        }
        for version in step.versions:
            fields[f"version:{version.version}"] = json.dumps(asdict(version))
            fields[f"request:{version.request_id}"] = str(version.version)
        events = [json.dumps(_encoded(what)) for _, what in step.events]
        pairs = [text for pair in fields.items() for text in pair]
        before, replaces = (step.before, "0") if replace_at is None else (replace_at, "1")
        first_event = state.num_events - len(events) + 1
        arguments = [self._registry_id, before, replaces, state.applied, len(fields), *pairs, first_event, *events]
        now_at = int(self._ask(lambda client: client.eval(_ADVANCE, 2, *_keys(model_id), *arguments)))
        if now_at < 0:
            raise _foreign_index_error()
        return now_at

    def close(self) -> None:
        self._client.close()


def _encoded(what: int | AliasChange | None) -> dict[str, Any]:
    assert what is not None
    return {"version": what} if isinstance(what, int) else {"change": change_to_record(what)}


def _event(model_id: str, event: Mapping[str, Any]) -> int | AliasChange | None:
    if "change" in event:
        return change_from_record(model_id, event["change"])
    if "version" in event:
        return int(event["version"])
    if not event:
        raise IndexDamaged("an event without data")
    _log_unknown(*sorted(event))
    return None


@lru_cache(maxsize=64)
def _log_unknown(*names: str) -> None:
    """Log once per process and set of names."""
    log.warning("events of a newer neap are passed over", fields=list(names))


def _keys(model_id: str) -> tuple[str, str]:
    return f"neap:{{{model_id}}}:index", f"neap:{{{model_id}}}:events"


def _foreign_index_error() -> PreconditionFailed:
    return PreconditionFailed(
        "the Redis database contains the index of another registry; use another database, or delete its keys neap:*",
        reason="INDEX_OF_ANOTHER_REGISTRY",
    )


@contextmanager
def _errors() -> Iterator[None]:
    # Texts of the server and of the library stay in the chained exception.
    try:
        yield
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        raise _unavailable("refuses the user or its password", "REDIS_REFUSED") from error
    except redis.exceptions.OutOfMemoryError as error:
        raise Exhausted("the registry's Redis has no memory left", reason="REDIS_FULL") from error
    except redis.ResponseError as error:
        if "WRONGTYPE" in str(error):
            raise IndexDamaged("a key of another type") from error
        # Within a script Redis 6.2 wraps the code in a longer text.
        if "OOM command not allowed" in str(error) or "MISCONF" in str(error):
            raise Exhausted("the registry's Redis cannot store anything now", reason="REDIS_FULL") from error
        raise _unavailable("refused a command", "REDIS_ERROR") from error
    except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
        raise _unavailable("does not answer", "REDIS_UNAVAILABLE") from error


@contextmanager
def _parsed() -> Iterator[None]:
    """Convert errors of parsing an answer (missing fields, wrong types, invalid JSON) to IndexDamaged."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise IndexDamaged(f"{type(error).__name__}: {error}") from error


def _unavailable(what: str, reason: str) -> NeapError:
    return Unavailable(f"the registry's Redis {what}", reason=reason)
