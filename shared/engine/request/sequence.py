"""The state of one request while it is generated."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shared.engine.drafting.drafter import Drafter
from shared.engine.request.answer import DecodedAnswer
from shared.engine.request.handle import OnStates
from shared.engine.request.logprobs import Logprobs
from shared.engine.request.request import (
    DepthStatistics,
    Exit,
    Finished,
    GenerationRequest,
    TokenChunk,
)
from shared.engine.statistics import CountedProgress
from shared.errors import NeapError
from shared.ladder.learned_ngrams import ClientNgrams
from shared.model.cache import KVCache
from shared.model.context_counts import ContextCounts
from shared.model.loaded import LoadedModel
from shared.model.regimes import Regimes
from shared.model.runner import CapturedStates, captured_depths
from shared.model.sampling import MAX_BAD_WORD_TOKENS

# A number of tokens that no sequence reaches.
NEVER = sys.maxsize


class PassedStates:
    """The states [1, T, D] of a pass, by depth."""

    def __init__(self, by_depth: CapturedStates) -> None:
        self.by_depth = by_depth
        self._together: dict[tuple[int, ...], Tensor] = {}

    def together(self, depths: tuple[int, ...]) -> Tensor:
        """Those at several depths [T, K, D]: copied when an exit asks for them, and once for all tokens, since many
        small copies keep a GPU waiting."""
        if depths not in self._together:
            self._together[depths] = torch.stack([self.by_depth[depth][0] for depth in depths], 1)
        return self._together[depths]


class DecodingSequence:
    """Tokens, KV cache and counts of one request.

    The tokens at positions [0, num_settled) have been through every layer; `settled`, for a ladder with exits: a pass
    that has the states of the last of them at the depths `kept_depths`, of which the last is L, and its place in that
    pass. No layer has run for later tokens yet. `num_cached`: prompt tokens whose keys and values were copied from
    another sequence. `failure`: why the request ends without an answer; a failed sequence takes part in no further
    step.

    `given_ids` of the request are read first, in pieces. `read_length`: the first tokens that count as read in one
    pass: the prompt, or more if `generate` would have read the sequence again when it outgrew a regime
    (`shared.model.regimes`).
    """

    # A step reads a few numbers of each of many: together, not by a dictionary of each.
    __slots__ = (
        "__weakref__", "_exits", "_num_shown", "_read_again_at", "_regimes", "answer", "cache", "counted", "counts",
        "drafter", "failure", "first_token_s", "keeps_states", "kept_depths", "ladder", "learned", "num_accepted",
        "num_cached", "num_drafted", "num_layer_executions", "num_prompt_tokens", "num_read_before", "num_relaxed",
        "num_resumed", "num_scored", "num_settled", "num_token_layers", "num_verify_passes", "on_states", "place",
        "read_length", "read_until", "request", "settled", "shows_tokens", "started_s", "submitted_s", "tables",
        "tokens", "vocabulary_size",
    )  # fmt: skip

    def __init__(
        self,
        request: GenerationRequest,
        loaded: LoadedModel,
        drafter: Drafter,
        cache: KVCache,
        answer: DecodedAnswer,
        learned: ClientNgrams | None = None,
        regimes: Regimes | None = None,
        on_states: OnStates | None = None,
        submitted_s: float | None = None,
    ) -> None:
        self.request = request
        self.drafter = drafter
        self.ladder = ladder = drafter.ladder
        self.cache = cache
        self.answer = answer
        self.num_prompt_tokens = len(request.prompt_ids)
        self.tokens = list(request.given_ids)
        self.num_settled = 0
        self.num_cached = 0
        # Tokens that were read before the sequence was put back. To copy them again is no help of others.
        self.num_read_before = 0
        # Tokens of the prompt whose log-probabilities the caller has, if it wants them.
        self.num_scored = request.num_scored
        self._regimes = regimes or Regimes()
        self.read_length = self.num_prompt_tokens
        while (again := self._regimes.next_reread(self.read_length)) and again <= len(self.tokens):
            self.read_length = again
        # At this number of tokens all of them are read again.
        self._read_again_at = again or NEVER
        # The tokens before this position are read in pieces, as prompts are.
        self.read_until = len(self.tokens)
        self.on_states = on_states
        shown_depths = captured_depths(loaded.num_layers) if on_states else ()
        kept_depths = ladder.kept_depths if ladder and ladder.kept_depths else shown_depths
        self.kept_depths = (*kept_depths, loaded.num_layers)
        self.settled: tuple[PassedStates, int] | None = None
        # Whether anybody reads it.
        self.keeps_states = bool(ladder and ladder.depths)
        self.tables = drafter.tables(request, learned)
        assert (request.constraint is None) == (answer.constraint is None)
        self.counts: ContextCounts | None = None
        if request.sampling.changes_scores:
            self.counts = ContextCounts(request.sampling, self.tokens, self.num_prompt_tokens, loaded.vocabulary_size)
        # Whether the tables are told of tokens: not where the device reads its own.
        self.shows_tokens = True
        self._num_shown = 0
        self.learned = learned
        self.submitted_s = time.monotonic() if submitted_s is None else submitted_s
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_relaxed = 0
        self.num_verify_passes = 0
        self.num_layer_executions = 0
        self.num_token_layers = 0
        self.num_resumed = len(request.resumed_ids)
        self.counted = CountedProgress(version=request.counted_version, num_generated=self.num_resumed)
        self.failure: NeapError | None = None
        self.place: Any = None  # on the device, if it has one: see `Ahead`
        self._exits: list[Exit] = []  # of its tokens
        self.vocabulary_size = loaded.vocabulary_size

    @property
    def given_key(self) -> bytes:
        return self.request.given_key

    @property
    def scope_key(self) -> bytes:
        return self.request.scope_key

    @property
    def num_generated(self) -> int:
        """Tokens of the answer, with those that the caller had before."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def has_begun(self) -> bool:
        """Whether there is a token that the caller did not have before."""
        return len(self.tokens) > len(self.request.given_ids)

    @property
    def is_reading(self) -> bool:
        """Whether the next pass reads a piece of the prompt, or of what has to be read again."""
        return self.num_settled < self.read_until

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of some of the prompt's tokens are still wanted."""
        return self.request.prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens

    @property
    def has_cache(self) -> bool:
        """Whether there is room for its keys and values: not after `give_up_cache`, until it gets a cache again."""
        return self.cache.capacity > 0

    def give_up_cache(self, empty: KVCache) -> None:
        """Goes on without keys and values. All tokens so far are given then, and are read again."""
        if self.has_begun:  # the tables know all tokens
            self._num_shown = len(self.tokens)
        answer = tuple(self.tokens[self.num_prompt_tokens :])
        self.request = replace(self.request, resumed_ids=answer)
        self.cache, self.settled = empty, None
        self.num_read_before = max(self.num_read_before, self.num_settled)
        self.num_settled, self.read_until = 0, len(self.tokens)

    # Drafts.

    @property
    def settled_states(self) -> Tensor:
        """The states [K, D] of the last settled token at the `kept_depths`, with which an exit begins a chain."""
        assert self.settled is not None
        passed, place = self.settled
        return passed.together(self.kept_depths)[place]

    @property
    def draft_room(self) -> int:
        """The most drafts that may follow its tokens. The verify pass itself gives one token of the answer."""
        policy = self.request.policy
        if policy.name == "full" or self.ladder is None:
            return 0
        num_left = min(self.answer.num_left, self._read_again_at - len(self.tokens))
        room = max(min(num_left, len(self.drafter.costs.verify)) - 1, 0)
        return min(room, policy.max_drafts) if policy.max_drafts else room

    @property
    def limits_drafts(self) -> bool:
        """Whether the request may forbid or force a draft."""
        return self.answer.constraint is not None or self.request.sampling.forbids_tokens

    def forced_after(self, drafted: Sequence[int], room: int) -> tuple[list[int], int | None]:
        """The tokens without alternative after these drafts, at most `room`; and after them one that would begin the
        text that is forced, if any is. Nothing, if the request wants layers to run for each draft."""
        constraint, forced = self.answer.constraint, list[int]()
        if constraint is None or self.request.policy.min_layers > 0:
            return [], None
        while len(forced) < room and (token := constraint.forced([*drafted, *forced])) is not None:
            forced.append(token)
        return forced, constraint.begun([*drafted, *forced]) if len(forced) < room else None

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """How many of these drafts the request allows, one after the other. None after the end of a text."""
        constraint, sampling = self.answer.constraint, self.request.sampling
        for place, draft in enumerate(drafts):
            before = drafts[:place]
            if constraint is not None:
                if constraint.has_ended(before) or not constraint.allows(before, draft):
                    return place
            elif draft in sampling.forbidden_after(
                [*self.tokens[-MAX_BAD_WORD_TOKENS:], *before], self.num_generated + place, self.answer.end_token_ids
            ):
                return place
        return len(drafts)

    @property
    def is_finished(self) -> bool:
        return self.answer.end is not None and not self.scores_prompt

    def show_prompt(self, end: int) -> None:
        """Tells the tables the given tokens before position `end`: piece by piece, because a long prompt takes longer
        than a pass."""
        if self.shows_tokens:
            self.tables.append(self.request.given_ids[self._num_shown : end])
            self._num_shown = max(self._num_shown, end)

    def emit(
        self,
        token_ids: Sequence[int],
        exits: Sequence[Exit],
        logprobs: Sequence[Logprobs] = (),
        texts: Sequence[str] = (),
    ) -> list[TokenChunk]:
        """Makes tokens final, in order, up to the one that ends the request. Returns one chunk with all of them, if
        there are any: the way of a chunk to the client takes longer than a token of a small model. `texts`: as of
        `DecodedAnswer.take`, if none of the tokens ends the answer.

        Gives up all keys and values if `generate` would do so at the length that is reached.
        """
        answer, taken = self.answer, token_ids
        if not answer.take(texts):
            num_before = answer.num_tokens
            texts = answer.push(token_ids)
            taken = token_ids[: answer.num_tokens - num_before]
            if (end := len(texts)) < len(token_ids):
                token_ids, exits, logprobs = token_ids[:end], exits[:end], logprobs[:end]
        self.tokens += taken
        if self.counts is not None:
            for token_id in taken:
                self.counts.append(token_id)
        if self.first_token_s is None and taken:
            self.first_token_s = time.monotonic()
        self._exits += exits
        if self.shows_tokens:
            self.tables.append(token_ids)
        length = len(self.tokens)
        if length == self._read_again_at and self.answer.end is None:
            self.num_settled, self.read_length, self.read_until = 0, length, length
            self._read_again_at = self._regimes.next_reread(length) or NEVER
        return [TokenChunk(texts, token_ids, exits, logprobs)] if texts else []

    def finished(self) -> Finished:
        """The last event of the request. Call it once, after `is_finished` has become true."""
        text = self.answer.rest()
        assert self.answer.end is not None
        reason, match = self.answer.end
        predicted = self.request.predicted
        if predicted is not None:  # also of an answer that was whole when it was resumed
            self.show_prompt(len(self.request.given_ids))
        num_predicted = self.tables.num_predicted if predicted else 0
        # Only now: within an answer, prompt look-up knows the same. The full model's choices only.
        if self.learned is not None and self.request.policy.name == "exact":
            self.learned.learn(self.tokens, self.num_prompt_tokens)
        now = time.monotonic()
        started = self.started_s or now
        first = self.first_token_s or now
        return Finished(
            reason=reason,
            stop_match=match,
            text=text,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=min(self.num_cached, self.num_prompt_tokens),
            num_completion_tokens=self.num_generated,
            queue_s=started - self.submitted_s,
            prefill_s=first - started,
            decode_s=now - first,
            depth=self.statistics(),
            num_accepted_prediction_tokens=num_predicted,
            num_rejected_prediction_tokens=max(predicted.num_tokens - num_predicted, 0) if predicted else 0,
        )

    def statistics(self) -> DepthStatistics:
        return DepthStatistics(
            exits={each.proposer: (each.depth, count) for each, count in Counter(self._exits).items()},
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            num_relaxed=self.num_relaxed,
            num_layer_executions=self.num_layer_executions,
            num_token_layers=self.num_token_layers,
            num_verify_passes=self.num_verify_passes,
            num_tokens=self.num_generated - self.num_resumed,
        )
