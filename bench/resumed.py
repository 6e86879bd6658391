"""What a client waits when the worker of its answers dies or is told to end, and another one goes on.

    python -m bench.resumed --model DIR --router FOLDER [--rounds 3] [--tokens 256] [--streams 4] [--left 170]
        [--read 256] [--faults killed drained]

Two workers with one thread each serve the same model. `--streams` answers to Spec-Bench prompts run, greedy and
sampled, exact. When each has at most `--left` tokens before it, the worker of most of them is killed (SIGKILL), or told
to end (SIGTERM, --grace-s 1, --drain-timeout-s 1). Printed: the time from then to the next token of answers that
moved; to the first token of as many fresh requests of the same length, sent at once to the other worker afterwards; the
longest time between two tokens of the other answers; and how long the worker took to end. An answer that is not that of
an uninterrupted run ends the program. Only the first `--read` tokens of each answer are read.
"""

import argparse
import random
import signal
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice, pairwise
from pathlib import Path

from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import generate_request
from neap_client.sync_generation import GenerationStream

from bench.machine import described
from bench.options import add_prompts, each_model, make_parser
from bench.prompts import read_prompts
from bench.streams import percentile
from bench.table import head, row
from bench.worker import MODEL_ID, READY_S, publish_router, worker_process

FAULTS = {"killed": signal.SIGKILL, "drained": signal.SIGTERM}
FLAGS = ("--threads", "1", "--grace-s", "1", "--drain-timeout-s", "1")


@dataclass
class Seen:
    """Seconds, of all rounds. `fresh`: to the first token. `whole`: the tokens of uninterrupted runs."""

    whole: list[list[int]] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)


def arrivals_s(stream: GenerationStream, num_tokens: int = 1) -> list[float]:
    """Reads `num_tokens` and ends the stream."""
    seconds = []
    with stream:
        while len(stream.token_ids) < num_tokens:
            if next(stream).HasField("chunk"):
                seconds.append(time.perf_counter())
    return seconds


def first_token_s(target: str, num_tokens: int) -> float:
    """Seconds to the first token of a prompt of random tokens, which no prefix cache has."""
    ids = pb.TokenIds(ids=[random.randrange(100, 30_000) for _ in range(num_tokens)])
    with NeapClient(target) as client:
        begin_s = time.perf_counter()
        return arrivals_s(client.generate(generate_request(MODEL_ID, ids, max_tokens=1)))[0] - begin_s


def num_running(target: str) -> int:
    with NeapClient(target) as client:
        return client.get_model(MODEL_ID).load.num_running


def interrupted(
    options: argparse.Namespace, registry: Path, requests: list[pb.GenerateRequest], how: int, seen: Seen
) -> None:
    model, read = options.model, options.read or options.tokens
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        logs = [Path(folder) / f"{number}.log" for number in range(2)]
        workers = [stack.enter_context(worker_process(model, registry, log, FLAGS)) for log in logs]
        targets = [worker.wait_complete(READY_S) for worker in workers]
        target = f"ipv4:{','.join(targets)}"
        client = stack.enter_context(NeapClient(target, num_attempts=9, has_affinity=False))
        readers = stack.enter_context(ThreadPoolExecutor(len(requests)))
        if not seen.whole:
            whole = [client.generate(request) for request in requests]
            list(readers.map(arrivals_s, whole, [read] * len(whole)))
            seen.whole += [stream.token_ids[:read] for stream in whole]
        streams = [client.generate(request) for request in requests]
        reading = [readers.submit(arrivals_s, stream, read) for stream in streams]
        begun = options.tokens - options.left
        while min(len(stream.token_ids) for stream in streams) < begun:
            time.sleep(0.005)
        place = 0 if num_running(targets[0]) >= num_running(targets[1]) else 1
        begin_s = time.perf_counter()
        workers[place].send_signal(how)
        workers[place].wait_ended(READY_S)
        seen.ended.append(time.perf_counter() - begin_s)
        for stream, one in zip(streams, reading, strict=True):
            gaps = [b - max(a, begin_s) for a, b in pairwise(one.result()) if b > begin_s]
            if gaps:  # else it was read before
                (seen.moved if stream.resumptions else seen.others).append(max(gaps))
        lengths = [
            stream.started.num_prompt_tokens + stream.resumptions[0].num_resumed_tokens
            for stream in streams
            if stream.resumptions and stream.started
        ]
        seen.fresh += readers.map(first_token_s, [targets[1 - place]] * len(lengths), lengths)
        if [stream.token_ids[:read] for stream in streams] != seen.whole:
            raise SystemExit("an answer is not that of an uninterrupted run")


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_prompts(parser, per_task=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--read", type=int, default=None)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--left", type=int, default=170)
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    for options in each_model(parser):
        print(described("cpu"))
        measure(options)


def spread(seconds: list[float]) -> str:
    """p50 and p99 in milliseconds."""
    if not seconds:
        return "none"
    return ", ".join(f"{percentile(seconds, share) * 1e3:.0f}" for share in (50, 99))


def measure(options: argparse.Namespace) -> None:
    """Prints the tables of one model."""
    prompts = islice(cycle(read_prompts(options.prompts, options.per_task)), options.streams)
    requests = [
        generate_request(
            MODEL_ID,
            one.turns[0],
            max_tokens=options.tokens,
            ignore_eos=True,
            seed=number,
            temperature=0.8 if number % 2 else None,
        )
        for number, one in enumerate(prompts)
    ]
    head("the worker", "answers that moved", "ms to their next token, p50 and p99", "fresh requests",
         "longest gap of the others", "worker ended after, s")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        registry = Path(folder) / "registry"
        publish_router(options.router, registry)
        for name in options.faults:
            seen, how = Seen(), FAULTS[name]
            for _ in range(options.rounds):
                interrupted(options, registry, requests, how, seen)
            if not seen.moved:
                raise SystemExit("no answer moved: ask for more --tokens")
            times = map(spread, (seen.moved, seen.fresh, seen.others))
            row(f"is {name}", len(seen.moved), *times, f"{statistics.median(seen.ended):.1f}")


if __name__ == "__main__":
    main()
