"""Answers of an engine in this process, with the time of each token."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.peers.engines.serving import Answer
from shared.engine.engine import Engine
from shared.engine.request.handle import EngineEvent
from shared.engine.request.request import Finished, GenerationRequest, StoppingParams, TokenChunk
from shared.errors import NeapError
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy


@dataclass
class EngineAnswer(Answer):
    """Its `take` runs on the engine's thread: a consumer thread per request would take time from the engine."""

    finished: Finished | None = None
    error: NeapError | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self, event: EngineEvent) -> None:
        if isinstance(event, TokenChunk):
            self.times_s += [time.perf_counter()] * len(event.token_ids)
            self.token_ids += event.token_ids
        elif isinstance(event, Finished):
            self.finished = event
        elif event is not None:
            self.error = event
        else:
            self.ended.set()


def answer_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    policy: DepthPolicy,
    ladder: Ladder | None = None,
    *,
    max_tokens: int,
    ignore_eos: bool = False,
) -> list[EngineAnswer]:
    """Answers to all prompts at once, greedily. Raises the `NeapError` with which the first of them failed."""
    answers = [EngineAnswer([], []) for _ in prompts]
    stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    for ids, answer in zip(prompts, answers, strict=True):
        request = GenerationRequest(tuple(ids), stopping=stopping, policy=policy)
        engine.submit(request, ladder, on_event=answer.take)
    for answer in answers:
        answer.ended.wait()
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return answers
