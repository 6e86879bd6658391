"""Writes text with an engine on a model in this process: many rows, prompts read in pieces beside them, shared prefixes
computed once. Chooses the writers of a calibration: the model itself, perhaps a faster copy of it in bfloat16, perhaps
others' machines."""

import math
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import structlog
import torch
from torch import Tensor

from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.spec import SelfGenerated
from calibrator_service.calibration.text.stream import TEXT_SHARE
from calibrator_service.calibration.text.writer import (
    NUCLEUS_CANDIDATES,
    Pace,
    Writer,
    WriteRequest,
    Written,
    WrittenAnswer,
)
from shared.engine.drafting.costs import CostMeter
from shared.engine.drafting.pass_costs import PassCosts
from shared.engine.engine import Engine
from shared.engine.memory.budget import available_bytes
from shared.engine.request.handle import EngineEvent, GenerationHandle
from shared.engine.request.request import GenerationRequest, StoppingParams, TokenChunk
from shared.errors import Cancelled, NeapError
from shared.ladder.exit_head import unit
from shared.ladder.policy import DepthPolicy
from shared.model.dtypes import multiplies_bfloat16
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.runner import Runner
from shared.model.sampling import SamplingParams

# How often a writer looks whether it is to stop.
POLL_S = 0.1
# Requests that wait in the engine, as a share of those that run, so that one enters in the step after another has
# ended.
WAITING_SHARE = 0.125
PREFIX_CACHE_BYTES = 256 << 20


class _NoDrafts(CostMeter):
    """Policy full drafts nothing, so nobody asks what a pass costs. Measuring takes seconds with a large model."""

    def measure_passes(self, runner: Runner, *, between: Callable[[], None] = lambda: None) -> PassCosts:
        return PassCosts((1.0,))


class EngineWriter:
    """A `Writer`. `rows`: answers that are written together. `is_own`: the model is the one that is calibrated, not a
    copy of it in another format.

    The engine is there from the first request until `close`. It claims its model: passes of other threads need `idle`.
    """

    def __init__(self, loaded: LoadedModel, rows: int, *, is_own: bool = True) -> None:
        self._loaded, self._rows, self._is_own = loaded, rows, is_own
        self._engine: Engine | None = None
        self._running: dict[int, _EngineAnswer] = {}
        self._ended: queue.SimpleQueue[_EngineAnswer] = queue.SimpleQueue()
        self._num_counted = 0

    def write(self, next_request: Callable[[], WriteRequest | None], pace: Pace) -> Iterator[Written]:
        """See `Writer`. Raises also what `Engine.submit` and the engine itself raise."""
        num_requests, is_late = 0, False
        most = self._rows + int(WAITING_SHARE * self._rows)
        try:
            while True:
                while not is_late and len(self._running) < most:
                    if (request := next_request()) is None:
                        break
                    self._submit(num_requests, request)
                    num_requests += 1
                if not self._running:
                    return
                if pace.should_stop():
                    raise Cancelled("stopped while the model wrote text")
                if not is_late and pace.is_late():
                    is_late = True
                    self._cancel()
                answer = self._next_ended()
                self._report(pace, answer)
                if answer is not None:
                    yield self._written(answer)
        finally:
            self._cancel()
            while self._running:
                self._next_ended()
            self._num_counted = 0

    @contextmanager
    def idle(self) -> Iterator[None]:
        for answer in self._running.values():
            answer.handle.pause()
        # A turn that begins from now on finds nothing that it may step.
        while self._engine is not None and self._engine.turn_began_s is not None:
            time.sleep(0.001)
        try:
            yield
        finally:
            for answer in self._running.values():
                answer.handle.resume()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _submit(self, index: int, request: WriteRequest) -> None:
        if self._engine is None:
            self._engine = Engine(
                self._loaded,
                max_running=self._rows,
                max_queue=2 * self._rows,
                max_queue_tokens=2 * self._rows * self._loaded.context_length,
                prefix_cache_bytes=PREFIX_CACHE_BYTES,
                cost_meter=_NoDrafts(),
                tries_promise=False,
            )
            self._engine.warm_up()
        answer = _EngineAnswer(index, request, self._ended)
        answer.handle = self._engine.submit(
            GenerationRequest(
                request.prompt,
                SamplingParams(
                    temperature=request.temperature,
                    top_k=NUCLEUS_CANDIDATES if request.temperature else 0,
                    top_p=request.top_p,
                    seed=request.seed,
                ),
                StoppingParams(request.max_new_tokens, stop_token_ids=request.stop_ids),
                DepthPolicy("full"),
            ),
            on_event=answer.receive,
            on_states=answer.see if request.shows_states and not request.temperature else None,
        )
        self._running[index] = answer

    def _cancel(self) -> None:
        for answer in self._running.values():
            answer.is_cancelled = True
            answer.handle.resume()
            answer.handle.cancel()

    def _next_ended(self) -> "_EngineAnswer | None":
        """The next answer that has ended. It no longer runs, whatever its caller raises."""
        with suppress(queue.Empty):
            return self._running.pop(self._ended.get(timeout=POLL_S).index)
        return None

    def _report(self, pace: Pace, ended: "_EngineAnswer | None") -> None:
        """Tells how many tokens are new. Tokens of answers that have ended leave the sum."""
        running = sum(len(answer.tokens) for answer in self._running.values())
        num_ended = len(ended.tokens) if ended else 0
        num_new = running + num_ended - self._num_counted
        self._num_counted = running
        pace.on_tokens(num_new)

    def _written(self, answer: "_EngineAnswer") -> Written:
        if answer.error is not None and not (answer.is_over or answer.is_cancelled):
            raise answer.error
        is_choice = self._is_own and answer.request.temperature == 0.0
        states = torch.cat(answer.states) if answer.states else None
        return Written(answer.index, tuple(answer.tokens), is_choice, states, answer.states_start)


