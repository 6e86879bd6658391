"""What the ranks after the first do: as they are told, over their parts of the model."""

from typing import Any

import structlog
import torch

from shared.model.cache import KVCache
from shared.model.inference import inference
from shared.model.loaded import LoadedModel
from shared.model.ragged import RaggedSequence
from shared.model.ranks.group import Ranks
from shared.model.ranks.leading import Note, run_part
from shared.model.runner import CapturedStates, Runner
from shared.model.runners import own_runner

log = structlog.get_logger("neap.model")


def follow(loaded: LoadedModel, ranks: Ranks) -> None:
    """Makes the runners that rank 0 makes, and runs their passes until rank 0 says that there are no more.

    Raises what a pass raises, and torch's `RuntimeError` once rank 0 has gone: this rank is out of step then, and its
    process is to end.
    """
    runner: Runner | None = None
    caches: dict[int, KVCache] = {}
    while (message := ranks.hear()) is not None:
        if "layers" in message:
            assert runner is not None
            _run(runner, caches, ranks, message)
        else:
            caches.clear()
            runner = own_runner(loaded, **message)
            log.info("following", rank=ranks.rank, runs=runner.description)


@inference
def _run(runner: Runner, caches: dict[int, KVCache], ranks: Ranks, message: dict[str, Any]) -> None:
    for note in message["notes"]:
        _apply(note, runner, caches)
    tokens, (first, last) = runner.ids(message["tokens"]), message["layers"]
    sequences = [
        RaggedSequence(caches[number], base, count, read_length)
        for number, base, count, read_length in message["sequences"]
    ]
    hidden = None
    if first:
        loaded = runner.loaded
        hidden = torch.empty(1, tokens.shape[1], loaded.hidden_size, dtype=loaded.model.dtype, device=loaded.device)
        ranks.send_states(hidden)
    captured: CapturedStates | None = {} if message["captures"] else None
    run_part(runner, tokens, sequences, first, last, hidden, captured, is_ragged=message["ragged"])


def _apply(note: Note, runner: Runner, caches: dict[int, KVCache]) -> None:
    """What has happened to caches since the last pass."""
    kind, number, *rest = note
    values: list[Any] = rest
    if kind == "new":
        caches[int(number)] = runner.new_cache(*values)
    elif kind == "drop":
        del caches[int(number)]
    elif kind == "origin":
        (caches[int(number)].origin,) = values
    else:
        caches[int(number)].copy(caches[values[0]], *values[1:])
