"""What a client waits when the worker of its answers dies or is told to end, and another one goes on.

    python -m bench.resumed --model DIR --router FOLDER [--rounds 3] [--tokens 256]

Two workers with one thread each serve the same model. Four answers to Spec-Bench prompts run, greedy and sampled,
exact. When they have a third of their tokens, the worker of some of them is killed (SIGKILL), or told to end (SIGTERM,
--grace-s 1, --drain-timeout-s 3600). Printed: the longest time between two tokens of answers that moved, and of the
others; how long the worker took to end; and how many answers are not those of an uninterrupted run, which ends the
program.
"""

import argparse
import signal
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from neap_client import NeapClient
from neap_client.generation import GenerationStream
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import generate_request

from bench.machine import described
from bench.options import add_prompts, each_model, make_parser
from bench.prompts import read_prompts
from bench.table import head, row
from bench.worker import MODEL_ID, READY_S, publish_router, worker_process

NUM_STREAMS = 4
FLAGS = ("--threads", "1", "--grace-s", "1", "--drain-timeout-s", "3600")


def longest_gap_s(stream: GenerationStream) -> float:
    """Reads the stream to its end."""
    arrived_s = [time.perf_counter() for event in stream if event.HasField("chunk")]
    return max(b - a for a, b in pairwise(arrived_s))


def num_running(target: str) -> int:
    with NeapClient(target) as client:
        return client.get_model(MODEL_ID).load.num_running


def interrupted(
    model: str, registry: Path, requests: list[pb.GenerateRequest], how: int
) -> tuple[list[float], list[float], float]:
    """Longest gaps of the answers that moved and of the others, and the seconds that the worker took to end."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        logs = [Path(folder) / f"{number}.log" for number in range(2)]
        workers = [stack.enter_context(worker_process(model, registry, log, FLAGS)) for log in logs]
        targets = [worker.wait_serving(READY_S) for worker in workers]
        client = stack.enter_context(NeapClient(f"ipv4:{','.join(targets)}", num_attempts=9))
        expected = [client.answer(request).token_ids for request in requests]
        streams = [client.generate(request) for request in requests]
        readers = stack.enter_context(ThreadPoolExecutor(len(streams)))
        reading = [readers.submit(longest_gap_s, stream) for stream in streams]
        third = requests[0].stopping.max_tokens // 3
        while min(len(stream.token_ids) for stream in streams) < third:
            time.sleep(0.005)
        busiest = workers[0] if num_running(targets[0]) >= num_running(targets[1]) else workers[1]
        begin_s = time.perf_counter()
        busiest.send_signal(how)
        busiest.wait_ended(READY_S)
        ended_s = time.perf_counter() - begin_s
        longest = [one.result() for one in reading]
        gaps = [(bool(stream.resumptions), gap) for stream, gap in zip(streams, longest, strict=True)]  # fmt: skip
        if [stream.answer().token_ids for stream in streams] != expected:
            raise SystemExit("an answer is not that of an uninterrupted run")
    return [gap for moved, gap in gaps if moved], [gap for moved, gap in gaps if not moved], ended_s


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_prompts(parser, per_task=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    for options in each_model(parser):
        print(described("cpu"))
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Prints the table of one model."""
    prompts = read_prompts(options.prompts, options.per_task)[:NUM_STREAMS]
    requests = [
        generate_request(
            MODEL_ID,
            one.turns[0],
            max_tokens=options.tokens,
            ignore_eos=True,
            seed=7,
            temperature=0.8 if number % 2 else None,
        )
        for number, one in enumerate(prompts)
    ]
    head("the worker", "answers that moved", "their longest gap, ms", "that of the others, ms",
         "worker ended after, s")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        registry = Path(folder) / "registry"
        publish_router(options.router, registry)
        for name, how in (("is killed", signal.SIGKILL), ("is told to end", signal.SIGTERM)):
            rounds = [
                interrupted(options.model, registry, requests, how) for _ in range(options.rounds)
            ]
            moved = [gap for one in rounds for gap in one[0]]
            others = [gap for one in rounds for gap in one[1]]
            if not moved:
                raise SystemExit("no answer moved: ask for more --tokens")
            of_others = f"{statistics.median(others) * 1e3:.0f}" if others else "none"
            gaps = f"{statistics.median(moved) * 1e3:.0f} (at most {max(moved) * 1e3:.0f})"
            ended_s = statistics.median(one[2] for one in rounds)
            row(name, len(moved), gaps, of_others, f"{ended_s:.1f}")


if __name__ == "__main__":
    main()
