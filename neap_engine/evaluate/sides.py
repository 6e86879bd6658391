"""Ways to answer prompts that are to be compared, and the processes that some of them run in."""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from shared.config import make_settings
from shared.configured_model import load_configured, load_options
from shared.cpus import usable_cpus
from shared.engine.engine import Engine
from shared.engine.request.request import Finished, TokenChunk
from shared.errors import InvalidInput, NeapError
from shared.ladder.artefact import unpack_ladder
from shared.ladder.blob_names import served_blobs
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import LoadedModel
from shared.model.sampling import SamplingParams
from shared.registry.base import PublishedVersion
from shared.registry.factory import open_registry
from shared.rpc.logs import configure_logging
from shared.service_settings import ModelSource
from shared.worker_settings import WorkerSettings


@dataclass(frozen=True)
class Subject:
    """A model as a worker would load it, and a published router for it.
    `source` and `load_options`: to load the model again."""

    source: str
    load_options: dict[str, Any]
    loaded: LoadedModel
    published: PublishedVersion
    ladder: Ladder


def run_process(measure: Callable[[], None]) -> int:
    """Runs `measure` and says its error. Returns the process' exit status: 0, 1 for a `NeapError`, 130 if it was
    interrupted."""
    configure_logging("warning")
    try:
        measure()
    except NeapError as error:
        say(error=error.message, reason=error.reason)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def load_subject(model: str, router: str) -> Subject:
    """`model`: ID=SOURCE; `router`: a version number or an alias.
    Everything else is a setting of the worker, read from the environment.

    Sets the number of threads. Raises `NeapError`.
    """
    settings = make_settings(WorkerSettings)
    try:
        source = ModelSource.parse(model)
    except ValueError as error:
        raise InvalidInput(str(error), reason="BAD_CONFIGURATION") from error
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), usable_cpus()))
    published, ladder = published_router(settings.registry, source.model_id, router)
    loaded = load_configured(source, settings)
    ladder.check_model(loaded)
    return Subject(source.source, load_options(settings), loaded, published, ladder)


def published_router(registry: str, model_id: str, router: str) -> tuple[PublishedVersion, Ladder]:
    """A router by version number or alias. Raises as `open_registry`, `Registry.get`, `Registry.resolve` and
    `unpack_ladder`."""
    with closing(open_registry(registry)) as opened:
        by_number = router.isdecimal()
        published = opened.get(model_id, int(router)) if by_number else opened.resolve(model_id, router)
        names = served_blobs(published.manifest["blobs"])
        blobs = {name: opened.read_blob(published, name) for name in names}
    return published, unpack_ladder(published.manifest, blobs)


def describe_machine(loaded: LoadedModel) -> str:
    """What speeds depend on: those of two machines must not be compared."""
    dtypes = [str(loaded.model.dtype)]
    if loaded.compute_dtype != loaded.model.dtype:
        dtypes.append(f"products in {loaded.compute_dtype}")
    if loaded.kv_dtype != loaded.model.dtype:
        dtypes.append(f"keys and values in {loaded.kv_dtype}")
    return f"{loaded.device.type}, {', '.join(dtypes)}, {torch.get_num_threads()} threads"


def say(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


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
            tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
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
