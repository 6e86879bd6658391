"""Shadow checks: while the engine is idle, a sample of the answers of policy relaxed is verified by the full model.

One pass over prompt and answer gives the full model's choice at every position. If all choices equal the answer, the
full model would have given the same answer. If one differs, the full model's answer would have differed from there on.
So a generation differs if any of its tokens does. A router's published bound limits the share of such generations.
"""

import logging
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.engine.failure import non_finite_logits
from shared.engine.memory.budget import round_up_to_blocks
from shared.engine.memory.prefixes import Prefixes
from shared.engine.quality.disagreement import exceeds, lower_limit
from shared.engine.request.request import GenerationRequest
from shared.engine.request.sequence import DecodingSequence
from shared.engine.verification import verify
from shared.model.cache import KVCache
from shared.model.runner import Runner
from shared.model.sampling import SamplingParams, Trial

logger = logging.getLogger(__name__)

MAX_WAITING = 32
# Tokens per slice. A request that arrives during a slice waits for about a step at most.
SLICE_TOKENS = 16
# Tokens per slice whose keys and values are copied from a kept prefix.
COPIED_TOKENS = 16 * SLICE_TOKENS

# (router version, share of generations that may differ, or None if there is no bound).
Stratum = tuple[int, float | None]


@dataclass
class ShadowCounts:
    """Generations of one stratum.

    `num_dropped`: sampled but not checked, because too many were waiting, there was not enough memory, or the check
    failed.
    """

    num_checked: int = 0
    num_differing: int = 0
    num_dropped: int = 0

    @property
    def lower_limit(self) -> float:
        """Lower confidence limit of the share that differs: see `disagreement`."""
        return lower_limit(self.num_checked, self.num_differing)


@dataclass
class _Check:
    """A check that has begun. `tokens` are prompt and answer; `cache` holds the first `num_settled`.
    A `Reader` for `Prefixes.match`."""

    given_key: bytes

    tokens: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    ends: frozenset[int]
    stratum: Stratum
    cache: KVCache
    num_settled: int = 0
    num_cached: int = 0
    num_read_before: int = 0

    @property
    def read_length(self) -> int:
        return self.num_prompt_tokens


