"""Checks of a request before any work is done for it."""

import time
from collections.abc import Callable
from itertools import chain

from shared.engine.memory.budget import round_up_to_blocks
from shared.engine.request.prompt import check_prediction, check_prompt_ids, check_token_ids
from shared.engine.request.request import DEFAULT_MAX_TOKENS, GenerationRequest
from shared.errors import DeadlineExceeded, Exhausted, InvalidInput
from shared.ladder.ladder import Ladder
from shared.model.loaded import LoadedModel

# A pass beside which nothing else happens may be so much faster than the fastest pass so far.
SHARE_OF_FASTEST = 0.5
# So often a request goes on whose deadline seems too short.
# A figure from a busy moment would otherwise refuse it for ever.
TRIAL_INTERVAL_S = 60.0


# Prompt tokens per step, so that a long prompt can be cancelled.
# Fewer, but at least the second number, the more streams wait for them.
MAX_PREFILL_TOKENS, MIN_PREFILL_TOKENS = 256, 64


def prefill_budget(num_reading: int, num_decoding: int) -> int:
    """Prompt tokens of a step: in proportion to the share of requests that wait for their first token.

    Streams that decode wait for prompts in the same step, and prompts for one another.
    """
    share = num_reading / max(1, num_reading + num_decoding)
    return MIN_PREFILL_TOKENS + round((MAX_PREFILL_TOKENS - MIN_PREFILL_TOKENS) * share)


class PrefillRate:
    """Learns from passes. The engine's thread records them, and any thread may ask."""

    def __init__(self) -> None:
        self._token_s = float("inf")
        self._tried_s: float | None = None

    def record(self, num_tokens: int, seconds: float) -> None:
        """A pass with so many tokens of prompts took so long.
        The fastest counts: a slow one may tell of a busy machine."""
        if num_tokens:
            self._token_s = min(self._token_s, seconds / num_tokens)

    def least_s(self, num_tokens: int) -> float:
        """A lower bound of the time to read so many tokens; 0 before a pass has been recorded."""
        if self._token_s == float("inf"):
            return 0.0
        return SHARE_OF_FASTEST * self._token_s * num_tokens

    def may_refuse(self, now_s: float) -> bool:
        """Whether a request may be refused whose time is below the bound. False once per TRIAL_INTERVAL_S: its passes
        are the next to be recorded."""
        if self._tried_s is not None and now_s - self._tried_s >= TRIAL_INTERVAL_S:
            self._tried_s = now_s
            return False
        self._tried_s = now_s if self._tried_s is None else self._tried_s
        return True


def max_answer_tokens(request: GenerationRequest, context_length: int) -> int:
    """The most tokens that the answer can have."""
    room = context_length - len(request.prompt_ids)
    max_tokens = request.stopping.max_tokens
    return min(DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens, room)


def max_num_tokens(request: GenerationRequest, context_length: int) -> int:
    """The most tokens that a request can grow to: its prompt and its longest possible answer."""
    return len(request.prompt_ids) + max_answer_tokens(request, context_length)


