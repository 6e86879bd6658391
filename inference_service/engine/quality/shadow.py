"""Shadow verification: a share of what `relaxed` answered is read again through all layers, when the engine has nothing else to do.

One pass over prompt and answer gives the full model's choice at every position. If all of them are what was answered, the full
model would have answered the same; if one differs, it would have gone another way from there. So one differing token is a
generation that differs, which is the loss that a router's bound is published for.
"""

import logging
import random
from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from inference_service.engine.memory.budget import in_whole_blocks
from inference_service.engine.memory.prefixes import Prefixes
from inference_service.engine.quality.disagreement import exceeds, lower_limit
from inference_service.engine.request.request import GenerationRequest
from inference_service.engine.request.sequence import Sequence
from inference_service.engine.verification import verify
from shared.model.cache import KVCache
from shared.model.runner import Runner
from shared.model.sampling import SamplingParams, Trial

logger = logging.getLogger(__name__)

MAX_WAITING = 32
# Tokens per slice: a request that arrives meanwhile waits for no longer than about a step.
SLICE_TOKENS = 16

# Router version, and the share that is allowed to differ (None: nobody has said).
Stratum = tuple[int, float | None]


@dataclass
class ShadowCounts:
    """Generations of one stratum. `num_dropped`: sampled, but too many were waiting, or it was too long for the memory there is."""

    num_checked: int = 0
    num_differing: int = 0
    num_dropped: int = 0

    @property
    def lower_limit(self) -> float:
        """The share that differs is at least this: see `disagreement`."""
        return lower_limit(self.num_checked, self.num_differing)


@dataclass
class _Check:
    """`tokens`: prompt and answer; `num_settled` of them are in `cache`. A `Reader` for `Prefixes.match`."""

    tokens: Rows[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stratum: Stratum
    cache: KVCache
    num_settled: int = 0
    num_cached: int = 0


class Shadow:
    """The engine's thread alone, but for reading what is counted, `is_suspended` and `served_exact`. `share` in [0, 1]: 0 is off.

    Once a version's generations differ more often than their bound allows, with the confidence of `disagreement`, it is suspended
    for `relaxed`, for as long as this engine lives: what is wrong with a router does not mend itself, and evidence that comes only
    while it serves could only bring it back to fail again.
    """

    def __init__(
        self,
        runner: Runner,
        prefixes: Prefixes,
        *,
        share: float = 0.0,
        generator: random.Random | None = None,
    ) -> None:
        self.counts: dict[Stratum, ShadowCounts] = {}
        self.num_served_exact: dict[int, int] = {}
        self._runner = runner
        self._prefixes = prefixes
        self._share = share
        self._random = generator or random.Random()
        self._waiting: deque[tuple[tuple[int, ...], GenerationRequest]] = deque()
        self._check: _Check | None = None
        self._suspended: frozenset[int] = frozenset()

    @property
    def is_idle(self) -> bool:
        return self._check is None and not self._waiting

    @property
    def num_tokens(self) -> int:
        """Positions that the check under way holds keys and values for."""
        return 0 if self._check is None else self._check.cache.capacity

    def is_suspended(self, version: int) -> bool:
        """Whether `relaxed` must be served as `exact`. From any thread."""
        return version in self._suspended

    def served_exact(self, version: int) -> None:
        """Count a request that was. One thread of the caller's choice."""
        self.num_served_exact[version] = self.num_served_exact.get(version, 0) + 1

    def offer(self, sequence: Sequence, max_tokens: int) -> None:
        """A generation that has ended; `max_tokens`: positions there is memory for. Takes a share of those it can judge: greedy ones."""
        request = sequence.request
        if not self._share or request.policy.name != "relaxed" or not request.sampling.is_greedy:
            return
        if self._random.random() >= self._share:
            return
        if len(self._waiting) >= MAX_WAITING or len(sequence.tokens) > max_tokens:
            self._counts((request.router_version, request.risk_bound)).num_dropped += 1
            return
        self._waiting.append((self._judged(sequence), request))

    def _judged(self, sequence: Sequence) -> tuple[int, ...]:
        """Prompt and answer, as far as the bound speaks of it."""
        limit = sequence.request.risk_bound_tokens
        if limit is None:
            return tuple(sequence.tokens)
        prompt = sequence.num_prompt_tokens
        answer = sequence.tokens[prompt : prompt + limit]
        ends = self._runner.loaded.eos_token_ids
        size = next((number for number, token in enumerate(answer, 1) if token in ends), limit)
        return (*sequence.tokens[:prompt], *answer[:size])

    def make_room(self, num_tokens: int) -> None:
        """Requests need the memory: a check that holds more positions begins anew some other time."""
        if self.num_tokens > num_tokens:
            self._check = None  # its request is still the first of the queue

    def slice(self, max_tokens: int) -> None:
        """A few tokens of the check under way, or of the next; one that does not fit `max_tokens` positions now is dropped."""
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
        # What is kept for later makes room for this, too.
        self._prefixes.fit(max_tokens - in_whole_blocks(len(tokens), self._runner.block_tokens))
        check = self._check = _Check(
            tokens,
            len(request.prompt_ids),
            request.sampling,
            (request.router_version, request.risk_bound),
            self._runner.new_cache(len(tokens)),
        )
        self._prefixes.match(check, ())
        return check

    def _drop(self) -> None:
        """Gives up the check under way, or the next."""
        _, request = self._waiting.popleft()
        self._check = None
        self._counts((request.router_version, request.risk_bound)).num_dropped += 1

    def _read(self, check: _Check) -> bool:
        """The next tokens through all layers; whether a token after one of them is not the full model's choice."""
        start = check.num_settled
        # The last token is judged by the one before it, and followed by nothing.
        piece = list(check.tokens[start : min(start + SLICE_TOKENS, len(check.tokens) - 1)])
        runner = self._runner
        ids = runner.ids(piece)
        states = runner.run(ids, check.cache, first=0, last=runner.num_layers, base=start)[0]
        check.num_settled += len(piece)
        skipped = max(check.num_prompt_tokens - 1 - start, 0)
        if skipped >= len(piece):
            return False
        logits = self._runner.logits(states[skipped:])
        at = start + skipped + 1
        judged = list(check.tokens[at : start + len(piece) + 1])
        # As drafts they are all tested but the last, which is compared with what is chosen after them.
        [verdict] = verify(logits, [Trial(check.sampling, check.tokens[:at], judged[:-1])])
        return verdict.tokens != judged

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
                "relaxed output of router version %d differs from the full model's on %d of %d prompts, more than the %g that"
                " its bound allows: it is served as exact until this worker starts anew",
                version,
                counts.num_differing,
                counts.num_checked,
                bound,
            )

    def _counts(self, stratum: Stratum) -> ShadowCounts:
        return self.counts.setdefault(stratum, ShadowCounts())
