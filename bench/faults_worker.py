"""Faults of a worker and of what it depends on, as its clients see them, with real processes.

python -m bench.faults_worker --model DIR [--only NAME ..] [--registry redis://.. --router FOLDER --redis-pid PID]

Prints one line of a table per trial, and exits with 1 if one does not hold. TLS trials need trustme (the dev extra). The trial
"redis" stops the Redis server with that PID (SIGSTOP) and lets it go on; without the three flags it is left out.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc

from bench.faults_tls import tls_trials
from bench.trials import run_trials
from bench.worker import MODEL_ID, worker_process
from neap_engine.cli.processes import ServiceProcess
from shared.errors import NeapError
from shared.ladder.folder import read_router_folder
from shared.registry.factory import open_registry

READY_S = 240.0
GENERATE = "/neap.inference.v1.InferenceService/Generate"


def request(num_tokens: int, **changes: Any) -> pb.GenerateRequest:
    """At full depth unless told otherwise, so that no router is needed."""
    fields: dict[str, Any] = {
        "model_id": MODEL_ID,
        "text": "Once upon a time",
        "depth": pb.DepthPolicy(full=pb.Full()),
        "stopping": pb.Stopping(max_tokens=num_tokens, ignore_eos=True),
        **changes,
    }
    return pb.GenerateRequest(**fields)


class Trials:
    """Each returns what was seen, as text for the table. Raises AssertionError where it does not hold."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self._num_workers = 0

    @contextmanager
    def worker(
        self, *flags: str, ready: bool = True, registry: str = ""
    ) -> Iterator[ServiceProcess]:
        self._num_workers += 1
        log = self.folder / f"worker-{self._num_workers}.log"
        where: Any = registry or self.folder / "registry"
        with worker_process(self.options.model, where, log, flags) as worker:
            if ready:
                worker.wait_serving(READY_S)
            yield worker

    def idle_calls(self) -> str:
        """Ten calls without a request, five of them half-closed."""
        never = threading.Event()

        def messages(closes: bool) -> Iterator[bytes]:
            if not closes:
                never.wait()
            yield from ()

        flags = ("--grace-s", "0", "--drain-timeout-s", "120")
        with self.worker(*flags) as worker, grpc.insecure_channel(worker.address) as channel:
            open_call: Any = channel.stream_stream(GENERATE)
            calls = [open_call(messages(n % 2 == 0)) for n in range(10)]
            time.sleep(2)
            worker.send_signal(signal.SIGTERM)
            begun_s = time.monotonic()
            codes = Counter(_code(call) for call in calls)
            told_s = time.monotonic() - begun_s
            status = worker.wait_ended(60)
            never.set()
        assert status == 0, status
        assert codes == {"INVALID_ARGUMENT": 5, "UNAVAILABLE": 5}, codes
        return f"{_text(codes)} {told_s:.1f} s after SIGTERM; exit status 0 after {time.monotonic() - begun_s:.1f} s"

    def stopped_reader(self) -> str:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        flags = ("--grace-s", "0", "--drain-timeout-s", "120")
        with (
            self.worker(*flags) as worker,
            grpc.insecure_channel(worker.address, options=options) as channel,
        ):
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            calls = [stub.Generate(request(1000, logprobs=20)) for _ in range(4)]
            for call in calls:
                next(call)
            time.sleep(5)
            worker.send_signal(signal.SIGTERM)
            begun_s = time.monotonic()
            status = worker.wait_ended(118)
            del calls
        assert status == 0, "the drain took until its timeout"
        return f"exit status 0, {time.monotonic() - begun_s:.1f} s after SIGTERM (answers of 1000 tokens; drain timeout 120 s)"

    def no_grace(self) -> str:
        flags = ("--grace-s", "0", "--drain-timeout-s", "0")
        with self.worker(*flags) as worker, NeapClient(worker.address, num_attempts=1) as client:
            seen = _under_load(client, lambda: worker.send_signal(signal.SIGTERM))
            status = worker.wait_ended(60)
        assert status == 0, status
        assert set(seen) == {"SHUTTING_DOWN"}, seen
        return f"{_text(seen)}; exit status 0"

    def killed(self) -> str:
        with self.worker() as worker, NeapClient(worker.address, num_attempts=1) as client:
            seen = _under_load(client, lambda: worker.send_signal(signal.SIGKILL))
        assert set(seen) == {"GRPC_UNAVAILABLE"}, seen
        return f"{_text(seen)}, each with its tokens so far"

    def one_port(self) -> str:
        with self.worker() as first:
            with self.worker("--listen", first.address, ready=False) as second:
                status = second.wait_ended(READY_S)
            line = second.log_path.read_text().splitlines()[-1]
        assert status == 2, status
        assert "ADDRESS_UNAVAILABLE" in line, line
        return "the second: exit status 2, ADDRESS_UNAVAILABLE"

    def stopped_while_loading(self) -> str:
        with self.worker(ready=False) as worker:
            while '"listening"' not in worker.log_path.read_text():
                assert worker.wait_ended(0.1) is None
            time.sleep(0.5)
            worker.send_signal(signal.SIGTERM)
            begun_s = time.monotonic()
            status = worker.wait_ended(60)
            log = worker.log_path.read_text()
        assert status == 0, status
        assert "raceback" not in log, log
        return f"exit status 0 after {time.monotonic() - begun_s:.1f} s, no traceback"

    def redis(self) -> str:
        url, pid = self.options.registry, self.options.redis_pid
        with closing(open_registry(url)) as registry:
            registry.publish(
                MODEL_ID, *read_router_folder(self.options.router), request_id="faults"
            )
        with (
            self.worker(registry=url) as worker,
            NeapClient(worker.address, num_attempts=1) as client,
        ):
            exact = request(8, depth=pb.DepthPolicy(exact=pb.Exact()))
            list(client.generate(exact))
            before_s = [_seconds(client, request(8)) for _ in range(20)]
            os.kill(pid, signal.SIGSTOP)
            try:
                strangers: Counter[str] = Counter()
                threads = [
                    threading.Thread(target=_ask_for_alias, args=(client, number, strangers))
                    for number in range(60)
                ]
                for thread in threads:
                    thread.start()
                during_s = [_seconds(client, request(8)) for _ in range(20)]
                known_s = [_seconds(client, exact) for _ in range(5)]
                for thread in threads:
                    thread.join()
            finally:
                os.kill(pid, signal.SIGCONT)
        return (
            f"full depth: median {statistics.median(before_s):.2f} s before and {statistics.median(during_s):.2f} s "
            f"(max {max(during_s):.2f} s) while held, none failed; a known alias: max {max(known_s):.2f} s; "
            f"60 unknown aliases: {_text(strangers)}"
        )

    def all(self) -> dict[str, Callable[[], str]]:
        trials: dict[str, Callable[[], str]] = {
            "idle_calls": self.idle_calls,
            "stopped_reader": self.stopped_reader,
            "no_grace": self.no_grace,
            "killed": self.killed,
            "one_port": self.one_port,
            "stopped_while_loading": self.stopped_while_loading,
            **tls_trials(self.worker, self.folder, request),
        }
        if self.options.registry and self.options.redis_pid and self.options.router:
            trials["redis"] = self.redis
        return trials


