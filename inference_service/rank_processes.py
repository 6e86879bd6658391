"""The ranks of a worker whose model is shared out: how they start, meet, and end together.

torchrun starts all ranks, on one machine or on several, and each finds its place in the environment. Without torchrun
the worker itself is rank 0 and starts the others beside it.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from inference_service.engine_watch import EXIT_STATUS
from shared.configured_model import load_configured
from shared.errors import InvalidInput, Unavailable, UnsupportedModel
from shared.model.loaded import LoadedModel
from shared.model.ranks.following import follow
from shared.model.ranks.group import Ranks, first_store, join_ranks
from shared.service_settings import ModelSource
from shared.worker_settings import WorkerSettings

log = structlog.get_logger("neap.worker")

# What they have to end in, once they are told or have lost rank 0.
ENDING_S = 10.0


def rank_of_this_process() -> int:
    return int(os.environ.get("RANK", "0"))


def check_settings(settings: WorkerSettings) -> None:
    """Raises `InvalidInput` (reason BAD_CONFIGURATION) for what ranks cannot share."""
    if settings.tensor_parallel > 1 and len(settings.models) > 1:
        raise InvalidInput("--tensor-parallel needs exactly one --model", reason="BAD_CONFIGURATION")
    if settings.tensor_parallel == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidInput(
            f"the launcher has started {os.environ['WORLD_SIZE']} ranks: give --tensor-parallel as many",
            reason="BAD_CONFIGURATION",
        )


class RankProcesses:
    """The other ranks, seen from rank 0. Starts them unless torchrun has.

    `on_lost`: called by a thread if one of them ends before it is told to. `is_lost`: whether one has.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self.on_lost: Callable[[], object] = lambda: None
        self._is_ending = self.is_lost = False
        self._store: Any = None
        self._ranks: Ranks | None = None
        self._others: list[subprocess.Popen[bytes]] = []
        if "RANK" not in os.environ:
            self._start(settings.tensor_parallel)
        _take_card()

    def _start(self, size: int) -> None:
        self._store = first_store(size)
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        for rank in range(1, size):
            place = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, *sys.orig_argv[1:]]
            # Its stdin ends with this process, however that ends.
            other = subprocess.Popen(command, env=os.environ | place, stdin=subprocess.PIPE, stdout=sys.stderr.fileno())
            self._others.append(other)
            threading.Thread(target=self._watch, args=(rank, other), name=f"neap-rank-{rank}", daemon=True).start()
        os.environ.update(shared | {"RANK": "0", "LOCAL_RANK": "0"})

    def _watch(self, rank: int, other: "subprocess.Popen[bytes]") -> None:
        status = other.wait()
        if not self._is_ending:
            self.is_lost = True
            log.critical("a rank has ended, so the worker ends", rank=rank, exit_status=status)
            self.on_lost()

    def load(self, source: ModelSource) -> LoadedModel:
        """Waits for the others, and loads this rank's part of the model. Raises as `join_ranks` and `load_model`, and
        `Unavailable` (reason RANK_LOST) if one of them ends meanwhile."""
        try:
            self._ranks = _join(self._settings, self._store)
            return load_configured(source, self._settings, self._ranks)
        except Exception as error:
            # A connection that broke, alone or as what kept transformers from reading. What all ranks refuse has a
            # reason of its own.
            broke = error.__cause__ if isinstance(error, UnsupportedModel) else error
            if not isinstance(broke, RuntimeError) or getattr(error, "reason", "") not in ("", "UNSUPPORTED_MODEL"):
                raise
            raise Unavailable(
                "a rank has failed while the model was loaded, and the logs of all ranks say why", reason="RANK_LOST"
            ) from error

    def end(self) -> None:
        """Tells the others to end, and waits for that; those that do not are killed."""
        self._is_ending = True
        if self._ranks is not None and not self.is_lost:
            with suppress(RuntimeError):  # one has just gone
                self._ranks.tell(None)
        for other in self._others:
            assert other.stdin is not None
            other.stdin.close()
            try:
                other.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()


def follow_worker(settings: WorkerSettings) -> int:
    """What a rank after the first does instead of serving. Returns its exit status.

    Signals that end a worker reach all its processes; this one goes on until rank 0 has drained. Raises as `join_ranks`
    and `load_model`.
    """
    rank = rank_of_this_process()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        ranks = _join(settings, None)
        follow(load_configured(settings.models[0], settings, ranks), ranks)
    except RuntimeError as error:
        log.critical("a rank ends: the others have gone, or its pass has failed", rank=rank, exc_info=error)
        return EXIT_STATUS
    log.info("a rank ends as it was told", rank=rank)
    return 0


def ignore_signals() -> None:
    """For ranks after the first, before they take a card."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _take_card()


def _join(settings: WorkerSettings, store: Any) -> Ranks:
    return join_ranks(
        settings.tensor_parallel,
        device=settings.device,
        timeout_s=settings.rank_timeout_s,
        pass_timeout_s=settings.hang_timeout_s,
        store=store,
    )


def _take_card() -> None:
    """Makes the card of this rank the only one that this process sees, before CUDA is initialised: so every thread's
    kernels run on it."""
    number = int(os.environ["LOCAL_RANK"])
    visible = [card for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[number] if number < len(visible) else str(number)
    os.environ["LOCAL_RANK"] = "0"


def _end_with_parent() -> None:
    while os.read(0, 1):  # not by sys.stdin, whose lock a daemon thread would hold at exit
        pass
    threading.Event().wait(ENDING_S / 2)  # rank 0 may have told it to end
    os._exit(EXIT_STATUS)
