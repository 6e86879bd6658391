"""The engine: what callers see of the thread that owns the model. Requests join and leave between its steps."""

import weakref
from collections.abc import Callable
from typing import Any

from inference_service.engine.drafting.ladder_cache import MAX_BOUND_LADDERS, LadderCache
from inference_service.engine.failure import failure_of
from inference_service.engine.loop import EngineLoop
from inference_service.engine.memory.budget import default_budget, kv_token_bytes
from inference_service.engine.memory.prefixes import Prefixes, common_prefix
from inference_service.engine.quality.shadow import Shadow
from inference_service.engine.request.admission import Admission
from inference_service.engine.request.handle import GenerationHandle, OnEvent
from inference_service.engine.request.job import Job
from inference_service.engine.request.prompt import Prompt, encode_prompt
from inference_service.engine.request.request import (
    Finished,
    GeneratedToken,
    Generation,
    GenerationRequest,
    StoppingParams,
)
from inference_service.engine.scheduler import Scheduler, SchedulerLimits
from inference_service.engine.step import Decoder
from shared.errors import Unavailable
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.load import LoadedModel
from shared.model.own_thread import in_own_thread
from shared.model.runner import Runner
from shared.model.runners import make_runner
from shared.model.sampling import SamplingParams

# Unless told otherwise, requests that are stepped together, each with its own KV cache; more wait.
MAX_RUNNING = 16
# Of the budget for keys and values, what ended requests may keep for later ones that start alike.
PREFIX_SHARE = 0.25


