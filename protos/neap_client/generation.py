"""A client's stream of one generation. It repeats the call until the first token arrives, and later resumes the answer
by another one."""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from neap_client.errors import Cancelled, NeapError, Unavailable
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1.inference_pb2 import GenerateResponse
from neap_client.retry import MAX_LOST, Attempts, is_unavailable, was_lost, was_not_started

# Whether an answer that its worker interrupts is resumed by another: always, only where the tokens are those of an
# uninterrupted run, or never.
Resumes = Literal["always", "exactly", "never"]
# So many resumptions in a row may bring fewer tokens each than this: workers that end every answer must not be asked
# for ever.
MAX_RESUMPTIONS, FEW_TOKENS = 16, 16
# And so many workers may be lost one after the other with an answer that has begun, while each brings few tokens of
# it: it may be what ends them at some place.
MAX_LOST_BEGUN = 3
# So many workers may refuse a call because it would wait there. The next one lets it wait.
MAX_REFUSALS = 2
# So many are asked whether they go on exactly, before one goes on inexactly.
MAX_ASKED = 16
OnStarted = Callable[[pb.Started], object]


@dataclass(frozen=True)
class Answer:
    """A whole answer. `started` says what ran; `finished` why it ended, token counts, times, and what depth execution
    saved.

    `resumptions`: the Started of each call that resumed it; times and depth statistics are of the last of them.
    """

    text: str
    token_ids: tuple[int, ...]
    started: pb.Started
    finished: pb.Finished
    resumptions: tuple[pb.Started, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[pb.ToolCall, ...] = ()
    prompt_tokens: tuple[pb.Token, ...] = ()

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


class GenerationCalls:
    """What the streams of both clients know of their generation. `num_attempts` counts the calls made so far.
    `resumptions`: the Started of each call that resumed the answer; its `num_resumed_tokens` says where,
    `continued_inexactly` whether later tokens may differ."""

    def __init__(
        self,
        open_call: Callable[[bytes, float | None, str], Any],
        request: bytes,
        *,
        addresses: Sequence[str] = (),
        num_attempts: int = 1,
        timeout_s: float | None = None,
        waits_when_full: bool = True,
        resumes: Resumes = "always",
        stall_timeout_s: float = math.inf,
        on_started: OnStarted | None = None,
        keeps: bool = True,
    ) -> None:
        """`open_call` starts a call with a serialized request, a deadline in seconds, and the address of its worker,
        empty for any. `addresses`: workers that are to be asked first, in this order. `on_started` is called with the
        Started of each call before the answer begins. Unless it `keeps` the answer, the stream knows no more of it than
        what resuming takes: the token ids. The constructor starts the first call."""
        self.token_ids: list[int] = []
        self.prompt_tokens: list[pb.Token] = []
        self.text = ""
        self.reasoning = ""
        self.tool_calls: list[pb.ToolCall] = []
        self.started: pb.Started | None = None
        self.finished: pb.Finished | None = None
        self.num_attempts = 0
        self.resumptions: list[pb.Started] = []
        # The Started of a call that resumes, until it goes on with the answer.
        self._resumed: pb.Started | None = None
        self._open_call = open_call
        self._on_started = on_started
        self._keeps = keeps
        self._num_prompt_tokens = 0
        self._request = request
        self._addresses = addresses
        # Once the answer was interrupted: where the others are, and those of them whose numerics may be equal.
        self._others: list[str] = []
        self._equals: list[str] = []
        # Tokens at the latest interruption, and how many in a row came after few tokens.
        self._num_tokens_before = self._num_soon = 0
        # Workers that were lost with it since it last came forward.
        self._num_lost = 0
        # The address of the latest call's worker, empty for any.
        self._asked = ""
        # Calls since the answer began, or was interrupted.
        self._num_opened = 0
        self._resumes = resumes if num_attempts > 1 else "never"
        self._stall_timeout_s = stall_timeout_s if self._resumes != "never" else math.inf
        self._deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._is_closed = False
        self._num_attempts = num_attempts
        self._attempts = self._new_attempts(was_not_started if waits_when_full else is_unavailable)
        self._held: deque[GenerateResponse] = deque()
        self._has_begun = False
        self._call: Any = self._open()

    def close(self) -> None:
        """Cancel the call and end the iteration. Idempotent."""
        self._is_closed = True
        self._call.cancel()

    def answer(self) -> Answer:
        """Return the whole answer of a stream that was read to its end.
        Raises Unavailable (INCOMPLETE_ANSWER) for any other stream, and for one that does not keep it."""
        if self.started is None or self.finished is None or not self._keeps:
            raise Unavailable("the answer has not been read to its end", reason="INCOMPLETE_ANSWER")
        return Answer(
            self.text,
            tuple(self.token_ids),
            self.started,
            self.finished,
            tuple(self.resumptions),
            self.reasoning,
            tuple(self.tool_calls),
            tuple(self.prompt_tokens),
        )

    def _new_attempts(self, helps: Callable[[BaseException], bool]) -> Attempts:
        return Attempts(
            lambda error: helps(error) and not self._is_closed,
            num_attempts=self._num_attempts,
            max_lost=MAX_LOST if self.started is None else MAX_LOST_BEGUN - self._num_lost,
            deadline_s=self._deadline_s,
            resumes=self.started is not None,
        )

    def _attempts_after(self, error: NeapError) -> tuple[Attempts, float]:
        """Return the attempts at resuming the answer that `error` has interrupted, and the seconds before the first
        one. Raises `error` unless the worker, and not the request, has failed."""
        may_resume = isinstance(error, Unavailable) and self._resumes != "never"
        if self.started is None or not may_resume:
            raise error
        if len(self.token_ids) - self._num_tokens_before >= FEW_TOKENS:
            self._num_soon = self._num_lost = 0
        self._num_tokens_before = len(self.token_ids)
        self._num_soon += 1
        if self._num_soon > MAX_RESUMPTIONS:
            raise error
        # An answer that has begun waits for room.
        attempts = self._new_attempts(was_not_started)
        wait_s = attempts.wait_s(error)
        self._num_lost += was_lost(error)
        # The worker that was lost comes last.
        self._addresses = (*self._addresses[self._num_opened :], *self._addresses[: self._num_opened])
        self._num_opened = 0
        self._others = [address for address in self._addresses if address != self._asked]
        is_exact = self.started.exact_promise == pb.EXACT_PROMISE_TOKENS_OF_FULL
        if is_exact and self.started.policy != "relaxed":
            self._equals = self._others[:MAX_ASKED]
        return attempts, wait_s

    def _was_refused(self, error: NeapError) -> bool:
        """Whether another worker is to be asked at once: this one would let the call wait, or computes otherwise."""
        if error.reason == "NUMERICS_DIFFER" and self._equals:
            self._equals.remove(self._asked)
            return bool(self._equals) or self._resumes == "always"
        return error.reason == "BUSY" and self._num_opened <= MAX_REFUSALS

    def _begin_attempt(self) -> None:
        """Start a call, except for the first attempt, which the constructor has started."""
        if self.num_attempts:
            self._call = self._open()
        self.num_attempts += 1
        self._held.clear()
        self._resumed = None

    def _hold(self, event: GenerateResponse) -> None:
        """Keep an event for the caller, except for the Started of a call that resumes.
        Raises Unavailable (reason CANNOT_RESUME)."""
        if self.started is None or not event.HasField("started"):
            if self._resumed is not None:
                self.resumptions.append(self._resumed)
                self._resumed = None
            self._held.append(event)
            if event.HasField("started") and self._on_started is not None:
                self._on_started(event.started)
            return
        if event.started.num_resumed_tokens != self.started.num_resumed_tokens + len(self.token_ids):
            self._call.cancel()
            raise Unavailable("the worker that answered has not resumed the answer", reason="CANNOT_RESUME")
        self._resumed = event.started

    @property
    def _event_timeout_s(self) -> float:
        """Seconds that the next event may take. After its Started a call may wait in a queue; a worker that brings
        nothing later hangs."""
        has_begun = self.started is not None and self._resumed is None
        return self._stall_timeout_s if has_begun else math.inf

    def _stalled(self) -> Unavailable:
        self._call.cancel()
        return Unavailable(f"the worker has brought nothing for {self._stall_timeout_s:g} s", reason="STALLED")

    @property
    def _lacks_chunk(self) -> bool:
        """Whether nothing but Started has arrived."""
        return not self._held or self._held[-1].HasField("started")

    def _record(self, event: GenerateResponse) -> GenerateResponse:
        self.token_ids += [token.id for token in event.chunk.tokens]
        self._num_prompt_tokens += len(event.chunk.prompt_tokens)
        if self._keeps:
            self._keep(event)
        if event.HasField("started"):
            self.started = event.started
        elif event.HasField("finished"):
            self.finished = event.finished
        return event

    def _keep(self, event: GenerateResponse) -> None:
        self.prompt_tokens += event.chunk.prompt_tokens
        for part in (event.chunk, event.finished):
            self.text += part.text
            self.reasoning += part.reasoning
            for piece in part.tool_calls:
                # Those that another stream has had the beginning of stay without a name.
                missing = piece.index + 1 - len(self.tool_calls)
                self.tool_calls += [pb.ToolCall() for _ in range(missing)]
                call = self.tool_calls[piece.index]
                call.id, call.name = piece.id or call.id, piece.name or call.name
                call.arguments += piece.arguments

    def _open(self) -> Any:
        if self._is_closed:
            raise Cancelled("the stream was closed")
        left_s = self._deadline_s - time.monotonic()
        # Serialized messages that follow one another are merged.
        added = self._how_it_goes_on()
        self._asked, added.can_go_elsewhere = self._next_address()
        self._num_opened += 1
        request = self._request + added.SerializeToString()
        timeout_s = None if math.isinf(left_s) else max(0.0, left_s)
        return self._open_call(request, timeout_s, self._asked)

    def _next_address(self) -> tuple[str, bool]:
        """Where the next call goes, and whether it may be refused because it would wait. If not, it waits wherever it
        comes to, but where it resumes an answer, not at the worker that was lost."""
        places = self._equals or self._others or self._addresses
        if self._num_opened < min(MAX_REFUSALS, len(places)):
            return places[self._num_opened], True
        return (random.choice(places) if self._others else ""), False

    def _how_it_goes_on(self) -> pb.GenerateRequest:
        """What the next call has beside the request."""
        added = pb.GenerateRequest(can_resume=self._resumes != "never")
        if self.started is None:
            return added
        latest = self.resumptions[-1] if self.resumptions else self.started
        added.sampling.seed = self.started.seed
        if self.started.HasField("defaults"):  # another worker may have other ones
            added.model_defaults = False
            added.sampling.MergeFrom(self.started.defaults.sampling)
            if self.started.defaults.HasField("max_tokens"):
                added.stopping.max_tokens = self.started.defaults.max_tokens
        if self.started.policy == "relaxed":
            added.router.version = self.started.router_version
        added.resume.CopyFrom(
            pb.Resume(
                token_ids=self.token_ids,
                prompt_digest=self.started.prompt_digest,
                numerics_id=latest.numerics_id,
                only_exactly=self._resumes == "exactly" or bool(self._equals),
                num_prompt_tokens=self._num_prompt_tokens,
            )
        )
        return added
