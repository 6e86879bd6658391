"""A finished calibration waits for its registry."""

import threading
from contextlib import closing
from pathlib import Path

import pytest

from calibrator_service import publishing
from calibrator_service.calibration.spec import CalibrationSpec, SelfGenerated
from calibrator_service.jobs import JobStore
from calibrator_service.process_config import ModelOptions, ProcessConfig
from calibrator_service.recipe import Product
from shared.errors import Cancelled, Unavailable
from shared.registry.factory import open_registry
from tests.registry_servers import shared_url
from tests.servers import RedisServer, S3Server

SPEC = CalibrationSpec("tiny", SelfGenerated(("a", "b"), 5), time_budget_s=1.5, rung_depths=(1, 2))
PRODUCT = Product({"a": 1}, {"x": b"weights"})


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "jobs.db")


@pytest.fixture
def config(store: JobStore, tmp_path: Path, own_redis: RedisServer, s3: S3Server) -> ProcessConfig:
    job = store.create("one", SPEC, ["latest"], max_queued=9, answer=lambda job: job)
    assert store.claim() is not None
    url = shared_url(own_redis, s3)
    return ProcessConfig(str(tmp_path), job.calibration_id, 1, 1, "", url, (), (), ModelOptions())


def test_publishing_waits_until_redis_is_available(store, config, own_redis):
    open_registry(config.registry).close()
    own_redis.kill()
    timer = threading.Timer(1.0, own_redis.start)
    timer.start()
    assert publishing.publish(config, store, PRODUCT).version == 1
    timer.join()
    with closing(open_registry(config.registry)) as registry:
        assert registry.aliases("tiny") == {"latest": 1}


def test_waiting_ends_when_the_job_is_cancelled(store, config, own_redis):
    own_redis.kill()
    store.cancel(config.calibration_id)
    with pytest.raises(Cancelled):
        publishing.publish(config, store, PRODUCT)


def test_waiting_ends_after_the_time_limit(store, config, own_redis, monkeypatch):
    own_redis.kill()
    monkeypatch.setattr(publishing, "PATIENCE_S", 1.0)
    with pytest.raises(Unavailable) as raised:
        publishing.publish(config, store, PRODUCT)
    assert raised.value.reason == "REDIS_UNAVAILABLE"


def test_a_router_that_fails_its_checks_is_published_without_an_alias(store, config):
    checks = {"routers": {"passed": False, "detail": "worse than guessing"}}
    assert (
        publishing.publish(config, store, Product({"checks": checks}, PRODUCT.blobs)).version == 1
    )
    with closing(open_registry(config.registry)) as registry:
        assert registry.get("tiny", 1).manifest["checks"] == checks
        assert registry.aliases("tiny") == {}