class Engine:
    """Generates for one model. All methods are thread-safe; up to `max_running` requests share each step, taken in the order they came.

    `ladder` is used for requests that bring none of their own. `kv_budget_bytes` bounds the keys and values of all running
    requests together; None: half of what is free. A request takes its share, its prompt and its longest answer, before it
    starts, and waits until there is room. `prefix_cache_bytes` of that budget, None: a quarter, keep what ended requests
    have computed for others that start alike, as long as nobody needs the room; 0: nothing is shared. `max_queue` bounds the
    requests that wait, `max_queue_tokens` their prompts. `max_ladders` are kept bound beside those that running requests use.
    `shadow_share` of the answers by policy relaxed are checked in idle time: see `Shadow`. `on_failure` is called by the engine's
    thread should it ever end by itself; every later request is refused with `Unavailable` (reason ENGINE_FAILED). `runner_of` makes
    what runs the model, given its bytes for keys and values.

    An engine that is dropped ends like one that is closed, once its last request has ended and no handle of one is left. All
    end when the interpreter exits: what still runs then ends with `Unavailable`. A forked child cannot use its parent's engines.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ladder: Ladder | None = None,
        *,
        max_running: int = MAX_RUNNING,
        max_queue: int = 64,
        max_queue_tokens: int = 1 << 18,
        max_ladders: int = MAX_BOUND_LADDERS,
        kv_budget_bytes: int | None = None,
        prefix_cache_bytes: int | None = None,
        shadow_share: float = 0.0,
        on_failure: Callable[[], object] = lambda: None,
        runner_of: Callable[[LoadedModel, int], Runner] = make_runner,
    ) -> None:
        if ladder is not None:
            ladder.check_model(loaded)
        self.loaded = loaded
        self._ladder = ladder
        if kv_budget_bytes is None:
            kv_budget_bytes = default_budget(loaded.device)
        runner = in_own_thread(runner_of, loaded, kv_budget_bytes)
        kv_budget_bytes = runner.usable_bytes(kv_budget_bytes)
        if prefix_cache_bytes is None:
            prefix_cache_bytes = int(PREFIX_SHARE * kv_budget_bytes)
        token_bytes = in_own_thread(kv_token_bytes, runner)
        self._admission = Admission(loaded, token_bytes, kv_budget_bytes, runner.block_tokens)
        self._decoder = Decoder(runner, Prefixes(prefix_cache_bytes // token_bytes))
        self.statistics = self._decoder.statistics
        self.shadow = Shadow(runner, self._decoder.prefixes, share=shadow_share)
        self._ladders = LadderCache(runner, max_ladders)
        self._loop = EngineLoop(
            self._decoder,
            self.shadow,
            self._admission,
            self._ladders,
            Scheduler(
                SchedulerLimits(
                    max_running, max_queue, max_queue_tokens, self._admission.kv_budget_tokens
                )
            ),
            ladder=ladder,
            on_failure=on_failure,
        )
        weakref.finalize(self, self._loop.request_stop).atexit = False

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

    def warm_up(self) -> None:
        """Returns once the passes' costs are measured; the first request would otherwise wait for that.

        Raises what kept the engine's own ladder from being bound, and `Unavailable` where the engine has ended before.
        """
        self._wait_until_ready()
        if self._loop.ladder_failure is not None:
            raise failure_of(self._loop.ladder_failure)

    def _wait_until_ready(self) -> None:
        self._loop.is_ready.wait()
        if self._loop.costs is None:
            raise failure_of(self._loop.why_closed())

    def prepare(self, ladder: Ladder) -> None:
        """Binds and tests a ladder beside those in use, between the steps of what runs; then its first request need not wait.

        Blocks until that is done. Raises `RouterMismatch`, `Corrupt` (reason SELF_TEST_FAILED), `Unavailable` once closed.
        """
        ladder.check_model(self.loaded)
        self._wait_until_ready()
        assert self._loop.costs is not None
        with self._loop.lock:
            if self._loop.is_closed:
                raise failure_of(self._loop.why_closed())
            done = self._loop.background.add(self._ladders.prepare(ladder, self._loop.costs))
        self._loop.wake()
        done.result()

    def submit(
        self,
        request: GenerationRequest,
        ladder: Ladder | None = None,
        *,
        on_event: OnEvent | None = None,
    ) -> GenerationHandle:
        """Queues a request after checking it against the model.

        Raises `InvalidInput`, `PromptTooLong`, `PreconditionFailed` (reason ROUTER_REQUIRED), `RouterMismatch`,
        `DeadlineExceeded`, `Exhausted` (reasons QUEUE_FULL and KV_BUDGET) and `Unavailable` once closed.
        """
        ladder = ladder or self._ladder
        self._admission.check(request, ladder, lambda: self._num_cached(request.prompt_ids))
        handle = GenerationHandle(request, self._wake, on_event)
        job = Job(
            handle,
            None if request.policy.name == "full" else ladder,
            self._admission.num_kv_tokens(request),
        )
        with self._loop.lock:
            if self._loop.is_closed:
                raise failure_of(self._loop.why_closed())
            self._loop.scheduler.add(job)
        self._loop.wake()
        return handle

    def generate(
        self,
        prompt: Prompt,
        *,
        policy: DepthPolicy | str = "exact",
        sampling: SamplingParams | None = None,
        logprobs: int | None = None,
        **stopping: Any,
    ) -> Generation:
        """Generates in one call. `prompt` is text, token ids or chat messages; `stopping` as in `StoppingParams`."""
        request = GenerationRequest(
            prompt_ids=encode_prompt(self.loaded, prompt),
            sampling=sampling or SamplingParams(),
            stopping=StoppingParams(**stopping),
            policy=DepthPolicy(policy) if isinstance(policy, str) else policy,  # type: ignore[arg-type]
            logprobs=logprobs,
        )
        text = ""
        tokens: list[GeneratedToken] = []
        for event in self.submit(request).events():
            text += event.text
            if isinstance(event, Finished):
                return Generation(text, tuple(tokens), event)
            tokens += event.tokens
        raise Unavailable("the generation ended without a result")

    def close(self) -> None:
        """Stops after the current step; what is queued or running ends with `Unavailable`. Idempotent."""
        self._loop.request_stop()
        self._loop.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _num_cached(self, prompt: tuple[int, ...]) -> int:
        """Tokens of the longest prefix of `prompt` that is cached, or will be once earlier requests have been prefilled."""
        prefixes = self._decoder.prefixes
        if not prefixes.is_enabled:
            return 0
        with self._loop.lock:
            jobs = list(self._loop.scheduler)
        others = [common_prefix(prompt, job.handle.request.prompt_ids) for job in jobs]
        return max(prefixes.match_length(prompt), *others, 0)

    def _wake(self) -> None:
        """Handles hold this method, so an engine lives as long as they do."""
        self._loop.wake()
