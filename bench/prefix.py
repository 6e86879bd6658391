"""Time to the first token of chats over several workers: a client that sends a chat to the worker that has read it
(affinity), and one that sends each turn to the workers in turn.

    python -m bench.prefix --model DIR [--workers 3] [--shared 600] [--own 40] [--requests 6] [--rounds 3]

Workers have one thread each. `--requests` chats of `--rounds` turns, each of a message of about `--own` tokens and an
answer of ANSWER_TOKENS, after a system message of about `--shared` tokens; two chats at once.
"""

import argparse
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import generate_request

from bench.machine import described
from bench.options import each_model, make_parser
from bench.streams import percentile
from bench.table import head, row
from bench.worker import MODEL_ID, READY_S, worker_process

ANSWER_TOKENS = 32
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "world", "state", "student")


def chat(client: NeapClient, number: int, options: argparse.Namespace) -> list[tuple[float, float]]:
    """The seconds to the first token and the share of cached prompt tokens, for each turn of a chat."""
    draw, messages, turns = random.Random(number), [], []

    def words(count: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(count))

    messages.append(pb.ChatMessage(role="system", content=f"Chat {number}: {words(options.shared)}"))
    for _ in range(options.rounds):
        messages.append(pb.ChatMessage(role="user", content=words(options.own)))
        request = generate_request(MODEL_ID, messages, policy="full", max_tokens=ANSWER_TOKENS, ignore_eos=True)
        start = time.perf_counter()
        stream = client.generate(request)
        arrived = [time.perf_counter() for event in stream if event.HasField("chunk")]
        usage = stream.answer().usage
        turns.append((arrived[0] - start, usage.num_cached_tokens / usage.num_prompt_tokens))
        messages.append(pb.ChatMessage(role="assistant", content=stream.text))
    return turns


def chats(options: argparse.Namespace) -> None:
    """Prints the table with and without affinity. New workers for each, so that nothing is cached."""
    print(described("cpu"))
    head("chats go", "cached prompt tokens after the first turn", "seconds to the first token of later turns", "p99")
    for name, has_affinity in (("in turn", False), ("where they were read", True)):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            flags = ("--threads", "1")
            logs = [Path(folder) / f"{number}.log" for number in range(options.workers)]
            workers = [stack.enter_context(worker_process(options.model, Path(folder), log, flags)) for log in logs]
            target = f"ipv4:{','.join([worker.wait_complete(READY_S) for worker in workers])}"
            client = stack.enter_context(NeapClient(target, has_affinity=has_affinity))
            pool = stack.enter_context(ThreadPoolExecutor(2))
            done = [pool.submit(chat, client, number, options) for number in range(options.requests)]
            later = [turn for one in done for turn in one.result()[1:]]
        waits = [wait for wait, _ in later]
        cached = statistics.mean(share for _, share in later)
        row(name, f"{cached:.0%}", *(f"{percentile(waits, share):.2f}" for share in (50, 99)))


def main() -> None:
    parser = make_parser(__doc__, many=True)
    parser.add_argument("--shared", type=int, default=600, help="tokens of the system message")
    parser.add_argument("--own", type=int, default=40, help="tokens of each message")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=3)
    for options in each_model(parser):
        chats(options)


if __name__ == "__main__":
    main()