class _EngineAnswer(WrittenAnswer):
    """An answer whose events the engine's thread delivers. Once it has ended it is put into `ended`."""

    handle: GenerationHandle

    def __init__(self, index: int, request: WriteRequest, ended: "queue.SimpleQueue[_EngineAnswer]") -> None:
        super().__init__(index, request)
        self._ended = ended
        self.is_cancelled = False
        self.error: NeapError | None = None
        # What `see` was shown, and the position of the first of it.
        self.states: list[Tensor] = []
        self.states_start = 0

    def see(self, position: int, states: Tensor) -> None:
        """Keeps the states of the answer and of the prompt's last two tokens.
        A token that was read anew replaces what came before."""
        if position < self.states_start + sum(map(len, self.states)):
            self.states = []
        skipped = max(len(self.request.prompt) - 2 - position, 0)
        if len(states) > skipped:
            if not self.states:
                self.states_start = position + skipped
            self.states.append(unit(states[skipped:]).half())

    def receive(self, event: EngineEvent) -> None:
        if event is None:
            self._ended.put(self)
        elif isinstance(event, NeapError):
            self.error = event
        elif isinstance(event, TokenChunk) and not self.is_over:
            self.add(event.token_ids)
            if self.is_over:
                self.handle.cancel()


# A copy writes nearly twice as fast, so it pays if loading it takes at most this share of the time to write, or,
# without a time budget, from this many tokens on.
COPY_LOAD_SHARE, MIN_COPY_TOKENS = 0.25, 20_000
# Free memory that a copy needs, in bytes per parameter: its weights, and as much again while they are packed.
COPY_PARAMETER_BYTES = 4

log = structlog.get_logger("neap.calibration")


def text_writer(run: CalibrationRun, fleet_of: Callable[[Writer], Writer] | None = None) -> Writer:
    """Who writes the text of the splits. To be closed. `fleet_of`: see `pipeline.calibrate`."""
    own = EngineWriter(run.loaded, run.plan.sizes.rows)
    if not isinstance(run.spec.source, SelfGenerated):
        return own
    if fleet_of is not None:
        return fleet_of(own)
    if not run.has_collected and all(run.ranks.everyones(pays_for_copy(run))):
        log.info("text is written with a copy of the model in bfloat16")
        return EngineWriter(bfloat16_copy(run.loaded), run.plan.sizes.rows, is_own=False)
    return own


def pays_for_copy(run: CalibrationRun) -> bool:
    """Whether writing with a copy of the model in bfloat16 is faster, even though it must be loaded first."""
    loaded = run.loaded
    if loaded.source is None or loaded.acceleration is None or not multiplies_bfloat16():
        return False
    if loaded.compute_dtype != loaded.model.dtype:
        return False
    num_parameters = loaded.model.num_parameters()
    if COPY_PARAMETER_BYTES * num_parameters > available_bytes(loaded.device):
        return False
    left_s = TEXT_SHARE * run.schedule.collecting * run.plan.budget_s - run.elapsed_s()
    if math.isinf(left_s):
        return run.plan.max_tokens >= MIN_COPY_TOKENS
    return loaded.load_s <= COPY_LOAD_SHARE * left_s


def bfloat16_copy(loaded: LoadedModel) -> LoadedModel:
    """The model loaded again, with weights, keys, values and products in bfloat16. Raises as `load_model`."""
    assert loaded.source is not None
    return load_model(
        loaded.source,
        model_id=loaded.model_id,
        dtype=torch.bfloat16,
        compute_dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        context_length=loaded.context_length,
    )
