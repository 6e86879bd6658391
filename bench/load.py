"""A worker process under load: time to first token and gaps between tokens, at shares of its capacity and during a long
prefill.

    python -m bench.load --model DIR --router FOLDER [--seconds 45] [--loads 0.5 0.8 1.2] [--policies exact full]

Capacity is measured first, in the same run: tokens per second with 16 requests always running, divided by the mean
length of an answer. Then requests arrive at random times (Poisson) at shares of that rate, regardless of how many are
running. Prompts are the first turns of Spec-Bench of at most 600 characters, in random order. Greedy, at most 32 new
tokens, prefix cache off. Client and worker share the machine.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import Policy, generate_request

from bench.machine import described
from bench.options import add_prompts, each_model, make_parser
from bench.prompts import short_texts
from bench.streams import FINISHED, Stream, StreamClient, percentile, spread_ms
from bench.table import head, row
from bench.worker import MODEL_ID, serving

MAX_TOKENS = 32
WIDTH = 16
RAMP_S = 5.0
NUM_RUNNING = 4
MIN_LONG_TOKENS = 1500
# About four characters per token. If the model refuses the prompt as too long, the run ends.
LONG_CHARACTERS = 8000
POLICIES: tuple[Policy, ...] = ("exact", "full")


def chat(text: str, policy: Policy, max_tokens: int, *, ignore_eos: bool = False) -> pb.GenerateRequest:
    return generate_request(MODEL_ID, text, policy=policy, max_tokens=max_tokens, ignore_eos=ignore_eos)


def shuffled(texts: Sequence[str], policy: Policy, seed: int) -> Iterator[pb.GenerateRequest]:
    """An endless sequence of requests. Every text comes once before one repeats; the order depends on `seed` alone."""
    generator = random.Random(seed)
    while True:
        for text in generator.sample(texts, len(texts)):
            yield chat(text, policy, MAX_TOKENS)


async def measure_capacity(client: StreamClient, texts: Sequence[str], policy: Policy, seconds: float) -> float:
    """Requests per second with WIDTH requests always running, after a ramp of RAMP_S that does not count."""
    streams = await client.closed_loop(shuffled(texts, policy, 0), WIDTH, RAMP_S + seconds)
    begin_s = min(stream.arrival_s for stream in streams) + RAMP_S
    tokens_per_s = _tokens_between(streams, begin_s, begin_s + seconds) / seconds
    lengths = [stream.num_tokens for stream in streams if stream.outcome == FINISHED]
    requests_per_s = tokens_per_s / statistics.mean(lengths)
    print(f"{policy}: capacity {tokens_per_s:.1f} tokens/s, {requests_per_s:.2f} requests/s")
    return requests_per_s


async def measure_load(
    client: StreamClient, texts: Sequence[str], policy: Policy, rate_per_s: float, seconds: float
) -> list[object]:
    """Cells of one open loop at `rate_per_s` requests per second."""
    streams = await client.open_loop(shuffled(texts, policy, 1), rate_per_s, seconds, random.Random(2))
    begin_s = min(stream.arrival_s for stream in streams)
    served = [stream for stream in streams if stream.outcome == FINISHED]
    firsts = [stream.first_token_s for stream in served]
    refused = Counter(stream.outcome for stream in streams if stream.outcome != FINISHED)
    return [
        len(streams),
        f"{percentile(firsts, 50):.2f} / {percentile(firsts, 99):.2f}",
        spread_ms([gap for stream in served for gap in stream.gaps_s()]),
        f"{_tokens_between(streams, begin_s, begin_s + seconds) / seconds:.1f}",
        ", ".join(f"{count} {why}" for why, count in refused.items()) or "none",
    ]


async def measure_long_prefill(client: StreamClient, texts: Sequence[str], policy: Policy) -> list[object]:
    """Cells: gaps of NUM_RUNNING streams while a long prompt is read, and how long an idle worker reads such a one."""
    long_text = " ".join(list(texts) * (LONG_CHARACTERS // sum(map(len, texts)) + 1))
    alone = Stream(0.0)
    # Starts one character later than the prompt below, so that the two share no prefix.
    await client.run(chat(long_text[1:LONG_CHARACTERS], policy, 1), alone)
    streams = [Stream(0.0) for _ in range(NUM_RUNNING)]
    running = [
        asyncio.create_task(client.run(chat(text, policy, 2000, ignore_eos=True), stream))
        for text, stream in zip(texts, streams, strict=False)
    ]
    while min(stream.num_tokens for stream in streams) < 20:
        await asyncio.sleep(0.1)
    arrival_s = time.perf_counter()
    guest = Stream(arrival_s)
    await client.run(chat(long_text[:LONG_CHARACTERS], policy, 1), guest)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for stream in (alone, guest):
        assert stream.outcome == FINISHED, stream.outcome
        assert stream.num_prompt_tokens >= MIN_LONG_TOKENS, stream.num_prompt_tokens
    before = [gap for stream in streams for gap in stream.gaps_s(0.0, arrival_s)]
    meanwhile = (arrival_s, guest.deliveries[0][0])
    return [
        f"{statistics.median(before) * 1e3:.0f}",
        spread_ms([gap for stream in streams for gap in stream.gaps_s(*meanwhile)]),
        guest.num_prompt_tokens,
        f"{alone.prefill_s:.2f}",
        f"{guest.first_token_s:.2f}",
    ]


def _tokens_between(streams: Sequence[Stream], begin_s: float, end_s: float) -> int:
    return sum(count for stream in streams for at, count in stream.deliveries if begin_s <= at < end_s)


async def measure(target: str, texts: Sequence[str], options: argparse.Namespace) -> None:
    """Prints both tables."""
    async with StreamClient(target) as client:
        capacities = {}
        for policy in options.policies:
            await client.warm_up(chat(texts[0], policy, 4))
            capacities[policy] = await measure_capacity(client, texts, policy, options.seconds)
        head("policy", "load", "requests", "first token p50 / p99, s", "gap p50 / p99 / max, ms",
             "tokens/s", "not served")  # fmt: skip
        for policy, capacity in capacities.items():
            for load in options.loads:
                cells = await measure_load(client, texts, policy, load * capacity, options.seconds)
                row(policy, f"{load:.0%}, {load * capacity:.2f}/s", *cells)
        head("policy", f"gap of {NUM_RUNNING} streams before, ms",
             "gap p50 / p99 / max while a long prompt is read, ms",
             "its tokens", "read with nobody else, s", "read in company, s")  # fmt: skip
        for policy in options.policies:
            row(policy, *await measure_long_prefill(client, texts, policy))


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_prompts(parser, 0)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.2])
    parser.add_argument("--seconds", type=float, default=45.0, help="of each measurement")
    # Small, so that arrivals above capacity are refused within a run of this length.
    parser.add_argument("--max-queue", type=int, default=16)
    for options in each_model(parser):
        texts = short_texts(options.prompts, options.per_task)
        print(f"{described('cpu')}; a queue of {options.max_queue}, {len(texts)} prompts")
        # Prompts repeat, and each is to be prefilled every time.
        flags = ("--max-queue", str(options.max_queue), "--prefix-cache-mb", "0")
        with serving(options.model, options.router, flags) as target:
            asyncio.run(measure(target, texts, options))


if __name__ == "__main__":
    main()