class Admission:
    """Checks a request against the model, its router, the memory and its deadline before it is queued.

    `kv_token_bytes`: bytes of the keys and values of one token, over all layers. `kv_budget_bytes` is shared by all
    running requests and is allocated in blocks of `block_tokens` tokens. `prefill_rate`: how fast prompts are read.
    `clock` returns the time in seconds with which deadlines are compared.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        kv_token_bytes: int,
        kv_budget_bytes: int,
        block_tokens: int = 1,
        *,
        prefill_rate: PrefillRate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._block_tokens = block_tokens
        self.kv_token_bytes = kv_token_bytes
        self.kv_budget_bytes = kv_budget_bytes
        self._prefill_rate = prefill_rate
        self._loaded = loaded

    @property
    def kv_budget_tokens(self) -> int:
        """Tokens whose keys and values fit into the budget."""
        return self.kv_budget_bytes // self.kv_token_bytes

    def num_kv_tokens(self, request: GenerationRequest) -> int:
        """Tokens for which the request reserves keys and values."""
        num_tokens = max_num_tokens(request, self._loaded.context_length)
        return round_up_to_blocks(num_tokens, self._block_tokens)

    def check(self, request: GenerationRequest, ladder: Ladder, num_known: Callable[[], int]) -> None:
        """`num_known` returns how many tokens of the prompt are cached; it is called only if the deadline is close.

        Raises `InvalidInput`, `PromptTooLong`, `PreconditionFailed` (reason ROUTER_REQUIRED), `RouterMismatch`,
        `DeadlineExceeded` and `Exhausted` (reason KV_BUDGET).
        """
        self._check_against_model(request, ladder)
        needed = self.num_kv_tokens(request) * self.kv_token_bytes
        if needed > self.kv_budget_bytes:
            raise Exhausted(
                f"keys and values of this request may take {needed} bytes; {self.kv_budget_bytes} are there for all",
                reason="KV_BUDGET",
                metadata={"needed": str(needed), "budget": str(self.kv_budget_bytes)},
            )
        now_s = self._clock()
        left_s = request.deadline_s - now_s
        if left_s <= 0:
            raise DeadlineExceeded("the deadline had passed before the request was queued")
        prefill_s = self._prefill_rate.least_s(len(request.given_ids))
        if left_s < prefill_s:
            prefill_s = self._prefill_rate.least_s(len(request.given_ids) - num_known())
        if left_s < prefill_s and self._prefill_rate.may_refuse(now_s):
            raise DeadlineExceeded(
                f"reading the prompt alone takes at least {prefill_s:.1f} s, longer than the deadline allows",
                reason="DEADLINE_TOO_SHORT",
            )

    def _check_resumed(self, request: GenerationRequest) -> None:
        most = max_answer_tokens(request, self._loaded.context_length)
        if len(request.resumed_ids) > most:
            raise InvalidInput(
                f"{len(request.resumed_ids)} tokens of the answer are there already; it may have {most}",
                reason="RESUMED_TOO_LONG",
            )
        check_token_ids(self._loaded, request.resumed_ids)

    def _check_sampling(self, request: GenerationRequest) -> None:
        sampling, size = request.sampling, self._loaded.vocabulary_size
        tokens_by_field = {
            "logit_bias": sampling.logit_bias,
            "bad_words": chain(*sampling.bad_words),
            "stop_token_ids": request.stopping.stop_token_ids,
        }
        for name, tokens in tokens_by_field.items():
            for token in tokens:
                if not 0 <= token < size:
                    raise InvalidInput(
                        f"{name} has token id {token}, which is outside the vocabulary of {size}",
                        reason="TOKEN_OUT_OF_RANGE",
                    )
        most = max_answer_tokens(request, self._loaded.context_length)
        if sampling.min_tokens > most:
            raise InvalidInput(f"min_tokens is {sampling.min_tokens}; the answer may have {most} tokens")
        ends = request.stopping.end_token_ids(self._loaded.eos_token_ids)
        num_ends = len(ends) if sampling.min_tokens else 0
        # Where nothing is allowed, the model could choose no token.
        if sampling.changes_scores and len(set(sampling.bad_words)) + num_ends >= size:
            raise InvalidInput(f"bad_words and min_tokens may forbid all {size} tokens of the vocabulary")

    def _check_against_model(self, request: GenerationRequest, ladder: Ladder) -> None:
        check_prompt_ids(self._loaded, request.prompt_ids)
        self._check_resumed(request)
        self._check_sampling(request)
        check_prediction(self._loaded, request.prediction_ids)
        max_tokens = request.stopping.max_tokens
        room = self._loaded.context_length - len(request.prompt_ids)
        if max_tokens is not None and max_tokens > room:
            raise InvalidInput(
                f"max_tokens is {max_tokens}, but the context leaves {room} after the prompt",
                reason="MAX_TOKENS_TOO_LARGE",
                metadata={"available": str(room)},
            )
        num_logprobs = max(request.logprobs or 0, request.prompt_logprobs or 0)
        if num_logprobs > self._loaded.vocabulary_size:
            raise InvalidInput(f"{num_logprobs} logprobs; the model has {self._loaded.vocabulary_size} tokens")
        if request.policy.min_layers > self._loaded.num_layers:
            raise InvalidInput(
                f"min_layers is {request.policy.min_layers}; the model has {self._loaded.num_layers} layers"
            )
        if request.policy.name != "full":
            ladder.check_model(self._loaded)
