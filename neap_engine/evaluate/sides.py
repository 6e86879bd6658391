"""Ways to answer prompts that are to be compared, and the processes that some of them run in."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from shared.engine.engine import Engine
from shared.engine.request.request import Finished, TokenChunk
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.sampling import SamplingParams
from shared.rpc.logs import configure_logging


@dataclass(frozen=True)
class TimedAnswer:
    """One answer. `decode_s`: seconds after the first step to the last token, for all tokens but the `num_first` of the
    first step. `total_s`: with prefill. `layer_executions`: of decoding."""

    token_ids: tuple[int, ...]
    decode_s: float
    total_s: float
    layer_executions: int = 0
    drafted: int = 0
    accepted: int = 0
    verify_passes: int = 0
    relaxed: int = 0
    num_first: int = 1

    @property
    def num_decoded(self) -> int:
        return max(len(self.token_ids) - self.num_first, 0)

    @property
    def per_token_s(self) -> float:
        return self.decode_s / max(self.num_decoded, 1)


# Answers a prompt of token ids.
Side = Callable[[list[int]], TimedAnswer]


def neap(
    engine: Engine, policy: DepthPolicy, ladder: Ladder | None, max_tokens: int, sampling: SamplingParams | None = None
) -> Side:
    """A `Side` that answers with the engine, greedily without `sampling`, as far as the context has room."""

    def run(ids: list[int]) -> TimedAnswer:
        room = engine.loaded.context_length - len(ids)
        start = time.perf_counter()
        handle = engine.submit(ids, ladder, policy=policy, sampling=sampling, max_tokens=min(max_tokens, room))
        *events, finished = handle.events()
        assert isinstance(finished, Finished)
        chunks = [event for event in events if isinstance(event, TokenChunk)]
        depth = finished.depth
        return TimedAnswer(
            tuple(token.token_id for chunk in chunks for token in chunk.tokens),
            finished.decode_s,
            time.perf_counter() - start,
            depth.num_layer_executions,
            depth.num_drafted,
            depth.num_accepted,
            depth.num_verify_passes,
            depth.num_relaxed,
        )

    return run


@contextmanager
def in_process(make: Callable[..., Callable[[Any], Any]], *arguments: object) -> Iterator[Callable[[Any], Any]]:
    """A function that calls, in a process of its own, what `make(*arguments)` has returned there.

    A process because two OpenMP pools in one slow each other down (docs/decisions/007).
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(make, arguments, theirs), daemon=True)
    process.start()

    def run(task: object) -> object:
        ours.send(task)
        return ours.recv()

    try:
        yield run
    finally:
        ours.send(None)
        process.join()


def _serve(make: Callable[..., Callable[[Any], Any]], arguments: tuple[object, ...], pipe: Connection) -> None:
    configure_logging("warning")  # to standard error: standard output is the parent's
    work = make(*arguments)
    while (task := pipe.recv()) is not None:
        pipe.send(work(task))