def _under_load(client: NeapClient, fault: Callable[[], None]) -> Counter[str]:
    """Of eight answers that are under way when `fault` happens: why they ended. Each has brought tokens by then."""
    streams = [client.generate(request(1500)) for _ in range(8)]
    for stream in streams:
        while not stream.token_ids:
            next(stream)
    fault()
    seen: Counter[str] = Counter()
    for stream in streams:
        try:
            list(stream)
            seen["finished"] += 1
        except NeapError as error:
            seen[error.reason] += 1
        assert stream.token_ids
        assert stream.num_attempts == 1
    return seen


def _ask_for_alias(client: NeapClient, number: int, seen: Counter[str]) -> None:
    message = request(
        8,
        depth=pb.DepthPolicy(exact=pb.Exact()),
        router=pb.RouterSelector(alias=f"unknown-{number}"),
    )
    try:
        list(client.generate(message))
        seen["finished"] += 1
    except NeapError as error:
        seen[error.reason] += 1


def _seconds(client: NeapClient, message: pb.GenerateRequest) -> float:
    begun_s = time.monotonic()
    list(client.generate(message))
    return time.monotonic() - begun_s


def _code(call: Any) -> str:
    try:
        list(call)
    except grpc.RpcError as error:
        ended: Any = error
        return str(ended.code().name)
    return "OK"


def _text(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.faults_worker", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--registry", default="", metavar="URL")
    parser.add_argument("--router", type=Path, metavar="FOLDER")
    parser.add_argument("--redis-pid", type=int, metavar="PID")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(options, Path(folder)).all()
        return run_trials((n, t) for n, t in trials.items() if n in (options.only or trials))


if __name__ == "__main__":
    sys.exit(main())
