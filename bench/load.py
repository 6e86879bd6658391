"""A worker process under load: time to first token and gaps between tokens, at shares of its capacity and during a long prefill.

    python -m bench.load --model DIR --router FOLDER [--seconds 45] [--loads 0.5 0.8 1.2] [--policies exact full]

Capacity is measured first, in the same run: tokens per second with 16 requests always running, divided by the mean length of an
answer. Then requests arrive at random times (Poisson) at shares of that rate, regardless of how many are running. Prompts are the
first turns of Spec-Bench of at most 600 characters, in random order. Greedy, at most 32 new tokens, prefix cache off. Client and worker
share the machine.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from neap_client.inference.v1 import inference_pb2 as pb

from bench.machine import described
from bench.options import add_prompts, make_parser, parsed
from bench.prompts import short_texts
from bench.streams import FINISHED, Stream, StreamClient
from bench.worker import MODEL_ID, publish_router, worker_process

MAX_TOKENS = 32
WIDTH = 16
RAMP_S = 5.0
NUM_RUNNING = 4
MIN_LONG_TOKENS = 1500
# About four characters per token. If the model refuses the prompt as too long, the run ends.
LONG_CHARACTERS = 8000
POLICIES = {"exact": pb.DepthPolicy(exact=pb.Exact()), "full": pb.DepthPolicy(full=pb.Full())}


def chat(
    text: str, policy: str, max_tokens: int, *, ignore_eos: bool = False
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model_id=MODEL_ID,
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=text)]),
        stopping=pb.Stopping(max_tokens=max_tokens, ignore_eos=ignore_eos),
        depth=POLICIES[policy],
    )


def shuffled(texts: Sequence[str], policy: str, seed: int) -> Iterator[pb.GenerateRequest]:
    """An endless sequence of requests. Every text comes once before one repeats; the order depends on `seed` alone."""
    generator = random.Random(seed)
    while True:
        for text in generator.sample(texts, len(texts)):
            yield chat(text, policy, MAX_TOKENS)


async def measure_capacity(
    client: StreamClient, texts: Sequence[str], policy: str, seconds: float
) -> tuple[float, float]:
    """(tokens per second, requests per second) with WIDTH requests always running, after a ramp of RAMP_S that does not count."""
    streams = await client.closed_loop(shuffled(texts, policy, 0), WIDTH, RAMP_S + seconds)
    begin_s = min(stream.arrival_s for stream in streams) + RAMP_S
    tokens_per_s = _tokens_between(streams, begin_s, begin_s + seconds) / seconds
    lengths = [stream.num_tokens for stream in streams if stream.outcome == FINISHED]
    return tokens_per_s, tokens_per_s / statistics.mean(lengths)


async def measure_load(
    client: StreamClient, texts: Sequence[str], policy: str, rate_per_s: float, seconds: float
) -> dict[str, Any]:
    """Figures of one open loop at `rate_per_s` requests per second."""
    streams = await client.open_loop(
        shuffled(texts, policy, 1), rate_per_s, seconds, random.Random(2)
    )
    begin_s = min(stream.arrival_s for stream in streams)
    served = [stream for stream in streams if stream.outcome == FINISHED]
    gaps = [gap for stream in served for gap in stream.gaps_s()]
    firsts = [stream.first_token_s for stream in served]
    return {
        "requests": len(streams),
        "requests_per_s": rate_per_s,
        "first_token_p50_s": percentile(firsts, 50),
        "first_token_p99_s": percentile(firsts, 99),
        "gap_p50_s": percentile(gaps, 50),
        "gap_p99_s": percentile(gaps, 99),
        "gap_max_s": max(gaps),
        "tokens_per_s": _tokens_between(streams, begin_s, begin_s + seconds) / seconds,
        "not_served": dict(Counter(s.outcome for s in streams if s.outcome != FINISHED)),
    }


async def measure_long_prefill(
    client: StreamClient, texts: Sequence[str], policy: str
) -> dict[str, float]:
    """Gaps of NUM_RUNNING streams during the prefill of a long prompt, and the time of such a prefill on an idle worker."""
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
    end_s = guest.deliveries[0][0]
    return {
        "prompt_tokens": guest.num_prompt_tokens,
        "gap_before_s": statistics.median(g for s in streams for g in s.gaps_s(0.0, arrival_s)),
        "gap_p50_s": percentile([g for s in streams for g in s.gaps_s(arrival_s, end_s)], 50),
        "gap_max_s": max(g for s in streams for g in s.gaps_s(arrival_s, end_s)),
        "read_alone_s": alone.prefill_s,
        "read_in_company_s": guest.first_token_s,
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` per cent of `values` do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def _tokens_between(streams: Sequence[Stream], begin_s: float, end_s: float) -> int:
    return sum(
        count for stream in streams for at, count in stream.deliveries if begin_s <= at < end_s
    )


async def measure(
    target: str, texts: Sequence[str], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """All figures, by policy."""
    results: dict[str, dict[str, Any]] = {}
    async with StreamClient(target) as client:
        for policy in options.policies:
            await client.warm_up(chat(texts[0], policy, 4))
            tokens, requests = await measure_capacity(client, texts, policy, options.seconds)
            print(
                f"{policy}: capacity {tokens:.1f} tokens/s, {requests:.2f} requests/s", flush=True
            )
            figures = results[policy] = {
                "capacity_tokens_per_s": tokens,
                "capacity_requests_per_s": requests,
                "loads": {},
            }
            for load in options.loads:
                figures["loads"][load] = await measure_load(
                    client, texts, policy, load * requests, options.seconds
                )
                print(f"{policy}: {load:.0%} done", flush=True)
            figures["company"] = await measure_long_prefill(client, texts, policy)
    return results


def print_tables(results: dict[str, dict[str, Any]]) -> None:
    print(
        "\n| policy | load | requests | first token p50 / p99, s | gap p50 / p99 / max, ms | tokens/s | not served |"
    )
    print("|---|---|---|---|---|---|---|")
    for policy, figures in results.items():
        for load, row in figures["loads"].items():
            refused = ", ".join(f"{count} {why}" for why, count in row["not_served"].items())
            print(
                f"| {policy} | {load:.0%}, {row['requests_per_s']:.2f}/s | {row['requests']} | "
                f"{row['first_token_p50_s']:.2f} / {row['first_token_p99_s']:.2f} | "
                f"{row['gap_p50_s'] * 1e3:.0f} / {row['gap_p99_s'] * 1e3:.0f} / {row['gap_max_s'] * 1e3:.0f} | "
                f"{row['tokens_per_s']:.1f} | {refused or 'none'} |"
            )
    print(
        f"\n| policy | gap of {NUM_RUNNING} streams before, ms | gap p50 / max while a long prompt is read, ms | its tokens | "
        "read with nobody else, s | read in company, s |"
    )
    print("|---|---|---|---|---|---|")
    for policy, figures in results.items():
        row = figures["company"]
        print(
            f"| {policy} | {row['gap_before_s'] * 1e3:.0f} | {row['gap_p50_s'] * 1e3:.0f} / {row['gap_max_s'] * 1e3:.0f} | "
            f"{row['prompt_tokens']} | {row['read_alone_s']:.2f} | {row['read_in_company_s']:.2f} |"
        )


def main() -> None:
    parser = make_parser(__doc__, router=True)
    add_prompts(parser, 0)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.2])
    parser.add_argument("--seconds", type=float, default=45.0, help="of each measurement")
    # Small, so that arrivals above capacity are refused within a run of this length.
    parser.add_argument("--max-queue", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parsed(parser)
    texts = short_texts(options.prompts, options.per_task)
    with tempfile.TemporaryDirectory() as folder:
        registry = Path(folder) / "registry"
        publish_router(options.router, registry)
        flags = ["--max-queue", str(options.max_queue), "--log-level", "warning"]
        # Prompts repeat, and each is to be prefilled every time.
        flags += ["--prefix-cache-mb", "0"]
        with worker_process(options.model, registry, Path(folder) / "log", flags) as worker:
            results = asyncio.run(measure(worker.wait_serving(120.0), texts, options))
    print(
        f"{described('cpu')}, client and worker on this machine, "
        f"queue of {options.max_queue}, {len(texts)} prompts"
    )
    print_tables(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
