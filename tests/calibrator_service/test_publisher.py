"""A finished product is published or kept, whatever the registry does, and its job says what the registry has."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb

from calibrator_service import publisher as module
from calibrator_service import service_thread
from calibrator_service.job import Ended, Job, JobState
from calibrator_service.job_process import JobFolder
from calibrator_service.jobs import JobStore
from calibrator_service.metrics import CalibratorMetrics
from calibrator_service.publisher import Publisher
from calibrator_service.recipe import Product, load_product, save_product
from shared.errors import (
    AlreadyExists,
    Corrupt,
    DeadlineExceeded,
    Exhausted,
    InvalidInput,
    NeapError,
    PreconditionFailed,
    Unavailable,
)
from shared.registry.base import PublishedVersion
from shared.registry.factory import open_registry
from tests.registry_servers import shared_url
from tests.servers import RedisServer, S3Server
from tests.waiting import wait_until

PRODUCT = Product({"a": 1}, {"x": b"weights"})
AWAY = Unavailable("Redis does not answer", reason="REDIS_UNAVAILABLE")


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path)


@pytest.fixture
def store(folder: JobFolder) -> Iterator[JobStore]:
    store = JobStore(folder.store)
    yield store
    store.close()


@pytest.fixture
def job(folder: JobFolder, store: JobStore) -> Job:
    return finished(folder, store, PRODUCT)


@pytest.fixture
def start(
    folder: JobFolder, store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Publisher]]:
    """Starts a publisher as a service that starts would."""
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(service_thread, "RETRY_INTERVAL_S", 0.05)
    started: list[Publisher] = []

    def start(registry: str = f"file://{tmp_path}/registry") -> Publisher:
        started.append(Publisher(folder, store, registry, CalibratorMetrics()))
        started[-1].thread.start(lambda: None)
        return started[-1]

    yield start
    for publisher in started:
        publisher.thread.stop()


def finished(folder: JobFolder, store: JobStore, product: Product) -> Job:
    source = pb.SelfGenerated(prompts=["a"])
    spec = pb.CalibrationSpec(model_id="tiny", self_generated=source, aliases=["latest"])
    job = store.create("one", spec, max_queued=9)
    assert store.claim() is not None
    folder.work(job.calibration_id).mkdir(parents=True)
    save_product(folder.work(job.calibration_id), product)
    return store.record_end(job.calibration_id, Ended(JobState.PUBLISHING))


def never_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher tries again only when it is told to."""
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(module, name, 3600.0)


class Registry:
    """Stands for `publish`: raises `errors` in turn, then publishes.
    `loses_answer`: publishes each time all the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: Exception, loses_answer: bool = False) -> None:
        self._real, self._errors, self._loses_answer = module.publish, list(errors), loses_answer
        self.num_calls = 0
        monkeypatch.setattr(module, "publish", self)

    def __call__(self, *given: object) -> PublishedVersion:
        self.num_calls += 1
        if self._errors and not self._loses_answer:
            raise self._errors.pop(0)
        published = self._real(*given)
        if self._errors:
            raise self._errors.pop(0)
        return published


def wait_for(store: JobStore, job: Job, state: JobState, reason: str | None = None) -> Job:
    def is_there() -> bool:
        now = store.get(job.calibration_id)
        return now.state is state and reason in (None, now.failure_reason)

    wait_until(is_there)
    return store.get(job.calibration_id)


def check_published(store: JobStore, job: Job, folder: JobFolder, registry: str, *, num_earlier: int = 0) -> None:
    """Exactly one more version, the job's, with its alias; nothing of it is left on disk."""
    after = wait_for(store, job, JobState.SUCCEEDED)
    with closing(open_registry(registry)) as opened:
        version, *earlier = opened.list_versions("tiny")
        assert len(earlier) == num_earlier
        assert opened.aliases("tiny") == {"latest": version.version}
    assert (after.router_version, after.manifest_digest) == (version.version, version.manifest_digest)
    assert (after.failure_reason, after.phase, after.fraction) == ("", "", 1.0)
    wait_until(lambda: not folder.work(job.calibration_id).exists())


