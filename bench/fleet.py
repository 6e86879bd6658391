"""What many workers ask of a registry and its traffic objects: `python -m bench.fleet --registry URL [--workers 1000]`.

Runs one worker's watch and resolutions, a write of the tap, and the calibration service's part, with the code that
serves, on a registry that counts what it is asked. Multiplies by workers, requests, pools and intervals. Then times
listing and removal over `--objects` traffic objects. It publishes to that registry, which should be a new one.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.options import make_parser, parsed
from bench.table import head, row
from bench.worker import MODEL_ID
from calibrator_service.jobs import JobStore
from calibrator_service.learning.schedule import LOOK_INTERVAL_S, LearningSchedule
from calibrator_service.metrics import CalibratorMetrics
from inference_service.router_watch import RouterWatch
from inference_service.tap import AT_MOST_S
from shared.calibrator_settings import CalibratorSettings
from shared.errors import NotFound
from shared.registry.address import RegistryAddress
from shared.registry.factory import BUCKET_FRESHNESS_S, BUCKET_POLL_S, FOLDER_POLL_S, folder_of, open_store
from shared.registry.index import Index, MemoryIndex
from shared.registry.redis_index import RedisIndex
from shared.registry.registry import Registry
from shared.registry.store import StoredObject
from shared.service_settings import ModelSource
from shared.timeouts import LEASE_LASTS_S
from shared.traffic.answer import HOUR_S, ServedAnswer
from shared.traffic.traffic import EXPIRE_EVERY_S, FOLDER, RETENTION_S, Traffic

POOL = "legal"
# Objects of a page of S3's lists.
PAGE = 1000
_KINDS = {
    "create": "put",
    "replace": "put",
    "remove": "remove",
    "get": "get",
    "exists": "get",
    "last_modified_s": "get",
}
COLUMNS = ("list", "get", "put", "remove", "redis", "bytes")
Counts = Counter[str]


class CountedStore:
    """A `Store` that counts the requests of a bucket: pages of lists, reads (GET and HEAD), writes, removals, bytes."""

    def __init__(self, store: Any, counts: Counts) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in _KINDS:
            return method

        def counted(path: str, *given: Any) -> Any:
            self._counts[_KINDS[name]] += 1
            result = method(path, *given)
            self._counts["bytes"] += sum(len(part) for part in (*given, result) if isinstance(part, bytes))
            return result

        return counted

    def names(self, folder: str, *, after: str = "") -> list[str]:
        return self._listed(self._store.names(folder, after=after))

    def folders(self, folder: str) -> list[str]:
        return self._listed(self._store.folders(folder))

    def objects(self, folder: str) -> Iterator[StoredObject]:
        yield from self._listed(list(self._store.objects(folder)))

    def _listed(self, found: list[Any]) -> list[Any]:
        self._counts["list"] += max(1, -(-len(found) // PAGE))
        return found


class CountedRedis(RedisIndex):
    def __init__(self, address: RegistryAddress, counts: Counts) -> None:
        super().__init__(address)
        self._counts = counts

    def _ask(self, command: Callable[[Any], Any]) -> Any:
        self._counts["redis"] += 1
        return super()._ask(command)

    @property
    def num_connections(self) -> int:
        return int(self._client.info("clients")["connected_clients"])


def opened(url: str, counts: Counts) -> tuple[Any, Index]:
    """As `open_registry` does it."""
    store = CountedStore(open_store(url), counts)
    if folder_of(url) is not None:
        return store, MemoryIndex(freshness_s=0.0, poll_s=FOLDER_POLL_S)
    address = RegistryAddress.parse(url)
    if address.redis_url:
        return store, CountedRedis(address, counts)
    return store, MemoryIndex(freshness_s=BUCKET_FRESHNESS_S, poll_s=BUCKET_POLL_S)


def watched(registry: Registry, counts: Counts, requests_s: int, seconds: float, threads: int) -> dict[str, float]:
    """What a worker asks in a second: it watches, and resolves aliases for so many requests of a pool without one."""

    def request(number: int) -> None:
        time.sleep(max(0.0, began_s + number / requests_s - time.monotonic()))
        for alias in (f"latest@{POOL}", "latest"):
            with suppress(NotFound):
                registry.target(MODEL_ID, alias)

    watch = RouterWatch(registry, MODEL_ID, lambda: registry.target(MODEL_ID, "latest"))
    time.sleep(2.0)
    counts.clear()
    began_s = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(request, range(int(requests_s * seconds))))
    time.sleep(max(0.0, began_s + seconds - time.monotonic()))
    found = {kind: number / seconds for kind, number in counts.items()}
    watch.stop()
    time.sleep(2.0)
    return found


def counted(counts: Counts, work: Callable[[], object]) -> tuple[Counts, float]:
    counts.clear()
    began_s = time.monotonic()
    work()
    return Counter(counts), time.monotonic() - began_s


def answers(number: int) -> list[ServedAnswer]:
    """What a worker keeps in two minutes, of 300 tokens each."""
    hour = int(time.time()) // HOUR_S
    return [
        ServedAnswer(MODEL_ID, POOL, 1, "cpu", hour, [i * 7919 % 49_152 for i in range(300)], [n])
        for n in range(number)
    ]


def fill(url: str, number: int) -> None:
    """Writes objects whose names are a traffic object's."""
    store, folder = open_store(url), folder_of(url)
    hour, place = int(time.time()) // HOUR_S, f"{FOLDER}/{MODEL_ID}/{POOL}"

    def write(index: int) -> None:
        name = f"{hour:08d}-{1:08d}-{sha256(str(index).encode()).hexdigest()}"
        if folder is None:
            store.create(f"{place}/{name}", b"x")
        else:  # without the syncs, which are not what is measured
            (folder / place / name).write_bytes(b"x")

    if folder is not None:
        (folder / place).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(number)))


