"""Canary, promotion and rollback with two workers, a calibrator, a Redis and an S3, each a process of its own, under
load.

Redis dies and comes back empty on the way. No request may fail, and each answers what the full model does.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count

import pytest
from neap_client import NeapClient
from neap_client.router.v1 import router_pb2

from inference_service.resolutions import takes_canary
from neap_engine.cli.processes import ServiceProcess
from shared.errors import NeapError
from shared.ladder.artefact import pack_ladder
from shared.model.load import load_model
from shared.registry.base import Canary
from tests.generation import EXACT, FULL, request_of
from tests.registry_servers import shared_registry, shared_url
from tests.worker import build_ladder, save_model

pytestmark = [pytest.mark.e2e, pytest.mark.full]
NUM_CLIENTS = 4
READY_TIMEOUT_S = 90.0
SHARE_PER_MILLE = 300
# Long enough for a worker to hear of a change, or to find that nobody tells it any more.
STAGE_TIMEOUT_S = 120.0


def ask(client: NeapClient, request_id: str, policy: str = "exact") -> tuple[int, tuple[int, ...]]:
    depth = FULL if policy == "full" else EXACT
    request = request_of(12, text="hello hello hello", depth=depth)
    stream = client.generate(request, request_id=request_id, timeout_s=30)
    started = next(stream).started
    list(stream)
    return started.router_version, tuple(stream.token_ids)


class Load:
    """Clients that ask one worker after the other, each request of the same text, and keep which version answered
    whom. `ask` returns the version and the tokens of an answer."""

    def __init__(
        self, addresses: list[str], ask: Callable[[NeapClient, str], tuple[int, tuple[int, ...]]] = ask
    ) -> None:
        self._addresses, self._ask = addresses, ask
        self._ids = count()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.answers: set[tuple[int, ...]] = set()
        self.failures: list[NeapError] = []
        self.served: list[tuple[str, int, int]] = []  # request id, worker, version
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(NUM_CLIENTS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _client(self, number: int) -> None:
        worker = number % len(self._addresses)
        with NeapClient(self._addresses[worker], num_attempts=1) as client:
            while not self._over.is_set():
                with self._lock:
                    request_id = f"request-{next(self._ids)}"
                try:
                    version, tokens = self._ask(client, request_id)
                except NeapError as error:
                    self.failures.append(error)
                    return
                with self._lock:
                    self.served.append((request_id, worker, version))
                    self.answers.add(tokens)

    def since(self, begin: int) -> list[tuple[str, int, int]]:
        with self._lock:
            return self.served[begin:]

    def wait_for(self, holds: Callable[[list[tuple[str, int, int]]], bool], size: int) -> list[tuple[str, int, int]]:
        """The last `size` requests, once `holds` of them."""
        deadline_s = time.monotonic() + STAGE_TIMEOUT_S
        begin = len(self.served)
        while True:
            latest = self.since(max(begin, len(self.served) - size))
            if len(latest) == size and holds(latest):
                return latest
            assert not self.failures, self.failures
            assert time.monotonic() < deadline_s, Counter(version for *_, version in latest)
            time.sleep(0.05)


def all_served(version: int) -> Callable[[list[tuple[str, int, int]]], bool]:
    """By both workers: a slow one may not have noticed yet."""
    return lambda latest: {found[1:] for found in latest} == {(0, version), (1, version)}


@pytest.fixture
def url(own_redis, s3, tmp_path) -> str:
    """A registry with versions 1 to 3 of a router, of which "stable" names the first."""
    loaded = load_model(save_model(tmp_path / "model"), model_id="tiny")
    url = shared_url(own_redis, s3)
    with shared_registry(url) as registry:
        for number in (1, 2, 3):
            manifest, blobs = pack_ladder(build_ladder(loaded), {"number": number})
            aliases = ["stable"] if number == 1 else []
            registry.publish("tiny", manifest, blobs, request_id=str(number), aliases=aliases)
    return url


@pytest.fixture
def services(url, tmp_path, monkeypatch) -> Iterator[tuple[list[str], NeapClient]]:
    """(addresses of the workers, a client of the calibrator)."""
    monkeypatch.setenv("NEAP_REGISTRY", url)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = ["--model", f"tiny={tmp_path / 'model'}"]
    with ExitStack() as stack:

        def start(name: str, module: str, *flags: str) -> ServiceProcess:
            arguments = [*model, "--data-dir", str(tmp_path / name), *flags]
            process = ServiceProcess(name, module, arguments, tmp_path / f"{name}.log")
            return stack.enter_context(process)

        workers = [start(f"worker-{number}", "inference_service", "--default-alias", "stable") for number in (1, 2)]
        calibrator = start("calibrator", "calibrator_service")
        addresses = [worker.wait_serving(READY_TIMEOUT_S) for worker in workers]
        client = NeapClient(calibrator.wait_serving(READY_TIMEOUT_S))
        yield addresses, stack.enter_context(client)


def test_a_rollout_under_load_fails_nobody(services, own_redis):
    addresses, calibrator = services
    with NeapClient(addresses[0]) as client:
        _, expected = ask(client, "alone", policy="full")
    with Load(addresses) as load:
        load.wait_for(all_served(1), 20)

        canary = router_pb2.Canary(version=2, share_per_mille=SHARE_PER_MILLE)
        calibrator.set_canary(router_pb2.SetCanaryRequest(model_id="tiny", alias="stable", canary=canary))
        chosen = Canary(2, SHARE_PER_MILLE)

        def as_chosen(latest: list[tuple[str, int, int]]) -> bool:
            return all(
                (version == 2) == takes_canary(request_id, "tiny", "stable", chosen)
                for request_id, _, version in latest
            )

        latest = load.wait_for(as_chosen, 100)
        versions = Counter((worker, version) for _, worker, version in latest)
        assert set(versions) == {(0, 1), (0, 2), (1, 1), (1, 2)}
        # One request id, two workers, one version.
        repeated = next(request_id for request_id, _, version in latest if version == 2)
        for address in addresses:
            with NeapClient(address) as client:
                assert ask(client, repeated)[0] == 2

        promotion = router_pb2.PromoteCanaryRequest(model_id="tiny", alias="stable", actor="ann")
        calibrator.promote_canary(promotion)
        load.wait_for(all_served(2), 20)

        calibrator.rollback_alias("tiny", "stable", actor="ann", reason="slower")
        load.wait_for(all_served(1), 20)

        own_redis.kill()
        load.wait_for(all_served(1), 300)
        own_redis.start()  # and it is empty
        change = calibrator.set_alias("tiny", "stable", 3, actor="bob", reason="fixed")
        assert change.from_version == 1
        load.wait_for(all_served(3), 20)

        history = calibrator.alias_history("tiny", "stable")
        assert [change.to_version for change in history[:3]] == [3, 1, 2]
        assert [(change.actor, change.reason) for change in history[:2]] == [("bob", "fixed"), ("ann", "slower")]
    assert load.failures == []
    assert load.answers == {expected}