@pytest.mark.parametrize(
    "error",
    [
        AWAY,
        Unavailable("refused", reason="REDIS_ERROR"),
        Unavailable("refused", reason="OBJECT_STORE_REFUSED"),
        Unavailable("locked", reason="DATABASE_BUSY"),
        Exhausted("no memory", reason="REDIS_FULL"),
        Exhausted("no room", reason="DISK_FULL"),
        Corrupt("read back other bytes"),
        DeadlineExceeded("too late"),
    ],
    ids=lambda error: error.reason,
)
def test_what_may_pass_is_repeated_by_itself(start, folder, store, job, monkeypatch, tmp_path, error):
    registry = Registry(monkeypatch, *[error] * 3)
    start()
    check_published(store, job, folder, f"file://{tmp_path}/registry")
    assert registry.num_calls == 4


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidInput("too large", reason="MANIFEST_TOO_LARGE"), "MANIFEST_TOO_LARGE"),
        (PreconditionFailed("a newer neap", reason="SCHEMA_TOO_NEW"), "SCHEMA_TOO_NEW"),
        (AlreadyExists("other contents"), "ALREADY_EXISTS"),
        (RuntimeError("secret detail"), "INTERNAL"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("is_restarted", [False, True], ids=["retried", "restarted"])
def test_what_does_not_pass_waits_with_its_product(
    start, folder, store, job, monkeypatch, tmp_path, error, reason, is_restarted
):
    registry = Registry(monkeypatch, error)
    publisher = start()
    waiting = wait_for(store, job, JobState.WAITING, reason)
    assert "secret" not in waiting.failure_message
    assert load_product(folder.work(job.calibration_id)) == PRODUCT
    assert registry.num_calls == 1
    if is_restarted:
        publisher.thread.stop()
        start()
    else:
        store.retry(job.calibration_id)
        publisher.hurry(job.calibration_id)
    check_published(store, job, folder, f"file://{tmp_path}/registry")


@pytest.mark.parametrize(
    "refusal",
    [
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "maxmemory", "1"),
        ("REPLICAOF", "127.0.0.1", "1"),
    ],
    ids=["NOREPLICAS", "OOM", "READONLY"],
)
def test_a_redis_that_refuses_writes_loses_no_product(
    start, folder, store, job, own_redis: RedisServer, s3: S3Server, refusal
):
    url = shared_url(own_redis, s3)
    with closing(open_registry(url)) as registry:
        registry.publish("tiny", {"a": 0}, {"x": b"earlier"}, request_id="earlier", aliases=())
    with own_redis.client() as client:
        client.execute_command(*refusal)
    start(url)
    wait_until(lambda: store.get(job.calibration_id).failure_reason)
    assert store.get(job.calibration_id).state is JobState.PUBLISHING
    own_redis.kill()
    own_redis.start()
    check_published(store, job, folder, url, num_earlier=1)


def test_a_redis_that_is_dead_is_waited_for(start, folder, store, job, own_redis, s3):
    url = shared_url(own_redis, s3)
    open_registry(url).close()
    own_redis.kill()
    start(url)
    wait_for(store, job, JobState.PUBLISHING, "REDIS_UNAVAILABLE")
    own_redis.start()
    check_published(store, job, folder, url)


def test_a_lost_answer_is_found_out_before_a_job_counts_as_cancelled(start, folder, store, job, monkeypatch, tmp_path):
    never_by_itself(monkeypatch)
    Registry(monkeypatch, AWAY, loses_answer=True)
    publisher = start()
    wait_for(store, job, JobState.PUBLISHING, "REDIS_UNAVAILABLE")
    assert store.cancel(job.calibration_id).cancel_requested
    publisher.hurry(job.calibration_id)
    check_published(store, job, folder, f"file://{tmp_path}/registry")


