"""The engine's requests and results. Independent of gRPC."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from shared.constraints.constraint import Constraint, MessageConstraint
from shared.engine.memory.prefixes import key_of, scope_key_of
from shared.engine.request.logprobs import Logprobs
from shared.errors import InvalidInput
from shared.field_types import check_limits, check_types
from shared.ladder.policy import DepthPolicy
from shared.ladder.prediction import PredictedText
from shared.model.sampling import SamplingParams

MAX_STOP_STRING_BYTES = 256
DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True)
class StoppingParams:
    """When a generation ends. `max_tokens` None: DEFAULT_MAX_TOKENS, or the room that the context leaves if that is
    less; 0: nothing is generated, for the log-probabilities of a prompt alone."""

    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_limits(self, "Stopping")
        for stop in self.stop_strings:
            # "replace": a lone surrogate has no bytes of its own.
            if not 0 < len(stop.encode(errors="replace")) <= MAX_STOP_STRING_BYTES:
                raise InvalidInput(f"a stop string must have 1 to {MAX_STOP_STRING_BYTES} bytes of UTF-8")

    def end_token_ids(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """The tokens that end an answer of a model with these end-of-sequence tokens."""
        return self.stop_token_ids.union(() if self.ignore_eos else eos_token_ids)


@dataclass(frozen=True)
class GenerationRequest:
    """One continuation to generate. `deadline_s` is in `time.monotonic()` seconds. `client`: who asks, `on_behalf_of`
    whom, if others are behind it: these take turns with one another as clients do. A table that learns from answers
    drafts for the same two only.

    Statistics count it under `router_version` (0: no router), which `router_alias` named (empty: no alias did).
    `priority`: requests with lower numbers come first.

    `resumed_ids`: tokens of the answer that the caller has already, from here or from another worker. They are read as
    the prompt is, and the answer goes on after them as if it had never been interrupted. `constraint`: what the answer
    must be. `shown_special_ids`: special tokens that the answer's text shows.

    `logprobs`, `prompt_logprobs`: so many alternatives for each token of the answer, of the prompt; None: no
    log-probabilities. `num_scored`: how many tokens of the prompt the caller has them of already; all if it resumes an
    answer.

    `prediction_ids`: what the answer is expected to be like. It is drafted from, and is no part of the context.

    `cache_scope`: keys and values of a prefix are shared by requests that have the same one. `pool`: an answer drafts
    for requests of the same one alone, where a table learns from answers.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    policy: DepthPolicy = field(default_factory=DepthPolicy)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_scored: int = 0
    request_id: str = ""
    client: str = ""
    on_behalf_of: str = ""
    deadline_s: float = math.inf
    router_version: int = 0
    priority: int = 0
    resumed_ids: tuple[int, ...] = ()
    constraint: Constraint | MessageConstraint | None = None
    shown_special_ids: frozenset[int] = frozenset()
    prediction_ids: tuple[int, ...] = ()
    cache_scope: str = ""
    pool: str = ""
    router_alias: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        if not self.prompt_ids:
            raise InvalidInput("the prompt is empty", reason="EMPTY_PROMPT")
        check_limits(self, "GenerateRequest")
        if math.isnan(self.deadline_s):
            raise InvalidInput("deadline_s is NaN; it must be a time, or infinite for none")
        if self.resumed_ids:
            object.__setattr__(self, "num_scored", len(self.prompt_ids))
        if self.constraint is not None and self.stopping.ignore_eos:
            raise InvalidInput("a constraint and ignore_eos exclude each other: an end-of-sequence token ends the text")
        if self.constraint is not None and (self.sampling.min_tokens or self.sampling.bad_words):
            raise InvalidInput(
                "a constraint excludes min_tokens and bad_words: it may leave only tokens that they forbid"
            )
        if self.policy.margin is not None and not self.sampling.is_plain_greedy:
            raise InvalidInput(
                "a margin needs greedy decoding without penalties, logit_bias, min_tokens and bad_words",
                reason="MARGIN_NEEDS_GREEDY",
            )

    @cached_property
    def given_ids(self) -> tuple[int, ...]:
        """All that is read before the first new token: the prompt, and what of the answer the caller has."""
        return self.prompt_ids + self.resumed_ids

    @cached_property
    def counted_version(self) -> int | None:
        """The version that statistics count it under: 0 without a router, None where nothing may draft."""
        return None if self.policy.name == "full" else self.router_version

    @cached_property
    def predicted(self) -> PredictedText | None:
        """The prediction as it is drafted from."""
        return PredictedText(self.prediction_ids) if self.prediction_ids else None

    @cached_property
    def takes_largest(self) -> bool:
        """Whether its tokens are those of the model's largest logits, and nothing else is asked of these."""
        is_constrained = self.constraint is not None or self.policy.name == "relaxed"
        return self.sampling.is_plain_greedy and not is_constrained and self.logprobs is None

    @cached_property
    def scope_key(self) -> bytes:
        """The cache_scope as `Prefixes` tells scopes apart."""
        return scope_key_of(self.cache_scope)

    @cached_property
    def given_key(self) -> bytes:
        """The given tokens as `Prefixes` compares them. Only for token ids that have been checked."""
        return key_of(self.given_ids)


