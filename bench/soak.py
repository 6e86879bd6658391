"""Soak test: two worker processes under all kinds of client behaviour. Any violation makes the exit status 1.

    python -m bench.soak --model DIR --router FOLDER [--minutes 20]

At random times, clients read whole answers, cancel, exceed deadlines, send invalid requests and stop reading. In the middle the first
worker gets SIGTERM and the second takes over. Checked: the clients' counts of requests agree with the workers' logs; every answer is
the one of the request alone on an idle worker; memory has not grown; both workers exited by themselves after SIGTERM.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import grpc
from neap_client import NeapClient

from bench.options import make_parser, parsed
from bench.prompts import read_prompts
from bench.soak_requests import (
    EXACT,
    FULL,
    Outcome,
    ReferenceAnswers,
    SoakRequests,
    Violation,
    answer_request,
)
from bench.worker import publish_router, resident_bytes, worker_process
from neap_engine.cli.processes import ServiceProcess

READY_TIMEOUT_S = 180.0
# Upper limit for the last requests to end, and for a worker to drain.
END_TIMEOUT_S = 120.0
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
SAMPLE_S = 0.25
PREFIX_CACHE_MB = 8


class Soak:
    """Counts the outcomes of all requests. `violations` must be empty at the end."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.num_begun = 0
        self.num_calls = 0
        self.violations: list[str] = []
        self.resident: dict[str, list[int]] = {}
        self.over = threading.Event()
        self._lock = threading.Lock()

    def client(self, requests: SoakRequests, number: int) -> None:
        """Runs one client: makes random requests until `over` is set."""
        generator = random.Random(self.options.seed * 1000 + number)
        kinds = requests.kinds()
        shares = [share for share, _ in kinds.values()]
        while not self.over.wait(generator.expovariate(1 / self.options.pause_s)):
            (kind,) = generator.choices(list(kinds), shares)
            with self._lock:
                self.num_begun += 1
            try:
                outcome = kinds[kind][1](generator)
            except Violation as violation:
                self.violate(f"{kind}: {violation}")
                outcome = Outcome("violation")
            except Exception as error:  # otherwise the thread would end without a trace
                self.violate(f"{kind}: {error!r}")
                outcome = Outcome("violation")
            with self._lock:
                self.outcomes[kind, outcome.name] += 1
                self.num_calls += outcome.num_calls

    def watch_memory(self, name: str, worker: ServiceProcess, over: threading.Event) -> None:
        """Samples a worker's resident memory until `over` is set."""
        samples = self.resident.setdefault(name, [])
        while not over.wait(SAMPLE_S):
            samples.append(resident_bytes(worker.pid))

    def violate(self, text: str) -> None:
        with self._lock:
            self.violations.append(text)

    def expect(self, holds: bool, text: str) -> None:
        """Records a violation unless `holds`."""
        if not holds:
            self.violate(text)

    def count(self, *names: str) -> int:
        """Number of requests with one of these outcomes."""
        return sum(count for (_, name), count in self.outcomes.items() if name in names)

    def check_memory(self) -> None:
        """Checks each worker's growth from after the first third, when all kinds of requests have occurred, to the last tenth."""
        for name, samples in self.resident.items():
            if len(samples) < 30:
                self.violate(f"{name} did not serve long enough to judge its memory")
                continue
            begin = statistics.median(samples[len(samples) // 3 :][: len(samples) // 10])
            end = statistics.median(samples[-len(samples) // 10 :])
            growth_mb = (end - begin) / (1 << 20)
            print(f"{name}: {end / (1 << 20):.0f} MB resident, grown by {growth_mb:.1f} MB")
            self.expect(
                growth_mb <= self.options.max_growth_mb, f"{name} has grown by {growth_mb:.1f} MB"
            )

    def check_counts(self, logs: list[Path], num_reference_calls: int) -> None:
        """Compares the clients' counts with the workers' logs.

        A call that the client cancelled, or whose deadline passed, may be logged as answered.
        """
        codes = sum((_logged_codes(log) for log in logs), Counter[str]())
        print("workers' calls: " + ", ".join(f"{n} {code}" for code, n in sorted(codes.items())))
        self.expect(
            self.outcomes.total() == self.num_begun,
            f"{self.num_begun} requests were started and {self.outcomes.total()} have ended",
        )
        finished = self.count("finished") + num_reference_calls
        maybe = self.count("cancelled", "too late", "caught up")
        self.expect(
            finished <= codes["OK"] <= finished + maybe,
            f"{finished} requests finished and {maybe} more may have; the workers logged {codes['OK']}",
        )
        refused = codes["INVALID_ARGUMENT"] + codes["NOT_FOUND"]
        self.expect(
            refused == self.count("rejected"),
            f"{self.count('rejected')} bad requests were rejected; the workers logged {refused}",
        )
        # Requests whose deadline passed before they arrived, or that reached no worker, are not logged.
        unseen = self.count("too late", "refused")
        most = self.num_calls + num_reference_calls
        self.expect(
            self.num_begun - unseen + num_reference_calls <= codes.total() <= most,
            f"{self.num_begun} requests in {self.num_calls} calls; the workers logged {codes.total()}",
        )
        unexpected = {code: n for code, n in codes.items() if code in ("INTERNAL", "UNKNOWN")}
        self.expect(not unexpected, f"the workers logged {unexpected}")
        for log in logs:  # printed, because the folder is deleted after the run
            for line in log.read_text().splitlines():
                if '"level": "error"' in line:
                    print(line)


def _logged_codes(log: Path) -> "Counter[str]":
    """Number of calls to Generate by status code."""
    codes: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        record = json.loads(line) if line.startswith("{") else {}
        if record.get("event") == "call ended" and record["method"].endswith("/Generate"):
            codes[record["code"]] += 1
    return codes


def reference_answers(client: NeapClient, prompts: list[str]) -> ReferenceAnswers:
    """The reference answers: each prompt, greedy and sampled, at full depth with no other request running."""
    references: dict[tuple[str, bool], list[int]] = {}
    for prompt in prompts:
        for sampled in (False, True):
            stream = client.generate(answer_request(prompt, sampled, FULL))
            for _ in stream:
                pass
            references[prompt, sampled] = stream.token_ids
    list(client.generate(answer_request(prompts[0], False, EXACT)))  # loads the router
    return references


def end(soak: Soak, name: str, worker: ServiceProcess) -> None:
    """Sends SIGTERM. The worker must exit by itself with status 0 and leave no process of its group behind."""
    group = worker.pid
    begin_s = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    code = worker.wait_ended(END_TIMEOUT_S)
    print(f"{name}: ended with {code} {time.monotonic() - begin_s:.1f} s after SIGTERM", flush=True)
    soak.expect(code == 0, f"{name} ended with {code}")
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return
    soak.violate(f"{name} left processes behind")


def run(soak: Soak, folder: Path) -> None:
    """Runs the soak: starts workers and clients, ends the first worker in the middle, and checks everything at the end."""
    options = soak.options
    registry = folder / "registry"
    publish_router(options.router, registry)
    flags = ["--max-queue", str(options.max_queue), "--grace-s", "1"]
    flags += ["--stall-timeout-s", str(options.stall_s)]
    # So small that it is full long before the first memory sample that counts.
    flags += ["--prefix-cache-mb", str(PREFIX_CACHE_MB)]
    logs = [folder / "first.log", folder / "second.log"]
    with (
        worker_process(options.model, registry, logs[0], flags) as first,
        worker_process(options.model, registry, logs[1], flags) as second,
    ):
        targets = ",".join(worker.wait_serving(READY_TIMEOUT_S) for worker in (first, second))
        half_s = options.minutes * 60 / 2
        with (
            # Many attempts: a request may be refused many times because the queues are full, and must be answered in the end.
            NeapClient(f"ipv4:{targets}", num_attempts=1000) as client,
            grpc.insecure_channel(f"ipv4:{targets}", options=SMALL_WINDOW) as slow,
        ):
            prompts = [prompt.turns[0][:200] for prompt in read_prompts(per_task=2)]
            references = reference_answers(client, prompts)
            requests = SoakRequests(client, slow, references, options.hold_s, soak.over)
            threads = [
                threading.Thread(target=soak.client, args=(requests, number), daemon=True)
                for number in range(options.clients)
            ]
            for thread in threads:
                thread.start()
            for name, worker in (("first worker", first), ("second worker", second)):
                served = threading.Event()
                watch = threading.Thread(target=soak.watch_memory, args=(name, worker, served))
                watch.start()
                time.sleep(half_s)
                served.set()
                watch.join()
                if worker is first:
                    end(soak, name, worker)
            soak.over.set()
            give_up_s = time.monotonic() + END_TIMEOUT_S
            for thread in threads:
                thread.join(max(give_up_s - time.monotonic(), 0))
            stuck = sum(thread.is_alive() for thread in threads)
            soak.expect(not stuck, f"{stuck} clients did not end")
        end(soak, "second worker", second)
    soak.check_counts(logs, 2 * len(prompts) + 1)
    soak.check_memory()


def main() -> None:
    parser = make_parser(__doc__, router=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--pause-s", type=float, default=1.0, help="a client's mean pause")
    parser.add_argument("--max-queue", type=int, default=8)
    parser.add_argument("--stall-s", type=float, default=2.0, help="the workers' stall timeout")
    parser.add_argument("--hold-s", type=float, default=20.0, help="a slow reader's pause")
    parser.add_argument("--max-growth-mb", type=float, default=48.0)
    parser.add_argument("--seed", type=int, default=0)
    soak = Soak(parsed(parser))
    with tempfile.TemporaryDirectory() as folder:
        run(soak, Path(folder))
    for (kind, name), count in sorted(soak.outcomes.items()):
        print(f"{kind:<12} {name:<10} {count}")
    for violation in soak.violations[:20]:
        print(f"VIOLATION {violation}")
    print(f"{soak.num_begun} requests, {soak.num_calls} calls, {len(soak.violations)} violations")
    sys.exit(1 if soak.violations else 0)


if __name__ == "__main__":
    main()
