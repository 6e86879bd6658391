"""One decode step, top to bottom: admit, prefill, draft, verify, commit."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shared.engine.drafting.chains import Drafting
from shared.engine.drafting.drafter import MOST_SLOWNESS, Drafter
from shared.engine.drafting.speculation import Speculation, settle
from shared.engine.failure import attempt, fail_all, non_finite_logits
from shared.engine.memory.prefixes import Prefixes
from shared.engine.prompt_scores import score_prompt, score_weight
from shared.engine.request.admission import MAX_PREFILL_TOKENS, PrefillRate, max_num_tokens, prefill_budget
from shared.engine.request.answer import DecodedAnswer
from shared.engine.request.handle import OnStates
from shared.engine.request.request import Exit, GenerationRequest, TokenChunk
from shared.engine.request.sequence import DecodingSequence
from shared.engine.statistics import EngineStatistics
from shared.engine.verification import Verdict, verify
from shared.ladder.learned_ngrams import LearnedNgrams
from shared.model.cache import KVCache
from shared.model.inference import inference
from shared.model.recorder import Work
from shared.model.runner import Runner

logger = logging.getLogger(__name__)

# The exits of all drafts of a step and of those that became final, by the version that they count for.
Drafts = dict[int | None, tuple[list[Exit], list[Exit]]]
# Prompt tokens per step whose keys and values are copied. So many take about as long as a pass.
MAX_COPIED_TOKENS = 1024


def verify_parts(logits: Tensor, parts: Sequence[Speculation]) -> None:
    """Gives each part its verdict. logits [T, V]: the rows of all parts, part after part. See `verify`."""
    num_alternatives = [part.sequence.request.logprobs for part in parts]
    verdicts = verify(logits, [part.trial() for part in parts], num_alternatives)
    for part, verdict in zip(parts, verdicts, strict=True):
        part.verdict = verdict


class Decoder:
    """Steps the sequences of one model. Used by one thread. `prefixes` keeps the KV caches of ended sequences for
    reuse; `learned` learns from answers to draft later ones."""

    def __init__(self, runner: Runner, prefixes: Prefixes | None = None, learned: LearnedNgrams | None = None) -> None:
        self.runner = runner
        self.prefixes = prefixes or Prefixes(0)
        self.learned = learned
        self.statistics = EngineStatistics(runner.num_layers)
        self.prefill_rate = PrefillRate()
        self._drafting = Drafting(runner)
        self._score_weight = score_weight(runner.loaded)

    def admit(
        self,
        request: GenerationRequest,
        drafter: Drafter,
        on_states: OnStates | None = None,
        submitted_s: float | None = None,
        answer: DecodedAnswer | None = None,
    ) -> DecodingSequence:
        """Creates the sequence of a checked request and allocates its KV cache. Runs no layer.

        `on_states` as in `GenerationHandle`. `submitted_s`: since when it waits, in `time.monotonic()` seconds; None:
        since now. `answer`: of this request, if it has been made already. Raises `Exhausted` (reasons OUT_OF_MEMORY,
        KV_PAGES).
        """
        loaded, cache = self.runner.loaded, self._new_cache(request)
        learned = None
        if self.learned is not None and request.policy.name != "full":
            learned = self.learned.of(request.client, request.on_behalf_of, request.pool)
        return DecodingSequence(
            request,
            loaded,
            drafter,
            cache,
            answer or DecodedAnswer(request, loaded),
            learned,
            self.runner.regimes,
            on_states,
            submitted_s,
        )

    def put_back(self, sequence: DecodingSequence) -> None:
        """Takes a sequence's keys and values away, until `readmit`.
        They are kept for reuse as those of ended sequences are."""
        self.prefixes.insert(sequence)
        sequence.give_up_cache(self.runner.new_cache(0))
        self.statistics.num_put_back += 1

    def readmit(self, sequence: DecodingSequence) -> None:
        """Lets a sequence go on that was put back. Raises as `admit` does."""
        sequence.cache = self._new_cache(sequence.request)

    def _new_cache(self, request: GenerationRequest) -> KVCache:
        capacity = max_num_tokens(request, self.runner.loaded.context_length)
        cache = self.runner.new_cache(capacity)
        self.runner.reserve(cache)
        return cache

    def prepare(self, seconds: Callable[[Work], float]) -> Iterator[None]:
        """Does once what steps would otherwise do first. `seconds` tells what work takes. Yields between parts."""
        return iter(())

    def prepare_drafter(self, drafter: Drafter, seconds: Callable[[Work], float]) -> Iterator[None]:
        """The same for a new drafter."""
        return iter(())

    @property
    def is_under_way(self) -> bool:
        """Whether a step has been launched whose tokens nobody has."""
        return False

    def turn(self, sequences: Sequence[DecodingSequence]) -> list[tuple[DecodingSequence, list[TokenChunk]]]:
        """A step of these sequences, or the launch of one: then its chunks come with the next turn. Returns the chunks
        that became final, by sequence."""
        return [*zip(sequences, self.step(sequences), strict=True)]

    @inference
    def step(self, sequences: Sequence[DecodingSequence]) -> list[list[TokenChunk]]:
        """One piece of the prompt, or one verified chain of drafts, for each sequence.
        Returns the chunks that became final, per sequence.

        One verify pass serves all sequences if the model supports ragged batches; otherwise each has its own. A
        sequence that fails has a `failure` afterwards: alone if the work was its own, with all that shared a pass if
        the pass failed. The tokens of the other sequences do not change.
        """
        start_s = time.monotonic()
        if any(sequence.started_s is None for sequence in sequences):
            self.statistics.record_starts(sequences)
        groups = [sequences] if self.runner.supports_ragged else [[alone] for alone in sequences]
        results: list[list[TokenChunk]] = []
        for group in groups:
            results += self._step(group, sequences)
        try:
            self.statistics.record_step(time.monotonic() - start_s, [*zip(sequences, results, strict=True)])
        except Exception:  # the tokens have been generated, counted or not
            logger.exception("a step could not be counted")
        return results

    def _step(self, batch: Sequence[DecodingSequence], running: Sequence[DecodingSequence]) -> list[list[TokenChunk]]:
        """A step of the sequences that share a verify pass.
        `running`: all running sequences, which may share their prefixes."""
        start_s = time.perf_counter()
        decoding, reading = list[DecodingSequence](), list[DecodingSequence]()
        for sequence in batch:
            (reading if sequence.is_reading else decoding).append(sequence)
        prefills = self._prefill(reading, running, len(decoding)) if reading else []
        num_read = sum(len(part.tokens) for part in prefills) if prefills else 0
        parts = self._drafting.draft(decoding, num_read) + prefills
        if parts:
            self._verify_and_commit(parts, num_read)
        seconds = time.perf_counter() - start_s
        # Where nothing is read from the device, the time is not that of the pass.
        if num_read and any(part.num_logits and part.sequence.failure is None for part in parts):
            self.prefill_rate.record(num_read, seconds)
        chunks_of = {id(part.sequence): part.chunks for part in parts}
        return [chunks_of.get(id(sequence), []) for sequence in batch]

    # Prefill.

    def _prefill(
        self,
        reading: Sequence[DecodingSequence],
        running: Sequence[DecodingSequence],
        num_decoding: int,
        room: int = MAX_PREFILL_TOKENS,
    ) -> list[Speculation]:
        """The next pieces of prompts, first come, first served, within the token budget of a step and at most
        `room`."""
        budget, copies = min(prefill_budget(len(reading), num_decoding), room), MAX_COPIED_TOKENS
        parts: list[Speculation] = []
        for sequence in reading:
            if budget > 0:
                others, num_settled = [part.sequence for part in parts], sequence.num_settled
                part = attempt(sequence, self._prefill_piece, sequence, running, others, budget, copies)
                copies = max(copies - sequence.num_settled + num_settled, 0)
                if part is not None and part.tokens:
                    parts.append(part)
                    budget -= math.ceil(len(part.tokens) * self._weight_of(sequence))
        return parts

    def _prefill_piece(
        self,
        sequence: DecodingSequence,
        running: Sequence[DecodingSequence],
        others: Sequence[DecodingSequence],
        budget: int,
        copies: int,
    ) -> Speculation | None:
        """The next piece of a prompt. None if more of it is copied in the next step, which includes what one of
        `others` computes in this step."""
        # What is read again is no prompt that others have, and scores are not kept.
        if not sequence.has_begun and not sequence.scores_prompt:
            left_to_copy = self.prefixes.match(sequence, running, copies)
            sequence.show_prompt(sequence.num_settled)
            if left_to_copy:
                return None
            if self.prefixes.is_being_computed(sequence, others):
                return None
        start, end = sequence.num_settled, sequence.read_until
        stop = min(start + max(int(budget / self._weight_of(sequence)), 1), end)
        sequence.show_prompt(stop)
        return Speculation(
            sequence,
            start,
            sequence.tokens[start:stop],
            [0] * (stop - start),
            [None] * (stop - start),
            is_prefill=True,
            num_logits=int(stop == end),
            captured={depth: [] for depth in sequence.kept_depths},
            read_length=sequence.read_length,
        )

    def _weight_of(self, sequence: DecodingSequence) -> float:
        """What a token of its prompt takes of the budget."""
        return self._score_weight if sequence.scores_prompt else 1.0

    # Verify and commit.

    def _verify_and_commit(
        self, parts: Sequence[Speculation], num_read: int, passed: Callable[[], Tensor] | None = None
    ) -> None:
        """Runs the verify pass over all chains and the `num_read` tokens of prompts, verifies drafts, and commits what
        the full model accepts. `passed` gives the states [T, D] at depth L if the pass has been launched."""
        start_s = time.perf_counter()
        try:
            logits = self._logits(parts, settle(parts, self.runner) if passed is None else passed())
        except Exception as error:
            fail_all([part.sequence for part in parts], error, "a pass failed that was shared by")
            return
        if logits is not None:
            self._verify(logits, [part for part in parts if part.num_logits])
        if not num_read and passed is None:
            sizes = [(part.base, len(part.tokens)) for part in parts]
            measured_s = parts[0].sequence.drafter.pass_s(parts[-1].offset + sizes[-1][1])
            extra_s = min(time.perf_counter() - start_s, MOST_SLOWNESS * measured_s) - measured_s
            self._drafting.key_time.record(extra_s, sizes)
        drafts: Drafts = {}
        for part in parts:
            if part.sequence.failure is None:
                attempt(part.sequence, self._commit, part, part.verdict, drafts)
        for version, (drafted, accepted) in drafts.items():
            numbers = ((each.proposer, count, accepted.count(each)) for each, count in Counter(drafted).items())
            self.statistics.record_drafts(numbers, version)

    def _logits(self, parts: Sequence[Speculation], states: Tensor) -> Tensor | None:
        """The logits [N, V] that the parts need, part after part, or the tokens of the largest ones [N] where they are
        enough; None if none needs any. `states` [T, D]: of all tokens at depth L."""
        num_logits = sum(part.num_logits for part in parts)
        if not num_logits:
            return None
        if num_logits < states.shape[0]:
            ends = [part.offset + len(part.tokens) for part in parts]
            with_logits = [states[end - part.num_logits : end] for part, end in zip(parts, ends, strict=True)]
            states = torch.cat(with_logits)
        if all(part.sequence.request.takes_largest for part in parts if part.num_logits):
            return self.runner.choices(states)
        return self.runner.logits(states)

    def _verify(self, logits: Tensor, parts: Sequence[Speculation]) -> None:
        """Verifies all parts together, which reads the device once.
        If that fails, each alone, so that only the culprits fail."""
        try:
            verify_parts(logits, parts)
            return
        except Exception:
            logger.warning("verification failed; each request is verified alone", exc_info=True)
        by_part = logits.split_with_sizes([part.num_logits for part in parts])
        for part, rows in zip(parts, by_part, strict=True):
            attempt(part.sequence, verify_parts, rows, [part])

    def _commit(self, part: Speculation, verdict: Verdict | None, drafts: Drafts) -> None:
        """Moves the sequence to what has been through every layer, and emits its new tokens. Adds its proposers to
        `drafts`. Rejected drafts are overwritten later."""
        sequence = part.sequence
        num_settled, exits = len(part.tokens), list[Exit]()
        if part.is_prefill:
            sequence.num_settled = part.base + num_settled
            part.chunks += score_prompt(part, self.runner)
        else:
            assert verdict is not None
            num_accepted = verdict.num_accepted
            num_settled = 1 + num_accepted  # those before the token that the full model has just chosen
            sequence.num_settled = part.base + num_settled
            sequence.num_layer_executions += part.num_layer_executions
            sequence.num_token_layers += part.num_token_layers
            sequence.num_verify_passes += 1
            sequence.num_accepted += num_accepted
            sequence.tables.record(verdict.tokens)
            exits += map(sequence.drafter.exits.__getitem__, part.proposers)
            drafted, accepted = drafts.setdefault(sequence.request.counted_version, ([], []))
            drafted += exits
            del exits[num_accepted:]
            accepted += exits
        if sequence.on_states is not None:
            shown = [torch.stack([part.state(d, i) for i in range(num_settled)]) for d in sequence.kept_depths]
            with torch.inference_mode(False):  # they may be trained on
                sequence.on_states(part.base, torch.stack(shown, 1))
        if verdict is None:
            return
        if sequence.keeps_states:
            sequence.settled = part.kept(sequence.kept_depths, num_settled - 1)
        token_ids, logprobs = verdict.tokens, verdict.logprobs or ()
        exits.append(sequence.drafter.exits[-1])
        if not verdict.is_sound:
            token_ids, logprobs, exits = token_ids[:-1], logprobs[:-1], exits[:-1]
        part.chunks += sequence.emit(token_ids, exits, logprobs)
        for place in verdict.relaxed:
            sequence.num_relaxed += part.base + 1 + place < len(sequence.tokens)
        if not verdict.is_sound and not sequence.is_finished:
            raise non_finite_logits()

    def check_model(self) -> None:
        """Runs one token through all layers and the head. A failed step may have left a device that cannot run anything
        any more; then this raises what the model raises."""
        cache = self.runner.new_cache(1)
        states = self.runner.run(self.runner.ids([0]), cache, first=0, last=self.runner.num_layers, base=0)
        self.runner.logits(states[0]).argmax(-1).tolist()