class FinishReason(Enum):
    EOS = "eos"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"


class GeneratedToken(NamedTuple):
    """`exit_depth` is L and `proposer` is "full" if the full model chose the token.
    `alternatives` are (token id, log-probability)."""

    token_id: int
    exit_depth: int
    proposer: str
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


class Exit(NamedTuple):
    """Where a token has left the model: see `GeneratedToken`. One for each proposer, not for each token."""

    depth: int
    proposer: str


class TokenChunk(NamedTuple):
    """Final tokens, in columns, because an object for each takes longer than all else: the texts that they complete,
    their ids and exits, and their log-probabilities if these are wanted. A text never splits a UTF-8 character and may
    lag behind its token. `prompt`: the next tokens of the prompt, if their log-probabilities are wanted; the first has
    none."""

    texts: Sequence[str] = ()
    token_ids: Sequence[int] = ()
    exits: Sequence[Exit] = ()
    logprobs: Sequence[Logprobs] = ()
    prompt: tuple[GeneratedToken, ...] = ()

    @classmethod
    def joined(cls, chunks: Sequence["TokenChunk"]) -> "TokenChunk":
        """One with what several chunks of an answer have, in order."""
        return cls(*(tuple(chain(*column)) for column in zip(*chunks, strict=True)))

    @property
    def tokens(self) -> tuple[GeneratedToken, ...]:
        """The same, token by token."""
        made = [GeneratedToken(token, *way) for token, way in zip(self.token_ids, self.exits, strict=True)]
        if self.logprobs:
            made = [
                token._replace(logprob=entry.value, alternatives=entry.alternatives)
                for token, entry in zip(made, self.logprobs, strict=True)
            ]
        return tuple(made)

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True)
class DepthStatistics:
    """Counts of one request's decoding. The prompt's passes are not counted.

    A layer execution is one call of one decoder layer with any number of tokens; `num_token_layers` is the sum of their
    tokens. `exits` maps a proposer's name to (depth, tokens). `num_relaxed`: accepted drafts where the full model chose
    another token (policy relaxed).
    """

    exits: dict[str, tuple[int, int]]
    num_drafted: int
    num_accepted: int
    num_layer_executions: int
    num_token_layers: int
    num_verify_passes: int
    num_tokens: int
    num_relaxed: int = 0

    @property
    def mean_layers_per_token(self) -> float:
        return self.num_layer_executions / max(self.num_tokens, 1)

    def summary(self) -> str:
        """A summary of a few lines for people to read."""
        lines = [
            f"{self.num_tokens} tokens, {self.num_verify_passes} verify passes, "
            f"{self.mean_layers_per_token:.1f} layer executions per token",
            f"{self.num_accepted} of {self.num_drafted} drafts accepted",
        ]
        lines += [
            f"  {proposer:<12} depth {depth:>3}: {count} tokens"
            for proposer, (depth, count) in sorted(self.exits.items(), key=lambda item: item[1][0])
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Finished:
    """The last event of a generation. `text` was held back because it might have become a stop string.
    Times in seconds.

    `num_cached_tokens`: prompt tokens whose keys and values were copied from another request.
    `num_accepted_prediction_tokens`: tokens of the prediction that the answer has where it was expected to;
    `num_rejected_prediction_tokens`: all others of the prediction.
    """

    reason: FinishReason
    stop_match: str
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    depth: DepthStatistics
    num_accepted_prediction_tokens: int = 0
    num_rejected_prediction_tokens: int = 0


@dataclass(frozen=True)
class Generation:
    """A whole answer. `stats.summary()` describes its depth execution. `prompt`: the prompt's tokens, if their
    log-probabilities were asked for."""

    text: str
    tokens: tuple[GeneratedToken, ...]
    finished: Finished
    prompt: tuple[GeneratedToken, ...] = ()

    @property
    def stats(self) -> DepthStatistics:
        return self.finished.depth

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)


GenerationEvent = TokenChunk | Finished
