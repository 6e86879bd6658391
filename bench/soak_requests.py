"""What the clients of a soak ask for, and what must come of it."""

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
from neap.inference.v1 import inference_pb2 as pb
from neap.inference.v1 import inference_pb2_grpc

from bench.worker import MODEL_ID
from shared.errors import (
    DeadlineExceeded,
    Exhausted,
    InvalidInput,
    NeapError,
    NotFound,
    Unavailable,
)
from shared.rpc.client import NeapClient
from shared.rpc.generation import GenerationStream
from shared.rpc.status import from_rpc_error

MAX_TOKENS = 24
FULL, EXACT = pb.DepthPolicy(full=pb.Full()), pb.DepthPolicy(exact=pb.Exact())
# (prompt, whether sampled) -> the tokens of an answer that was generated with nobody else there.
Alone = Mapping[tuple[str, bool], list[int]]


class Violation(Exception):
    """Something came out that must not."""


@dataclass(frozen=True)
class Outcome:
    """`name` says how a request ended; `num_calls` how many calls that took."""

    name: str
    num_calls: int = 1


def answer_request(
    prompt: str, sampled: bool, depth: pb.DepthPolicy, max_tokens: int = MAX_TOKENS
) -> pb.GenerateRequest:
    """As long as asked for, and always the same: greedy, or sampled with the prompt's own seed."""
    return pb.GenerateRequest(
        model_id=MODEL_ID,
        text=prompt,
        depth=depth,
        sampling=pb.Sampling(temperature=0.9, seed=len(prompt)) if sampled else None,
        stopping=pb.Stopping(max_tokens=max_tokens, ignore_eos=True),
    )


@dataclass(frozen=True)
class SoakRequests:
    """Each method makes one request, waits for its end and judges it; raises Violation. `slow`: a channel with a small window."""

    client: NeapClient
    slow: grpc.Channel
    alone: Alone
    hold_s: float
    over: threading.Event

    def kinds(self) -> dict[str, tuple[float, Callable[[random.Random], Outcome]]]:
        """name -> (share, method)."""
        return {
            "answer": (0.62, self.answer),
            "cancel": (0.12, self.cancel),
            "deadline": (0.12, self.deadline),
            "bad": (0.10, self.bad),
            "slow reader": (0.04, self.slow_reader),
        }

    def answer(self, generator: random.Random) -> Outcome:
        """Must come whole, whatever happens to the workers: all that fails before the first token is safe to repeat."""
        expected, request = self._pick(generator)
        stream = self.client.generate(request)
        try:
            finished = [event for event in stream if event.HasField("finished")]
        except NeapError as error:
            raise Violation(
                f"an answer was lost after {stream.num_attempts} calls: {error.reason} {error.message}"
            ) from error
        self._compare(stream, expected, whole=True)
        if len(finished) != 1:
            raise Violation(f"an answer ended {len(finished)} times")
        return Outcome("finished", stream.num_attempts)

    def cancel(self, generator: random.Random) -> Outcome:
        """Goes away after some tokens."""
        expected, request = self._pick(generator)
        num_tokens = generator.randrange(len(expected))
        with self.client.generate(request) as stream:
            for _ in stream:
                if len(stream.token_ids) >= num_tokens:
                    break
        self._compare(stream, expected, whole=False)
        return Outcome("cancelled", stream.num_attempts)

    def deadline(self, generator: random.Random) -> Outcome:
        """Has little time, often too little."""
        expected, request = self._pick(generator)
        stream = self.client.generate(request, timeout_s=10 ** generator.uniform(-2, 0.7))
        try:
            for _ in stream:
                pass
        except DeadlineExceeded:
            self._compare(stream, expected, whole=False)
            return Outcome("too late", stream.num_attempts)
        except (Exhausted, Unavailable) as error:
            # Nothing was begun, and the wait would have outlasted the deadline.
            if stream.token_ids:
                raise Violation(f"a stream broke off: {error.reason}") from error
            return Outcome("refused", stream.num_attempts)
        self._compare(stream, expected, whole=True)
        return Outcome("finished", stream.num_attempts)

    def bad(self, generator: random.Random) -> Outcome:
        """Can never work, and must be told so."""
        request = answer_request("hello", False, FULL)
        expected: type[NeapError] = InvalidInput
        match generator.randrange(4):
            case 0:
                request.text = ""
            case 1:
                request.stopping.max_tokens = 0
            case 2:
                request.sampling.temperature = -1.0
            case _:
                request.model_id, expected = "nobody", NotFound
        stream = self.client.generate(request)
        try:
            list(stream)
        except expected:
            return Outcome("rejected", stream.num_attempts)
        except NeapError as error:
            raise Violation(f"a bad request came to {error.reason}") from error
        raise Violation("a bad request was answered")

    def slow_reader(self, generator: random.Random) -> Outcome:
        """Does not read for `hold_s`; is to be ended, or to catch up where the worker was too busy to fill its window."""
        prompt, _ = generator.choice(sorted(self.alone))
        request = answer_request(prompt, False, FULL, max_tokens=800)
        request.logprobs = 20
        call = inference_pb2_grpc.InferenceServiceStub(self.slow).Generate(request)
        try:
            next(call)
            self.over.wait(self.hold_s)
            end_s = time.monotonic() + self.hold_s
            for _ in call:
                if time.monotonic() > end_s:
                    break
            return Outcome("caught up")
        except grpc.RpcError as error:
            reason = from_rpc_error(error).reason
            if reason == "SLOW_READER":
                return Outcome("ended")
            if reason in ("QUEUE_FULL", "GRPC_UNAVAILABLE"):
                return Outcome("refused")
            raise Violation(f"a slow reader came to {reason}") from error
        finally:
            call.cancel()

    def _pick(self, generator: random.Random) -> tuple[list[int], pb.GenerateRequest]:
        """(what must come out, a request)."""
        prompt, sampled = generator.choice(sorted(self.alone))
        max_tokens = generator.randint(1, MAX_TOKENS)
        depth = generator.choice([FULL, EXACT])
        request = answer_request(prompt, sampled, depth, max_tokens)
        return self.alone[prompt, sampled][:max_tokens], request

    def _compare(self, stream: GenerationStream, expected: list[int], *, whole: bool) -> None:
        got = stream.token_ids
        if got != (expected if whole else expected[: len(got)]):
            raise Violation(f"tokens differ from an answer alone: {got}, not {expected}")
