"""The engine: the public interface to the thread that owns the model. Requests join and leave between its steps."""

import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Unpack

from shared.constraints.compiler import ConstraintCompiler
from shared.constraints.constraint import Constraint, MessageConstraint
from shared.engine.ahead.decoder import make_decoder
from shared.engine.background import Slices
from shared.engine.drafting.costs import CostMeter
from shared.engine.drafting.ladder_cache import LadderCache
from shared.engine.failure import failure_of
from shared.engine.lifetime import ModelClaim
from shared.engine.loop import EngineLoop
from shared.engine.memory.budget import (
    MAX_RUNNING,
    default_budget,
    default_ladder_bytes,
    default_max_running,
    kv_token_bytes,
)
from shared.engine.memory.prefixes import Prefixes, common_prefix
from shared.engine.request.admission import Admission
from shared.engine.request.answer import DecodedAnswer
from shared.engine.request.handle import AfterEvents, GenerationHandle, OnEvent, OnStates
from shared.engine.request.job import EngineJob
from shared.engine.request.options import RequestOptions, request_of
from shared.engine.request.prompt import Prompt
from shared.engine.request.request import Finished, GeneratedToken, Generation, GenerationRequest
from shared.engine.scheduler import Scheduler, SchedulerLimits
from shared.errors import InvalidInput, Unavailable
from shared.field_types import check_whole
from shared.ladder.ladder import Ladder
from shared.ladder.learned_ngrams import LearnedNgrams
from shared.ladder.proposers import LEARNED
from shared.ladder.untrained import untrained_ladder
from shared.model.loaded import LoadedModel
from shared.model.numerics import Numerics, Promise, promise_of
from shared.model.own_thread import run_in_own_thread
from shared.model.runner import Runner
from shared.model.runners import make_runner

# Default share of the KV budget that is kept for reuse by later requests with the same prefix.
PREFIX_SHARE = 0.25


