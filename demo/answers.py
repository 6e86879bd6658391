"""What an answer took: for the demo, and for bench.learning."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb

from neap_engine.cli.generate import seconds
from neap_engine.cli.interruption import interruptible

# Shorter answers have no speed.
MIN_TOKENS = 8


@dataclass(frozen=True)
class Measured:
    """`version`: the router's, 0 without one. `decode_s`: from the first token to the last. `ended_s`: in Unix
    seconds."""

    version: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    decode_s: float
    num_passes: int
    ended_s: float

    @property
    def has_speed(self) -> bool:
        return len(self.token_ids) >= MIN_TOKENS and self.decode_s > 0

    @property
    def tokens_per_s(self) -> float:
        """Without the prompt and the token that its pass gives, which are the same under every policy."""
        return (len(self.token_ids) - 1) / self.decode_s

    @property
    def tokens_per_pass(self) -> float:
        return (len(self.token_ids) - 1) / max(self.num_passes, 1)


def ask(
    client: NeapClient, request: pb.GenerateRequest, show: Callable[[pb.GenerateResponse], object] = lambda event: None
) -> Measured:
    """`show` gets each part of the answer as it comes. Ctrl-C ends the wait for the next."""
    with client.generate(request) as stream:
        for event in interruptible(stream):
            show(event)
        answer = stream.answer()
    return Measured(
        answer.started.router_version,
        answer.token_ids,
        answer.usage.num_prompt_tokens,
        seconds(answer.finished.timing.decode),
        answer.finished.depth.num_deep_passes,
        time.time(),
    )


@dataclass(frozen=True)
class Pair:
    """One prompt, answered under both policies in turn."""

    full: Measured
    exact: Measured

    @property
    def is_same(self) -> bool:
        return self.full.token_ids == self.exact.token_ids

    @property
    def has_speed(self) -> bool:
        return self.full.has_speed and self.exact.has_speed

    @property
    def speed_up(self) -> float:
        return self.exact.tokens_per_s / self.full.tokens_per_s


def median_speed_up(pairs: Sequence[Pair]) -> float:
    """0 where no answer is long enough."""
    found = [pair.speed_up for pair in pairs if pair.has_speed]
    return statistics.median(found) if found else 0.0
