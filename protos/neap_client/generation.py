"""A client's stream of one generation, which repeats the call until the first token arrives."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from neap_client.errors import Cancelled, Unavailable
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1.inference_pb2 import GenerateResponse
from neap_client.retry import Attempts, is_unavailable, repeat, was_not_started
from neap_client.status import from_rpc_error


@dataclass(frozen=True)
class Answer:
    """A whole answer. `started` says what ran; `finished` why it ended, token counts, times, and what depth execution saved."""

    text: str
    token_ids: tuple[int, ...]
    started: pb.Started
    finished: pb.Finished

    @property
    def finish_reason(self) -> str:
        """ "eos", "length", "stop_string" or "stop_token"."""
        return pb.FinishReason.Name(self.finished.reason).removeprefix("FINISH_REASON_").lower()

    @property
    def usage(self) -> pb.Usage:
        return self.finished.usage

    @property
    def timing(self) -> pb.Timing:
        return self.finished.timing

    @property
    def depth(self) -> pb.DepthStatistics:
        return self.finished.depth


class Generation:
    """What the streams of both clients know of their generation. `num_attempts` counts the calls made so far."""

    def __init__(
        self,
        open_call: Callable[[float | None], Any],
        *,
        num_attempts: int = 1,
        timeout_s: float | None = None,
        waits_when_full: bool = True,
    ) -> None:
        """`open_call` starts a call with the given deadline in seconds. The constructor starts the first call."""
        self.token_ids: list[int] = []
        self.text = ""
        self.started: pb.Started | None = None
        self.finished: pb.Finished | None = None
        self.num_attempts = 0
        self._open_call = open_call
        self._deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._is_closed = False
        helps = was_not_started if waits_when_full else is_unavailable
        self._attempts = Attempts(
            lambda error: helps(error) and not self._is_closed,
            num_attempts=num_attempts,
            deadline_s=self._deadline_s,
        )
        self._held: deque[GenerateResponse] = deque()
        self._has_begun = False
        self._call: Any = self._open()

    def close(self) -> None:
        """Cancel the call and end the iteration. Idempotent."""
        self._is_closed = True
        self._call.cancel()

    def answer(self) -> Answer:
        """Return the whole answer of a stream that was read to its end. Raises Unavailable (INCOMPLETE_ANSWER) for any other stream."""
        if self.started is None or self.finished is None:
            raise Unavailable("the answer has not been read to its end", reason="INCOMPLETE_ANSWER")
        return Answer(self.text, tuple(self.token_ids), self.started, self.finished)

    def _begin_attempt(self) -> None:
        """Start a call, except for the first attempt, which the constructor has started."""
        if self.num_attempts:
            self._call = self._open()
        self.num_attempts += 1
        self._held.clear()

    @property
    def _lacks_chunk(self) -> bool:
        """Whether nothing but Started has arrived."""
        return not self._held or self._held[-1].HasField("started")

    def _record(self, event: GenerateResponse) -> GenerateResponse:
        self.token_ids += [token.id for token in event.chunk.tokens]
        self.text += event.chunk.text + event.finished.text
        if event.HasField("started"):
            self.started = event.started
        elif event.HasField("finished"):
            self.finished = event.finished
        return event

    def _open(self) -> Any:
        if self._is_closed:
            raise Cancelled("the stream was closed")
        left_s = self._deadline_s - time.monotonic()
        return self._open_call(None if math.isinf(left_s) else max(0.0, left_s))


class GenerationStream(Generation, Iterator[GenerateResponse]):
    """Iterates over Started, token chunks and Finished. Raises NeapError as the service raised it.

    A call that fails with UNAVAILABLE, or with RESOURCE_EXHAUSTED and a retry delay, is repeated as long as no chunk has arrived.
    Later it is not repeated, because sampling could return other tokens and the caller may have shown the first ones. Started is
    held back until the first chunk, so it belongs to the call that delivers the tokens. Later failures are raised unchanged, and
    `token_ids` and `text` hold what arrived before; `started` and `finished` are None until they arrive. Only one thread may iterate; any thread may `close`.
    """

    def __init__(self, open_call: Callable[[float | None], Any], **options: Any) -> None:
        self._closing = threading.Event()
        super().__init__(open_call, **options)

    def __next__(self) -> GenerateResponse:
        if not self._has_begun:
            self._has_begun = True
            repeat(self._attempt, self._attempts, sleep=self._closing.wait)
        if self._is_closed:
            raise StopIteration
        return self._record(self._held.popleft() if self._held else self._receive())

    def close(self) -> None:
        super().close()
        self._closing.set()

    def __enter__(self) -> "GenerationStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempt(self) -> None:
        """Receive events up to the first one that is not Started."""
        self._begin_attempt()
        try:
            while self._lacks_chunk:
                self._held.append(self._receive())
        except StopIteration:  # the stream ended after Started; the caller sees that
            return

    def _receive(self) -> GenerateResponse:
        try:
            event: GenerateResponse = next(self._call)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return event
