"""What each operation of a registry in a bucket with Redis does while its servers are killed or hang: `python -m bench.faults_registry`.

Starts a Valkey and a SeaweedFS of its own on loopback (the `dev` extra brings both), and prints a table: operation, fault, how it
ended, after how many seconds, and whether the same operation succeeds once the server is back. Takes some twelve minutes. Any outcome
that is neither success nor one of the registry's own errors, or that takes longer than its bound, makes the exit status 1.
"""

import argparse
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import structlog

from shared.errors import NeapError
from shared.registry.factory import open_registry
from shared.registry.registry import Registry
from tests.registry_servers import shared_url
from tests.servers import S3_ENVIRONMENT, RedisServer, S3Server, Server, redis_programs

MODEL = "tiny"
BLOB = b"weights " * 200_000
# Steps of a publication at which a server may go, see Registry.
STEPS = (
    "write:blobs",
    "written:blobs",
    "verified:blobs",
    "write:manifests",
    "written:manifests",
    "verified:manifests",
    "claimed",
    "journal:begin",
    "journal:written",
    "index:advanced",
)


class Once:
    """A step hook that does something the first time a step comes."""

    def __init__(self, wanted: str, then: Callable[[], None]) -> None:
        self._wanted, self._then = wanted, then

    def __call__(self, step: str) -> None:
        if step == self._wanted:
            self._wanted = ""
            self._then()


class Trials:
    """A registry over two servers, made anew for each trial."""

    def __init__(self, redis: RedisServer, s3: S3Server, bound_s: float) -> None:
        self.redis, self.s3 = redis, s3
        self.bound_s = bound_s
        self.num_bad = 0

    @contextmanager
    def registry(
        self, step: Callable[[str], None] = lambda name: None, freshness_s: float = 30.0
    ) -> Iterator[tuple[Registry, str]]:
        with self.redis.client() as client:
            client.flushall()
        url = shared_url(self.redis, self.s3)
        with closing(open_registry(url)) as first:
            publish(first, "before")
            publish(first, "before-2")
        with closing(open_registry(url, step=step, freshness_s=freshness_s)) as opened:
            opened.aliases(MODEL)
            yield opened, url

    def row(
        self, operation: str, fault: str, call: Callable[[], object], mend: Callable[[], None]
    ) -> None:
        """Prints what `call` does, and does again once `mend` has been called."""
        outcome, seconds = self.outcome(call)
        mend()
        after, seconds_after = self.outcome(call)
        is_bad = "!" in outcome or seconds > self.bound_s or after != "ok"
        self.num_bad += is_bad
        print(
            f"| {operation} | {fault} | {outcome} | {seconds:.1f} | {after}, {seconds_after:.1f} |"
            f"{' <-- BAD' if is_bad else ''}",
            flush=True,
        )

    def outcome(self, call: Callable[[], object]) -> tuple[str, float]:
        begin_s = time.monotonic()
        try:
            call()
            said = "ok"
        except NeapError as error:
            said = f"{type(error).__name__} {error.reason}"
        except Exception as error:
            said = f"! {error!r}"
        return said, time.monotonic() - begin_s


def publish(registry: Registry, request_id: str) -> int:
    blobs = {"x": BLOB, "own": request_id.encode()}
    return registry.publish(MODEL, {"by": request_id}, blobs, request_id=request_id).version


def operations(registry: Registry, url: str) -> dict[str, Callable[[], object]]:
    version = registry.get(MODEL, 1)
    request_id = uuid.uuid4().hex

    def reopen() -> None:
        open_registry(url).close()

    return {
        "open": reopen,
        "list versions": lambda: registry.list_versions(MODEL),
        "resolve an alias": lambda: registry.resolve(MODEL, "latest"),
        "history": lambda: registry.alias_history(MODEL, "latest"),
        "watch, 1 s": lambda: list(registry.events(MODEL, after_event=10**6, timeout_s=1.0)),
        "read a blob": lambda: registry.read_blob(version, "x"),
        "move an alias": lambda: registry.set_alias(MODEL, "stable", 1),
        "publish": lambda: publish(registry, request_id),
        "rebuild": lambda: registry.rebuild(MODEL),
    }


def back(server: Server, how: str) -> None:
    if how == "hangs":
        server.resume()
    else:
        server.start()


def whole_operations(trials: Trials) -> None:
    """Each operation while a server is away from before it begins. `fresh`: nothing of the model was asked for a while."""
    for server, name in ((trials.redis, "Redis"), (trials.s3, "S3")):
        for how in ("is dead", "hangs"):
            for number in range(9):
                with trials.registry(freshness_s=0.0 if number % 2 else 30.0) as (registry, url):
                    operation, call = list(operations(registry, url).items())[number]
                    server.kill() if how == "is dead" else server.hold()
                    trials.row(operation, f"{name} {how}", call, partial(back, server, how))


def steps_of_a_publication(trials: Trials) -> None:
    """A server goes at a step. Afterwards there is nothing of the publication, or all of it; a repeated one succeeds."""
    for server, name in ((trials.redis, "Redis"), (trials.s3, "S3")):
        for how in ("is killed", "hangs"):
            for wanted in STEPS:
                go = Once(wanted, server.kill if how == "is killed" else server.hold)
                with trials.registry(step=go) as (registry, url):

                    def check_and_come_back(
                        server: Server = server, how: str = how, url: str = url
                    ) -> None:
                        back(server, how)
                        with closing(open_registry(url)) as reader:
                            versions = reader.list_versions(MODEL)
                            assert not any(version.damage for version in versions)
                            newest = versions[0]
                            assert reader.aliases(MODEL) == {"latest": newest.version}
                            for blob in newest.manifest["blobs"]:
                                reader.read_blob(newest, blob)
                            assert newest.version in (2, 3)

                    trials.row(
                        "publish",
                        f"{name} {how} at {wanted}",
                        partial(publish, registry, "one"),
                        check_and_come_back,
                    )
                    assert [v.version for v in registry.list_versions(MODEL)] == [3, 2, 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("operations", "steps"))
    parser.add_argument("--bound-s", type=float, default=75.0, help="longest that is not BAD")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    os.environ.update(S3_ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        redis = RedisServer(Path(folder) / "redis", redis_programs()["valkey-9"])
        s3 = S3Server(Path(folder) / "s3")
        for server in (redis, s3):
            stack.callback(server.kill)
            server.start()
        trials = Trials(redis, s3, options.bound_s)
        print("| operation | fault | outcome | seconds | afterwards |\n|---|---|---|---|---|")
        if options.only != "steps":
            whole_operations(trials)
        if options.only != "operations":
            steps_of_a_publication(trials)
    print(f"{trials.num_bad} bad")
    return 1 if trials.num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
