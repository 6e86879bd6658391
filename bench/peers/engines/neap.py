"""neap's engine, at full depth and exact, with one copy of the weights."""

from dataclasses import replace
from pathlib import Path

import torch

from bench.answers import answer_all
from bench.peers.catalogue import ROUNDED
from bench.peers.engines.serving import Answer, EngineSettings, serve
from shared.engine.engine import Engine
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


def adopted(router: Path, loaded: LoadedModel) -> Ladder:
    """A ladder, also if it was taught with other weights: `exact` verifies its drafts with the model that is loaded."""
    return replace(read_ladder(router), model=ModelIdentity.of(loaded))


class Neap:
    def __init__(self, settings: EngineSettings) -> None:
        torch.set_num_threads(settings.num_threads)
        loaded = load(settings.source, settings.weights)
        # Without a number, a share of the machine's memory.
        cache_bytes = None if settings.reuses else 0
        self._engine = Engine(loaded, prefix_cache_bytes=cache_bytes, max_running=settings.max_running)
        self._engine.warm_up()
        self._ladder = adopted(Path(settings.router), loaded) if settings.router else None
        for mode in ("full", EXACT):
            self.answer([[1] * 8], 2, mode)

    def answer(self, prompts: list[list[int]], max_tokens: int, mode: str) -> list[Answer]:
        is_exact = mode == EXACT
        policy = DepthPolicy("exact" if is_exact else "full")
        ladder = self._ladder if is_exact else None
        return [*answer_all(self._engine, prompts, policy, ladder, max_tokens=max_tokens)]


if __name__ == "__main__":
    serve(Neap)