class Engine:
    """Generates for one model. All methods are thread-safe.
    Requests are admitted in the order in which they were submitted.

    A request is admitted when the keys and values of its prompt and its longest possible answer fit into the KV budget.

    Args:
        loaded: the model. At most one engine may use it at a time: another one is refused (`PreconditionFailed`, reason
            MODEL_IN_USE) until this one is closed, or has ended after it was dropped.
        ladder: used for requests that are submitted without a ladder; by default prompt look-up alone.
        max_running: requests that share each step. Paused requests do not count; if more go on than this, they take
            turns. None: `default_max_running`.
        max_queue: requests that may wait. max_queue_tokens: prompt tokens that waiting requests may have together.
        ladder_bytes: memory of the ladders that are kept bound, beside the one that is being bound. Those of running
            requests are kept in any case. None: `default_ladder_bytes`.
        kv_budget_bytes: bytes of keys and values that all running requests share. None: half of the free memory.
        prefix_cache_bytes: the part of this budget that may hold the KV caches of ended requests for reuse by later
            requests with the same prefix, while running requests do not need it. None: a quarter. 0: no prefix is
            shared.
        learned_bytes: bytes of a table that learns from the answers of policy exact and drafts later ones, for each
            client (see `GenerationRequest`) apart. 0: nothing is learned.
        on_failure: called by the engine's thread if an error ends it. Later requests are refused with `Unavailable`
            (reason ENGINE_FAILED).
        runner_of: makes the runner of the model from the model and `kv_budget_bytes`. cost_meter: measures the costs of
            passes and exits. The planner drafts by them. clock: the time in seconds with which deadlines are compared.
            Tests pass one that they can move. tries_promise: whether what `exact` promises is tried at the start, which
            takes a few passes. Without it there are no `promise` and no `numerics`.

    `statistics` holds the engine's counts, and `ladders` the ladders that are bound to the model. Any thread may read
    their figures, ask which are bound, and say which is to be `kept`.

    `numerics` says whether `exact` promises the tokens of `full` for this model here, and names the bits that it gives.
    The log says the first when the engine starts.

    An engine that is dropped without `close` stops once its last request has ended and no handle refers to it. All
    engines stop when the interpreter exits; requests that still run then end with `Unavailable`. A forked child cannot
    use its parent's engines.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ladder: Ladder | None = None,
        *,
        max_running: int | None = None,
        max_queue: int = 64,
        max_queue_tokens: int = 1 << 18,
        ladder_bytes: int | None = None,
        kv_budget_bytes: int | None = None,
        prefix_cache_bytes: int | None = None,
        learned_bytes: int = 0,
        on_failure: Callable[[], object] = lambda: None,
        runner_of: Callable[[LoadedModel, int], Runner] = make_runner,
        cost_meter: CostMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
        tries_promise: bool = True,
    ) -> None:
        if not isinstance(loaded, LoadedModel):
            raise InvalidInput(f"the model is a {type(loaded).__name__}; it must be one that was loaded or wrapped")
        for name, number, least in (
            ("max_running", MAX_RUNNING if max_running is None else max_running, 1),
            ("max_queue", max_queue, 1),
            ("max_queue_tokens", max_queue_tokens, 1),
            ("ladder_bytes", 1 if ladder_bytes is None else ladder_bytes, 1),
            ("kv_budget_bytes", kv_budget_bytes or 0, 0),
            ("prefix_cache_bytes", prefix_cache_bytes or 0, 0),
            ("learned_bytes", learned_bytes, 0),
        ):
            check_whole(name, number, least)
        if ladder is not None:
            ladder.check_model(loaded)
        self.loaded = loaded
        self._ladder = ladder or untrained_ladder(loaded)
        self._constraints = ConstraintCompiler(loaded)
        self._cost_meter = cost_meter = cost_meter or CostMeter()
        claim = ModelClaim(loaded.model)
        with ExitStack() as failing:
            failing.callback(claim.release)
            if kv_budget_bytes is None:
                kv_budget_bytes = default_budget(loaded.device)
            runner = run_in_own_thread(runner_of, loaded, kv_budget_bytes)
            self._promise = run_in_own_thread(promise_of, runner) if tries_promise else None
            if self._promise is not None:
                self._promise.tell(loaded)
            kv_budget_bytes = runner.usable_bytes(kv_budget_bytes)
            if prefix_cache_bytes is None:
                prefix_cache_bytes = int(PREFIX_SHARE * kv_budget_bytes)
            token_bytes = run_in_own_thread(kv_token_bytes, runner)
            learned = LearnedNgrams(learned_bytes) if learned_bytes else None
            prefixes = Prefixes(prefix_cache_bytes // token_bytes, runner.regimes)
            self._decoder = run_in_own_thread(make_decoder, runner, prefixes, learned)
            self._admission = Admission(
                loaded,
                token_bytes,
                kv_budget_bytes,
                runner.block_tokens,
                prefill_rate=self._decoder.prefill_rate,
                clock=clock,
            )
            kv_tokens = self._admission.kv_budget_tokens
            if max_running is None:
                max_running = default_max_running(loaded.device, kv_tokens)
            self.statistics = self._decoder.statistics
            if ladder_bytes is None:
                ladder_bytes = default_ladder_bytes(loaded.device, kv_budget_bytes)
            self.ladders = LadderCache(runner, ladder_bytes, cost_meter)
            self._loop = EngineLoop(
                self._decoder,
                self.ladders,
                Scheduler(SchedulerLimits(max_running, max_queue, max_queue_tokens, kv_tokens)),
                ladder=self._ladder,
                claim=claim,
                on_failure=on_failure,
                cost_meter=cost_meter,
                clock=clock,
            )
            failing.pop_all()
        weakref.finalize(self, self._loop.request_stop).atexit = False

    @property
    def promise(self) -> Promise:
        """What was tried at the start."""
        assert self._promise is not None, "this engine has not tried what exact promises"
        return self._promise

    @property
    def numerics(self) -> Numerics:
        """What was tried at the start, with its name. Blocks until the model's fingerprint is known."""
        return self.promise.of_model(self.loaded)

    @property
    def known_numerics_id(self) -> str:
        """The name of the bits, once the model's fingerprint is known, and "" until then."""
        return self.numerics.id if self.loaded.identity.is_known else ""

    @property
    def runner(self) -> Runner:
        """What runs the model's layers. Only the engine's thread may run passes; any thread may read the runner's
        figures."""
        return self._decoder.runner

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the keys and values of one token, over all layers."""
        return self._admission.kv_token_bytes

    @property
    def kv_budget_bytes(self) -> int:
        """Bytes of keys and values that all running requests share."""
        return self._admission.kv_budget_bytes

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the KV budget that are taken by caches of ended requests, which are kept for reuse."""
        return self._decoder.prefixes.num_tokens

    @property
    def num_learned_contexts(self) -> int:
        """Contexts in the table that learns from answers. 0 without one."""
        return self._decoder.learned.num_entries if self._decoder.learned else 0

    def proposer_names(self, ladder: Ladder | None = None) -> tuple[str, ...]:
        """What drafts for every request of the policy exact that has `ladder`, or none."""
        learned = (LEARNED,) if self._decoder.learned is not None else ()
        return (*(ladder or self._ladder).proposer_names, *learned)

    @property
    def max_running(self) -> int:
        """Requests that share a step."""
        return self._loop.scheduler.limits.max_running

    @property
    def num_waiting(self) -> int:
        return self._loop.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self._loop.scheduler.num_running

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the KV budget that running requests have reserved, in [0, 1]."""
        with self._loop.lock:
            return self._loop.scheduler.num_kv_tokens / max(self._admission.kv_budget_tokens, 1)

    @property
    def turn_began_s(self) -> float | None:
        """When the engine's thread began what it does now (`time.monotonic`): a step, or a slice of other work.
        None while it waits."""
        return self._loop.turn_began_s

    @property
    def thread_id(self) -> int | None:
        """The engine's thread, as `threading.get_ident` names it."""
        return self._loop.thread_id

    def warm_up(self, *, constraints: bool = True) -> None:
        """Waits until the costs of passes are known or estimated, the engine's own ladder is bound, and, with
        `constraints`, answers can be constrained. Otherwise the first request waits for that.

        Raises the error for which the ladder could not be bound, and `Unavailable` if the engine has ended.
        """
        if constraints:
            self._constraints.warm_up()
        self._wait_until_ready()
        if self._loop.ladder_failure is not None:
            raise failure_of(self._loop.ladder_failure)

    def compile(self, constraint: Constraint | MessageConstraint) -> None:
        """Compiles a constraint, so that the request that has it need not wait for that. Blocks until it is done.

        Raises `InvalidInput` (reasons CONSTRAINT_INVALID, CONSTRAINT_TOO_COMPLEX, NO_TOKENIZER,
        CONSTRAINTS_NOT_SUPPORTED), and `Unavailable` (reason CONSTRAINTS_NOT_COMPILED).
        """
        self._constraints.compiled(constraint)

    def has_compiled(self, constraint: Constraint | MessageConstraint) -> bool:
        """Whether `compile` returns, or raises, at once."""
        return self._constraints.has(constraint)

    def _wait_until_ready(self) -> None:
        self._loop.is_ready.wait()
        if self._loop.costs is None:
            raise failure_of(self._loop.why_closed())

    def prepare(self, ladder: Ladder) -> None:
        """Binds and tests a ladder between the steps of running requests, so that the ladder's first request need not
        wait for that.

        Blocks until it is done. Raises `RouterMismatch`, `Corrupt` (reason SELF_TEST_FAILED), `PreconditionFailed`
        (reason ROUTER_OVER_MEMORY), `Unavailable` once closed.
        """
        ladder.check_model(self.loaded)
        self._wait_until_ready()
        assert self._loop.costs is not None
        self._run_between_steps(self.ladders.prepare(ladder, self._loop.costs))

    def measure_costs(self) -> None:
        """Measures the costs of passes between the steps of running requests, if the engine has begun with an estimate
        or with old ones. Later requests are planned by what is found. Answers do not depend on it.

        Blocks until it is done. Raises `Unavailable` once closed.
        """
        self._wait_until_ready()
        timings = self._cost_meter.measure_better(self.runner)
        if timings is not None:
            self._run_between_steps(self._loop.plan_by(timings))

    def _run_between_steps(self, slices: Slices) -> None:
        with self._loop.lock:
            if self._loop.is_closed:
                raise failure_of(self._loop.why_closed())
            done = self._loop.background.add(slices)
        self._loop.wake()
        done.result()

    def submit(
        self,
        prompt: Prompt | GenerationRequest,
        ladder: Ladder | None = None,
        *,
        on_event: OnEvent | None = None,
        on_states: OnStates | None = None,
        after_events: AfterEvents | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationHandle:
        """Checks a request and queues it. `prompt` and `options` as in `generate`, or a whole request, whose options it
        has itself.

        `on_event` receives its events on the engine's thread; without it they come through the handle. `after_events`
        is called there after those of each step, once for all requests that have the same. `on_states` receives the
        states of its tokens there. Blocks while a new constraint is compiled. Raises `InvalidInput`,
        `PromptTooLong`, `RouterMismatch`, `DeadlineExceeded`,
        `Exhausted` (reasons QUEUE_FULL and KV_BUDGET) and `Unavailable` once closed.
        """
        if not isinstance(prompt, GenerationRequest):
            request = request_of(self.loaded, prompt, options)
        elif options:
            raise InvalidInput(f"{', '.join(options)}: a GenerationRequest has its options itself")
        else:
            request = prompt
        ladder = ladder or self._ladder
        scores = request.prompt_logprobs is not None  # which takes passes of its own
        self._admission.check(request, ladder, lambda: 0 if scores else self._num_cached(request))
        constraint = None
        if request.constraint is not None:
            constraint = self._constraints.start(request.constraint)
        # These and the answer are made here, not on the engine's thread.
        _ = request.given_key, request.scope_key, request.predicted
        job = EngineJob(
            request,
            None if request.policy.name == "full" else ladder,
            self._admission.num_kv_tokens(request),
            DecodedAnswer(request, self.loaded, constraint),
            self._wake,
            on_event,
            on_states,
            after_events,
        )
        with self._loop.lock:
            if self._loop.is_closed:
                raise failure_of(self._loop.why_closed())
            self._loop.scheduler.add(job)
        self._loop.wake()
        return job

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Generation:
        """Generates in one call. `prompt` is text, token ids or chat messages.

        Options: `policy` ("exact", "full" or a `DepthPolicy`), `sampling` (`SamplingParams`; without it, answers are
        greedy), `logprobs` (alternatives for each token), `prompt_logprobs` (the same for the prompt), `constraint` (a
        `Constraint`), and those of `StoppingParams`: `max_tokens`, `stop_strings`, `stop_token_ids`, `ignore_eos`.
        Raises as `submit`, and the error that ends the request.
        """
        text = ""
        tokens: list[GeneratedToken] = []
        scored: list[GeneratedToken] = []
        for event in self.submit(prompt, **options).events():
            text += event.text
            if isinstance(event, Finished):
                return Generation(text, tuple(tokens), event, tuple(scored))
            tokens += event.tokens
            scored += event.prompt
        raise Unavailable("the generation ended without a result")

    def close(self) -> None:
        """Stops after the current step. Queued and running requests end with `Unavailable`. Idempotent."""
        self._loop.request_stop()
        self._loop.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _num_cached(self, request: GenerationRequest) -> int:
        """Tokens of the longest prefix of its prompt that is cached, or will be once earlier requests have been
        prefilled."""
        prefixes = self._decoder.prefixes
        if not prefixes.is_enabled:
            return 0
        with self._loop.lock:
            jobs = list(self._loop.scheduler)
        prompt, scope = request.given_key, request.scope_key
        others = [common_prefix(prompt, job.request.given_key) for job in jobs if job.request.scope_key == scope]
        return max(prefixes.match_length(prompt, scope), *others, 0)

    def _wake(self) -> None:
        """Handles refer to this method, so an engine lives at least as long as they do."""
        self._loop.wake()
