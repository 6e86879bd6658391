"""neap's engine, at full depth and exact, with one copy of the weights."""

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench.peers.catalogue import ROUNDED
from bench.peers.engines.serving import Answer, EngineSettings, serve
from shared import ops
from shared.engine.engine import Engine
from shared.engine.request.handle import EngineEvent
from shared.engine.request.request import (
    Finished,
    GenerationRequest,
    StoppingParams,
    TokenChunk,
)
from shared.errors import NeapError, RouterMismatch
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.policy import DepthPolicy
from shared.model.load import load_model
from shared.model.loaded import LoadedModel

EXACT = "exact"
# Types of weights that a folder is loaded in. Any other format is that of a .gguf file and is left as the file has it.
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load(source: str, weights: str) -> LoadedModel:
    """The model as it serves with weights of this format. Raises as `load_model`."""
    dtype = DTYPES.get(ROUNDED.get(weights, weights))
    return load_model(source, dtype=dtype, compute_dtype=dtype if weights in ROUNDED else None)


class _Delivery:
    """The answer of one request. Called on the engine's thread with its events."""

    def __init__(self) -> None:
        self.answer = Answer([], [])
        self.error: NeapError | None = None
        self.ended = threading.Event()

    def __call__(self, event: EngineEvent) -> None:
        if isinstance(event, TokenChunk):
            for token in event.tokens:
                self.answer.token_ids.append(token.token_id)
            self.answer.times_s += [time.perf_counter()] * len(event.tokens)
            return
        if isinstance(event, NeapError):
            self.error = event
        if event is None or isinstance(event, NeapError | Finished):
            self.ended.set()


class Neap:
    def __init__(self, settings: EngineSettings) -> None:
        torch.set_num_threads(settings.num_threads)
        loaded = load(settings.source, settings.weights)
        self._engine = Engine(loaded, prefix_cache_bytes=0, max_running=settings.max_running)
        self._engine.warm_up()
        self._ladder: Ladder | None = None
        self._router = "none was given"
        if settings.router:
            self._take(read_ladder(Path(settings.router)), loaded)
        self.answer([[1] * 8], 2, "full")

    def stats(self) -> dict[str, str]:
        return {
            "torch": torch.__version__,
            "instruction set": ops.cpu_isa(),
            "router": self._router,
        }

    def answer(self, prompts: list[list[int]], max_tokens: int, mode: str) -> list[Answer]:
        policy = DepthPolicy("exact" if mode == EXACT else "full")
        deliveries = [_Delivery() for _ in prompts]
        submit = partial(self._engine.submit, ladder=self._ladder if mode == EXACT else None)
        for ids, delivery in zip(prompts, deliveries, strict=True):
            submit(
                GenerationRequest(
                    tuple(ids), stopping=StoppingParams(max_tokens=max_tokens), policy=policy
                ),
                on_event=delivery,
            )
        for delivery in deliveries:
            delivery.ended.wait()
            if delivery.error is not None:
                raise delivery.error
        return [delivery.answer for delivery in deliveries]

    def _take(self, ladder: Ladder, loaded: LoadedModel) -> None:
        """Serves with the ladder, also if it was taught with other weights: `exact` verifies its drafts with the model that is loaded."""
        identity = ModelIdentity.of(loaded)
        self._router = "taught with these weights"
        named = replace(ladder.model, model_id=identity.model_id)
        if named != identity and replace(named, fingerprint=identity.fingerprint) == identity:
            self._router = "taught with other weights of this model's shape"
            ladder = replace(ladder, model=identity)
        try:
            self._engine.prepare(ladder)
        except RouterMismatch as error:
            self._router = error.message
            return
        self._ladder = ladder
        self.answer([[1] * 8], 2, EXACT)


if __name__ == "__main__":
    serve(Neap)
