"""Generation streams from one worker over gRPC, timed at the client, in closed and open loops."""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import grpc
import grpc.aio
from neap_client.channel import CHANNEL_OPTIONS
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc
from neap_client.status import from_rpc_error

from bench.prompts import PLAIN_TEXT_NOTE, plain_text

FINISHED = "finished"
# The tokens of one engine step arrive as separate messages in quick succession.
# Within this time they count as one delivery.
SAME_DELIVERY_S = 0.001
# Deadline of each call, above the longest time a benchmark's stream takes.
TIMEOUT_S = 600.0


@dataclass
class Stream:
    """One request and its timing.

    `outcome`: FINISHED or the reason of the error. `deliveries`: (time, number of tokens).
    Times are `time.perf_counter()` seconds.
    """

    arrival_s: float
    outcome: str = ""
    num_prompt_tokens: int = 0
    router_version: int = 0
    prefill_s: float = 0.0
    deliveries: list[tuple[float, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.deliveries)

    @property
    def first_token_s(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.deliveries[0][0] - self.arrival_s

    def gaps_s(self, begin_s: float = 0.0, end_s: float = float("inf")) -> list[float]:
        """Seconds between successive deliveries, for the gaps that end after `begin_s` and begin before `end_s`."""
        times = [at for at, _ in self.deliveries]
        return [b - a for a, b in pairwise(times) if b > begin_s and a < end_s]

    def deliver(self, num_tokens: int) -> None:
        """Records that `num_tokens` tokens arrived now."""
        now = time.perf_counter()
        if self.deliveries and now - self.deliveries[-1][0] < SAME_DELIVERY_S:
            at, count = self.deliveries[-1]
            self.deliveries[-1] = (at, count + num_tokens)
        else:
            self.deliveries.append((now, num_tokens))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` per cent of `values` do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def spread_ms(seconds: Sequence[float]) -> str:
    """The median, the 99th percentile and the most."""
    figures = (percentile(seconds, 50), percentile(seconds, 99), max(seconds))
    return " / ".join(f"{1e3 * one:.0f}" for one in figures)


class StreamClient:
    """Opens streams to one worker over one connection. Never retries: a refusal is a result. Async context manager."""

    def __init__(self, target: str) -> None:
        self._takes_chat = True
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub: inference_pb2_grpc.InferenceServiceStub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> "StreamClient":
        await self._channel.channel_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def warm_up(self, request: pb.GenerateRequest) -> None:
        """One request that must succeed. Where the model has no chat template, this and all later ones go as plain
        text."""
        outcome = (await self.run(request, Stream(0.0))).outcome
        if outcome == "NO_CHAT_TEMPLATE":
            self._takes_chat = False
            print(PLAIN_TEXT_NOTE)
            outcome = (await self.run(request, Stream(0.0))).outcome
        assert outcome == FINISHED, outcome

    async def run(self, request: pb.GenerateRequest, stream: Stream) -> Stream:
        """Makes the request and records its events in `stream` until it ends. Returns `stream`."""
        if not self._takes_chat and request.HasField("chat"):
            request.text = plain_text([message.content for message in request.chat.messages])
        try:
            async for event in self._stub.Generate(request, timeout=TIMEOUT_S):
                if event.HasField("started"):
                    stream.num_prompt_tokens = event.started.num_prompt_tokens
                    stream.router_version = event.started.router_version
                elif event.HasField("finished"):
                    stream.prefill_s = event.finished.timing.prefill.ToNanoseconds() / 1e9
                elif event.chunk.tokens:
                    stream.deliver(len(event.chunk.tokens))
            stream.outcome = FINISHED
        except grpc.aio.AioRpcError as error:
            # `from_rpc_error` is written for synchronous errors; this one has the same methods.
            stream.outcome = from_rpc_error(error).reason
        return stream

    async def closed_loop(self, requests: Iterator[pb.GenerateRequest], width: int, seconds: float) -> list[Stream]:
        """Keeps `width` streams running for `seconds`, then waits for those that have started. Returns all of them."""
        end_s = time.perf_counter() + seconds
        streams: list[Stream] = []

        async def one_at_a_time() -> None:
            while (now := time.perf_counter()) < end_s:
                streams.append(Stream(now))
                await self.run(next(requests), streams[-1])

        await asyncio.gather(*(one_at_a_time() for _ in range(width)))
        return streams

    async def open_loop(
        self, requests: Iterator[pb.GenerateRequest], rate_per_s: float, seconds: float, generator: random.Random
    ) -> list[Stream]:
        """Starts streams at Poisson arrival times for `seconds`, regardless of how many are running.
        Returns when all have ended."""
        arrival_s = start_s = time.perf_counter()
        running: list[asyncio.Task[Stream]] = []
        while True:
            arrival_s += generator.expovariate(rate_per_s)
            if arrival_s > start_s + seconds:
                break
            await asyncio.sleep(arrival_s - time.perf_counter())
            # Latencies count from the scheduled arrival, so a delay of this client is included.
            running.append(asyncio.create_task(self.run(next(requests), Stream(arrival_s))))
        return list(await asyncio.gather(*running))
