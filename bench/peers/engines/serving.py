"""The engine's side of `bench.peers`: runs one engine in its own process, which reads calls from stdin and writes
replies to stdout.

Calls and replies are JSON, one per line. The process ends when stdin is closed.

    {"load": {fields of EngineSettings}}                                  -> {}
    {"prompts": [[token ids]], "max_tokens": 64, "mode": ""} -> {"answers": [{"token_ids": [...], "times_s": [...]}]}
    any call that raises                                                  -> {"error": "its type and message"}

The modules of this package run in the engines' own environments, so they import the standard library and their engine
only. neap's own worker and Hugging Face's run in neap's environment.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class EngineSettings:
    """`weights`: the format of the weights in `source`, a file or folder. `max_running`: requests at once.
    `context_tokens`: the longest prompt and its answer together. `end_ids`: token ids that end an answer. `router`:
    folder of a packed ladder, for neap alone. `modes`: those that will be asked for. `reuses`: whether the keys and
    values of a prompt's beginning are those of the prompt before."""

    source: str
    weights: str
    num_threads: int
    max_running: int
    context_tokens: int
    end_ids: tuple[int, ...]
    router: str = ""
    modes: tuple[str, ...] = ("",)
    reuses: bool = False


@dataclass
class Answer:
    """The tokens of one request, the end-of-sequence token included if the engine returns it, and when each became
    known: `time.perf_counter()` seconds within the engine's process, seconds since the call in its reply."""

    token_ids: list[int]
    times_s: list[float]

    def add(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.times_s.append(time.perf_counter())


class PeerEngine(Protocol):
    def answer(self, prompts: list[list[int]], max_tokens: int, mode: str) -> list[Answer]:
        """Answers all prompts at once, greedily. Answers end at `end_ids` or `max_tokens`."""
        ...


def serve(load: Callable[[EngineSettings], PeerEngine]) -> None:
    """Serves calls until stdin is closed. `load` makes the engine, warmed up."""
    _die_with_parent()
    replies = _reserve_stdout()
    engine: PeerEngine | None = None
    for line in sys.stdin:
        try:
            call = json.loads(line)
            if "load" in call:
                engine = load(EngineSettings(**call["load"]))
                reply: dict[str, Any] = {}
            elif engine is None:
                raise RuntimeError("no engine is loaded")
            else:
                reply = {"answers": _answers(engine, call)}
        except Exception as error:  # an engine may raise anything; the benchmark goes on without it
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _answers(engine: PeerEngine, call: dict[str, Any]) -> list[dict[str, Any]]:
    start_s = time.perf_counter()
    answers = engine.answer(call["prompts"], call["max_tokens"], call["mode"])
    return [{"token_ids": a.token_ids, "times_s": [round(at - start_s, 7) for at in a.times_s]} for a in answers]


def _reserve_stdout() -> TextIO:
    """Returns the process's stdout for replies. Everything else that is printed, by native code too, goes to stderr,
    which is the log."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own


def _die_with_parent() -> None:
    """The process may be stopped when its parent is killed, and would then never see that stdin is closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
