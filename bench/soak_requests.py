"""The requests that the clients of a soak make, and the checks of their results."""

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
from neap_client import GenerationStream, NeapClient
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc
from neap_client.status import from_rpc_error

from bench.worker import MODEL_ID
from shared.errors import (
    DeadlineExceeded,
    Exhausted,
    InvalidInput,
    NeapError,
    NotFound,
    Unavailable,
)

MAX_TOKENS = 24
FULL, EXACT = pb.DepthPolicy(full=pb.Full()), pb.DepthPolicy(exact=pb.Exact())
# (prompt, whether sampled) -> tokens of the reference answer, generated with no other request running.
ReferenceAnswers = Mapping[tuple[str, bool], list[int]]


class Violation(Exception):
    """A request had a result that it must not have."""


@dataclass(frozen=True)
class Outcome:
    """`name`: how a request ended. `num_calls`: RPCs made for it, retries included."""

    name: str
    num_calls: int = 1


def answer_request(
    prompt: str, sampled: bool, depth: pb.DepthPolicy, max_tokens: int = MAX_TOKENS
) -> pb.GenerateRequest:
    """A request with one possible answer of exactly `max_tokens` tokens: greedy, or sampled with a seed that the prompt determines."""
    return pb.GenerateRequest(
        model_id=MODEL_ID,
        text=prompt,
        depth=depth,
        sampling=pb.Sampling(temperature=0.9, seed=len(prompt)) if sampled else None,
        stopping=pb.Stopping(max_tokens=max_tokens, ignore_eos=True),
    )


@dataclass(frozen=True)
class SoakRequests:
    """Each method makes one request, waits for its end and checks the result. Raises Violation.

    `slow`: a channel with a small window. `references`: the reference answers. `hold_s`: how long a slow reader does not read.
    `over`: set when the soak ends.
    """

    client: NeapClient
    slow: grpc.Channel
    references: ReferenceAnswers
    hold_s: float
    over: threading.Event

    def kinds(self) -> dict[str, tuple[float, Callable[[random.Random], Outcome]]]:
        """The kinds of requests: name -> (share of requests, method)."""
        return {
            "answer": (0.62, self.answer),
            "cancel": (0.12, self.cancel),
            "deadline": (0.12, self.deadline),
            "bad": (0.10, self.bad),
            "slow reader": (0.04, self.slow_reader),
        }

    def answer(self, generator: random.Random) -> Outcome:
        """Must be answered completely, whatever happens to the workers: the client retries failures before the first token."""
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
        """Cancels after some tokens."""
        expected, request = self._pick(generator)
        num_tokens = generator.randrange(len(expected))
        with self.client.generate(request) as stream:
            for _ in stream:
                if len(stream.token_ids) >= num_tokens:
                    break
        self._compare(stream, expected, whole=False)
        return Outcome("cancelled", stream.num_attempts)

    def deadline(self, generator: random.Random) -> Outcome:
        """Has a short deadline, which often passes."""
        expected, request = self._pick(generator)
        stream = self.client.generate(request, timeout_s=10 ** generator.uniform(-2, 0.7))
        try:
            for _ in stream:
                pass
        except DeadlineExceeded:
            self._compare(stream, expected, whole=False)
            return Outcome("too late", stream.num_attempts)
        except (Exhausted, Unavailable) as error:
            # Correct only before the first token: the client gave up because the next retry would have come after the deadline.
            if stream.token_ids:
                raise Violation(f"a stream failed after its first token: {error.reason}") from error
            return Outcome("refused", stream.num_attempts)
        self._compare(stream, expected, whole=True)
        return Outcome("finished", stream.num_attempts)

    def bad(self, generator: random.Random) -> Outcome:
        """Is invalid, and must be rejected with the right error."""
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
            raise Violation(f"a bad request failed with {error.reason}") from error
        raise Violation("a bad request was answered")

    def slow_reader(self, generator: random.Random) -> Outcome:
        """Does not read for `hold_s`. The worker must end it, unless the worker was too busy to fill the window: then it may finish."""
        prompt, _ = generator.choice(sorted(self.references))
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
            # A worker that ends waits a few seconds for its clients to read, then closes their connections.
            if reason in ("QUEUE_FULL", "GRPC_UNAVAILABLE", "GRPC_CANCELLED"):
                return Outcome("refused")
            raise Violation(f"a slow reader failed with {reason}") from error
        finally:
            call.cancel()

    def _pick(self, generator: random.Random) -> tuple[list[int], pb.GenerateRequest]:
        """(expected tokens, a random request)."""
        prompt, sampled = generator.choice(sorted(self.references))
        max_tokens = generator.randint(1, MAX_TOKENS)
        depth = generator.choice([FULL, EXACT])
        request = answer_request(prompt, sampled, depth, max_tokens)
        return self.references[prompt, sampled][:max_tokens], request

    def _compare(self, stream: GenerationStream, expected: list[int], *, whole: bool) -> None:
        got = stream.token_ids
        if got != (expected if whole else expected[: len(got)]):
            raise Violation(f"tokens differ from the reference answer: {got}, not {expected}")