@pytest.mark.parametrize("error", [AWAY, InvalidInput("too large")], ids=["passes", "waits"])
def test_cancel_removes_a_product_that_the_registry_does_not_have(
    start, folder, store, job, monkeypatch, tmp_path, error
):
    """The registry is away when it is asked whether it has it, too."""
    never_by_itself(monkeypatch)
    Registry(monkeypatch, error)
    publisher = start()
    wait_until(lambda: store.get(job.calibration_id).failure_reason)
    real, away = (module.find_published, [PreconditionFailed("a newer neap", reason="SCHEMA_TOO_NEW")])

    def find_published(*given: object) -> PublishedVersion | None:
        if away:
            raise away[0]
        return real(*given)

    monkeypatch.setattr(module, "find_published", find_published)
    store.cancel(job.calibration_id)
    publisher.hurry(job.calibration_id)
    wait_for(store, job, JobState.PUBLISHING, "SCHEMA_TOO_NEW")
    assert load_product(folder.work(job.calibration_id)) is not None
    away.clear()
    publisher.hurry(job.calibration_id)
    wait_for(store, job, JobState.CANCELLED)
    wait_until(lambda: not folder.work(job.calibration_id).exists())
    with closing(open_registry(f"file://{tmp_path}/registry")) as registry:
        assert registry.list_versions("tiny") == []


def test_a_product_that_was_never_sent_is_cancelled_at_once(start, store, job, tmp_path):
    assert store.cancel(job.calibration_id).state is JobState.CANCELLED
    publisher = start()
    publisher.hurry(job.calibration_id)
    publisher.thread.stop()
    with closing(open_registry(f"file://{tmp_path}/registry")) as registry:
        assert registry.list_versions("tiny") == []


@pytest.mark.parametrize("step", ["begin_publishing", "end_publishing"])
def test_a_full_disk_under_the_job_store_holds_publishing_up(start, folder, store, job, monkeypatch, tmp_path, step):
    full: list[NeapError] = [Exhausted("no space left for jobs.db", reason="DISK_FULL")] * 3

    def unless_full(real: Callable[..., object]) -> Callable[..., object]:
        def change(*given: object, **named: object) -> object:
            if full:
                raise full.pop()
            return real(*given, **named)

        return change

    for name in (step, "record_attempt"):
        monkeypatch.setattr(store, name, unless_full(getattr(store, name)))
    publisher = start()
    check_published(store, job, folder, f"file://{tmp_path}/registry")
    assert not full
    assert not publisher.thread.is_held_up


def test_a_removed_product_ends_its_job_unless_it_was_published(start, folder, store, job, monkeypatch, tmp_path):
    Registry(monkeypatch, AWAY, loses_answer=True)
    never_by_itself(monkeypatch)
    publisher = start()
    wait_for(store, job, JobState.PUBLISHING, "REDIS_UNAVAILABLE")
    product = folder.work(job.calibration_id) / "finished"
    product.rename(tmp_path / "elsewhere")
    publisher.hurry(job.calibration_id)
    check_published(store, job, folder, f"file://{tmp_path}/registry")


def test_a_removed_product_that_the_registry_lacks_is_lost(start, folder, store, job):
    (folder.work(job.calibration_id) / "finished" / "product.json").unlink()
    start()
    after = wait_for(store, job, JobState.FAILED)
    assert after.failure_reason == "PRODUCT_LOST"


def test_a_router_that_fails_its_checks_is_published_without_an_alias(start, folder, store, tmp_path):
    checks = {"confidence": {"passed": False, "detail": "worse than guessing"}}
    job = finished(folder, store, Product({"checks": checks}, PRODUCT.blobs))
    start()
    wait_for(store, job, JobState.SUCCEEDED)
    with closing(open_registry(f"file://{tmp_path}/registry")) as registry:
        assert registry.get("tiny", 1).manifest["checks"] == checks
        assert registry.aliases("tiny") == {}