class Shadow:
    """Samples a `share` in [0, 1] of the relaxed answers and checks them; 0 switches checks off.

    Used by the engine's thread only, except for `is_suspended`, `served_exact` and reading the counts.

    If a version's generations differ more often than their bound allows, with the confidence of `disagreement`, the
    version is suspended for policy relaxed as long as this engine lives. The suspension is not lifted: a wrong router
    does not improve by itself, and new evidence would need requests that it serves, and would fail again.
    """

    def __init__(self, runner: Runner, prefixes: Prefixes, *, share: float = 0.0) -> None:
        self.counts: dict[Stratum, ShadowCounts] = {}
        self.num_served_exact: dict[int, int] = {}
        self._runner = runner
        self._prefixes = prefixes
        self._share = share
        self._random = random.Random()
        self._waiting: deque[tuple[tuple[int, ...], GenerationRequest]] = deque()
        self._check: _Check | None = None
        self._suspended: frozenset[int] = frozenset()

    @property
    def is_idle(self) -> bool:
        return self._check is None and not self._waiting

    @property
    def num_tokens(self) -> int:
        """Positions of keys and values that the current check holds."""
        return 0 if self._check is None else self._check.cache.capacity

    def is_suspended(self, version: int) -> bool:
        """Whether this version's requests for relaxed must be served as exact. Any thread may call it."""
        return version in self._suspended

    def count_served_exact(self, version: int) -> None:
        """Counts a request for relaxed that was served as exact. Always call it from the same thread."""
        self.num_served_exact[version] = self.num_served_exact.get(version, 0) + 1

    def offer(self, sequence: DecodingSequence, max_tokens: int) -> None:
        """Samples a finished generation for a check. Only greedy generations of policy relaxed can be checked.

        A generation of more than `max_tokens` positions is dropped, because there is no memory for its check.
        """
        request = sequence.request
        if not self._share or request.policy.name != "relaxed" or not request.sampling.is_greedy:
            return
        if sequence.num_resumed:  # a part of the answer may be another worker's
            return
        if request.constraint is not None:  # bounds are certified for answers without one
            return
        if self._random.random() >= self._share:
            return
        # What was read again has other keys and values than one pass after the other would give.
        was_reread = sequence.read_length != sequence.num_prompt_tokens
        if len(self._waiting) >= MAX_WAITING or len(sequence.tokens) > max_tokens or was_reread:
            self._counts((request.router_version, request.risk_bound)).num_dropped += 1
            return
        if request.resumed_ids:  # it was put back, and its own tokens count as given since then
            request = replace(request, resumed_ids=())
        self._waiting.append((self._bounded_tokens(sequence), request))

    def _bounded_tokens(self, sequence: DecodingSequence) -> tuple[int, ...]:
        """The prompt, and the part of the answer for which the bound holds."""
        limit = sequence.request.risk_bound_tokens
        if limit is None:
            return tuple(sequence.tokens)
        prompt = sequence.num_prompt_tokens
        answer = sequence.tokens[prompt : prompt + limit]
        ends = self._runner.loaded.eos_token_ids
        size = next((number for number, token in enumerate(answer, 1) if token in ends), limit)
        return (*sequence.tokens[:prompt], *answer[:size])

    def make_room(self, num_tokens: int) -> None:
        """Frees the current check's memory if it holds more than `num_tokens` positions.
        The check starts again later."""
        if self.num_tokens > num_tokens:
            self._check = None  # it is still the first of the queue

    def run_slice(self, max_tokens: int) -> None:
        """Verifies the next few tokens of the current check, or starts the next one. A check of more than `max_tokens`
        positions is dropped."""
        try:
            check = self._check or self._begin(max_tokens)
            if check is None:
                return
            differs = self._read(check)
        except Exception:  # a check that fails must not end the engine
            logger.exception("a shadow check failed")
            self._drop()
            return
        if differs or check.num_settled == len(check.tokens) - 1:
            self._waiting.popleft()
            self._check = None
            self._conclude(check.stratum, differs)

    def _begin(self, max_tokens: int) -> _Check | None:
        tokens, request = self._waiting[0]
        if len(tokens) > max_tokens:
            self._drop()
            return None
        # Caches that are kept for reuse give way to the check.
        self._prefixes.shrink_to(max_tokens - round_up_to_blocks(len(tokens), self._runner.block_tokens))
        check = self._check = _Check(
            request.given_key,
            tokens,
            len(request.prompt_ids),
            request.sampling,
            request.stopping.end_token_ids(self._runner.loaded.eos_token_ids),
            (request.router_version, request.risk_bound),
            self._runner.new_cache(len(tokens)),
        )
        return check

    def _drop(self) -> None:
        """Gives up the current check, or the next one if none has begun."""
        _, request = self._waiting.popleft()
        self._check = None
        self._counts((request.router_version, request.risk_bound)).num_dropped += 1

    def _read(self, check: _Check) -> bool:
        """Takes the next tokens through all layers.
        Returns whether a token of the answer differs from the full model's choice."""
        if self._prefixes.match(check, (), COPIED_TOKENS):
            return False
        start = check.num_settled
        # The last token is verified by the state of the one before it, so it need not run.
        piece = list(check.tokens[start : min(start + SLICE_TOKENS, len(check.tokens) - 1)])
        runner = self._runner
        ids = runner.ids(piece)
        states = runner.run(
            ids, check.cache, first=0, last=runner.num_layers, base=start, read_length=check.read_length
        )[0]
        check.num_settled += len(piece)
        skipped = max(check.num_prompt_tokens - 1 - start, 0)
        if skipped >= len(piece):
            return False
        logits = self._runner.logits(states[skipped:])
        first = start + skipped + 1
        answered = list(check.tokens[first : start + len(piece) + 1])
        # All but the last are verified as drafts; the last is compared with the token that is chosen after them.
        context, start = check.tokens[:first], check.num_prompt_tokens
        trial = Trial(check.sampling, context, answered[:-1], None, start, check.ends)
        [verdict] = verify(logits, [trial])
        if not verdict.is_sound:
            raise non_finite_logits()
        return verdict.tokens != answered

    def _conclude(self, stratum: Stratum, differs: bool) -> None:
        counts = self._counts(stratum)
        counts.num_checked += 1
        counts.num_differing += differs
        version, bound = stratum
        if (
            differs
            and bound is not None
            and version not in self._suspended
            and exceeds(counts.num_checked, counts.num_differing, bound)
        ):
            self._suspended |= {version}
            logger.error(
                "relaxed output of router version %d differs from the full model's on %d of %d prompts, more than the "
                "%g that its bound allows: it is served as exact until this worker restarts",
                version,
                counts.num_differing,
                counts.num_checked,
                bound,
            )

    def _counts(self, stratum: Stratum) -> ShadowCounts:
        return self.counts.setdefault(stratum, ShadowCounts())