def _text(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def main() -> None:
    parser = make_parser(__doc__, model=False)
    parser.add_argument("--registry", required=True, metavar="URL")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10, help="a second, of each worker")
    parser.add_argument("--pools", type=int, default=10)
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="for which a worker is watched")
    options = parsed(parser)
    counts: Counts = Counter()
    store, index = opened(options.registry, counts)
    registry, traffic = Registry(store, index), Traffic(store)
    registry.publish(MODEL_ID, {"n": 1}, {"x": b"x"}, request_id="1")
    workers, pools = options.workers, options.pools

    head("what", "times a second", *(f"{kind}/s" for kind in COLUMNS))

    def say(what: str, rate_s: float, each: Mapping[str, float]) -> None:
        row(what, _text(rate_s), *(_text(rate_s * each.get(kind, 0)) for kind in COLUMNS))

    idle = watched(registry, counts, 1, options.seconds, 1)
    busy = watched(registry, counts, options.requests, options.seconds, 4)
    say("workers with a request a second", workers, idle)
    say(f"workers with {options.requests}", workers, busy)
    if isinstance(index, CountedRedis):
        print(f"connections to Redis of a worker: {index.num_connections}", flush=True)
    writing, _ = counted(counts, lambda: traffic.write(answers(60)))
    say("writes of the tap, 60 answers of 300 tokens", workers / AT_MOST_S, writing)
    traffic.expire()
    asking, _ = counted(counts, traffic.expire_if_due)
    say("workers ask whether old answers were removed", workers / EXPIRE_EVERY_S, asking)
    lease = registry.lease("learning")
    lease.hold()
    holding, _ = counted(counts, lease.hold)
    say("a lease is held", 3 / LEASE_LASTS_S, holding)
    with TemporaryDirectory() as folder:
        model = ModelSource.parse(f"{MODEL_ID}=/a")
        settings = CalibratorSettings(models=(model,), data_dir=Path(folder), registry="r", learn_tokens=10**12)
        jobs = JobStore(Path(folder) / "jobs.db")
        schedule = LearningSchedule(registry, traffic, jobs, settings, lambda: None, metrics=CalibratorMetrics())
        looking, _ = counted(counts, lambda: schedule.consider(MODEL_ID, POOL))
        say("looks at a pool of one object", pools / LOOK_INTERVAL_S, looking)

        index.freshness_s = 0.0

        def resolve() -> None:
            for _ in range(200):
                registry.target(MODEL_ID, "latest")

        print(f"\na resolution, with a look into the journal: {5 * counted(counts, resolve)[1]:.2f} ms", flush=True)
        fill(options.registry, options.objects)
        print(f"with {options.objects:,} objects of traffic: {5 * counted(counts, resolve)[1]:.2f} ms", flush=True)
        kept = workers / AT_MOST_S * RETENTION_S
        head("over objects", "list", "seconds", f"seconds at {kept / 1e6:.2g} million", "removed")
        for what, work in (
            ("list a pool", lambda: traffic.batches(MODEL_ID, POOL)),
            ("a look at a pool whose job may begin", lambda: schedule.consider(MODEL_ID, POOL)),
            ("look for old answers", traffic.expire),
            ("remove all", lambda: traffic.expire(-1.0)),
        ):
            found, took_s = counted(counts, work)
            row(what, found["list"], f"{took_s:.2f}", f"{took_s * kept / options.objects:,.0f}", found["remove"])
        jobs.close()
    registry.close()


if __name__ == "__main__":
    main()
