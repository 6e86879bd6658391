"""One step of a batch: each sequence drafts shallow, all settle deep in one pass, each is verified."""

import logging
import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inference_service.engine.admission import num_slots
from inference_service.engine.chain import Chain, settle
from inference_service.engine.drafting import Drafter, draft_chains
from inference_service.engine.failure import attempt, fail_all
from inference_service.engine.planner import PassCosts, Reliability, best_lengths
from inference_service.engine.prefixes import Prefixes
from inference_service.engine.request import GeneratedToken, GenerationRequest, TokenChunk
from inference_service.engine.sequence import Sequence
from inference_service.engine.statistics import EngineStatistics
from inference_service.engine.verification import Verdict, verify
from inference_service.engine.worth import DraftingWorth
from shared.ladder.ladder import BoundLadder
from shared.model.runner import DepthRunner
from shared.model.sampling import Trial

logger = logging.getLogger(__name__)

# Prompt tokens per step, so that a long prompt can be cancelled; fewer where running streams would have to wait for them.
PREFILL_TOKENS = 256
PREFILL_TOKENS_IN_COMPANY = 64
FULL = "full"


@dataclass
class _Turn:
    """A sequence's part in one step. `num_answers`: the states, from the end, whose logits are wanted."""

    sequence: Sequence
    chain: Chain
    chunks: list[TokenChunk]
    num_answers: int
    is_prefill: bool

    @property
    def trial(self) -> Trial:
        """What the deep pass tests. Once what is final before it has been handed out."""
        tested = self.chain.drafts[self.chain.num_final :]
        request = self.sequence.request
        return Trial(request.sampling, self.sequence.tokens, [draft.token for draft in tested])


class Decoder:
    """Steps sequences of one model. One thread. `prefixes`: what ended sequences left to those whose prompts start alike."""

    def __init__(self, runner: DepthRunner, prefixes: Prefixes | None = None) -> None:
        self.runner = runner
        self.prefixes = prefixes or Prefixes(0)
        self._worth = DraftingWorth()
        self.statistics = EngineStatistics(runner.num_layers)

    def start(
        self, request: GenerationRequest, ladder: BoundLadder | None, served: Reliability
    ) -> Sequence:
        """A new sequence; nothing runs yet. The request must have been checked against the model.

        `served`: how the ladder's drafts fared in requests like this one. Raises `Exhausted` (reasons OUT_OF_MEMORY, KV_PAGES).
        """
        loaded = self.runner.loaded
        capacity = num_slots(request, loaded.context_length)
        cache = self.runner.new_cache(capacity)
        self.runner.reserve(cache)
        return Sequence(request, loaded, ladder, cache, capacity - len(request.prompt_ids), served)

    def step(
        self, batch: Rows[tuple[Sequence, Drafter]], costs: PassCosts
    ) -> list[list[TokenChunk]]:
        """A piece of the prompt, or one chain, of each sequence. Returns per sequence what became final.

        One deep pass serves all, where the model can be run so; else one each. A sequence that fails has a `failure` afterwards:
        alone where the work was its own, with all that shared a pass where the pass failed. The others' tokens do not change.
        """
        now = time.monotonic()
        sequences = [sequence for sequence, _ in batch]
        first = [sequence for sequence in sequences if sequence.started_s is None]
        for sequence in first:
            sequence.started_s = now
        if self.runner.can_pack:
            results = self._step(batch, costs, batch)
        else:
            results = [self._step([member], costs, batch)[0] for member in batch]
        try:
            for sequence in first:
                self.statistics.queue_s.record(now - sequence.submitted_s)
            self.statistics.record_step(time.monotonic() - now, sequences, results)
        except Exception:  # what cannot be counted has been generated nevertheless
            logger.exception("a step could not be counted")
        return results

    def check_model(self) -> None:
        """One token through all layers and the head. Raises what the model raises; a step in which something failed may have left
        a device that runs nothing any more."""
        cache = self.runner.new_cache(1)
        states = self.runner.run(
            self.runner.ids([0]), cache, first=0, last=self.runner.num_layers, base=0
        )
        self.runner.logits(states[0]).argmax(-1).tolist()

    def _step(
        self,
        batch: Rows[tuple[Sequence, Drafter]],
        costs: PassCosts,
        company: Rows[tuple[Sequence, Drafter]],
    ) -> list[list[TokenChunk]]:
        start_s = time.perf_counter()
        turns: dict[int, _Turn] = {}
        reading: list[Sequence] = []
        num_decoding = sum(sequence.num_generated > 0 for sequence, _ in batch)
        num_open = sum(s.num_generated > 0 and s.leaves_drafting_open for s, _ in batch)
        drafts = num_open == 0 or self._worth.choose((num_open, num_decoding))
        room = PREFILL_TOKENS_IN_COMPANY if num_decoding else PREFILL_TOKENS
        decoding = [index for index, (sequence, _) in enumerate(batch) if sequence.num_generated]
        chains = draft_chains((batch[i] for i in decoding), num_decoding, drafts=drafts)
        for index, chain in zip(decoding, chains, strict=True):
            if batch[index][0].failure is None:
                turns[index] = _Turn(batch[index][0], chain, [], 1, False)
        for index, (sequence, _) in enumerate(batch):
            if not sequence.num_generated and room:
                turn = attempt(sequence, self._read_on, sequence, company, reading, room)
                if turn is None:
                    continue
                turns[index] = turn
                reading.append(sequence)
                room -= len(turn.chain.tokens)
        self._choose_lengths(list(turns.values()), costs)
        going = [turn for turn in turns.values() if attempt(turn.sequence, self._emit_final, turn)]
        self._settle(going)
        results = [turns[index].chunks if index in turns else [] for index in range(len(batch))]
        if num_open and not reading:
            num_tokens = sum(len(chunk.tokens) for chunks in results for chunk in chunks)
            seconds = time.perf_counter() - start_s
            self._worth.record((num_open, num_decoding), drafts, num_tokens, seconds)
        return results

    def _read_on(
        self,
        sequence: Sequence,
        company: Rows[tuple[Sequence, Drafter]],
        reading: Rows[Sequence],
        room: int,
    ) -> _Turn | None:
        """The next piece of the prompt, of `room` tokens at most; None where another sequence reads the same in this very step."""
        self.prefixes.lend(sequence, (other for other, _ in company))
        if self.prefixes.is_being_read(sequence, reading):
            return None  # in the next step it is there for the taking
        start = sequence.num_settled
        prompt = sequence.request.prompt_ids
        chain = Chain(start, list(prompt[start : start + room]), sequence.cache)
        is_last = start + len(chain.tokens) == len(prompt)
        return _Turn(sequence, chain, [], int(is_last), True)

    def _choose_lengths(self, turns: list[_Turn], costs: PassCosts) -> None:
        decoding = [turn for turn in turns if not turn.is_prefill]
        lengths = best_lengths(
            [turn.chain.probabilities for turn in decoding],
            costs,
            least=[
                len(turn.chain.drafts)
                if turn.sequence.request.policy.max_drafts
                else turn.chain.num_final
                for turn in decoding
            ],
            num_other_tokens=sum(len(t.chain.tokens) for t in turns if t.is_prefill),
        )
        for turn, length in zip(decoding, lengths, strict=True):
            turn.chain.truncate(length)
            turn.num_answers = length - turn.chain.num_final + 1

    def _emit_final(self, turn: _Turn) -> bool:
        """Hands out what is final before the deep pass; whether the sequence still wants one."""
        if turn.is_prefill:
            return True
        sequence, chain = turn.sequence, turn.chain
        final = chain.drafts[: chain.num_final]
        turn.chunks += sequence.emit([GeneratedToken(d.token, d.depth, d.rung) for d in final])
        sequence.num_drafted += len(chain.drafts)
        sequence.num_accepted += len(final)
        self.statistics.record_drafts(final, len(final), sequence.request.router_version)
        if sequence.is_finished:  # no deep pass will count what ran to draft
            sequence.num_layer_executions += chain.num_layer_executions
            sequence.num_token_layers += chain.num_token_layers
        return not sequence.is_finished

    def _settle(self, turns: list[_Turn]) -> None:
        if not turns:
            return
        try:
            states, logits = self._deep_pass(turns)
        except Exception as error:
            fail_all([turn.sequence for turn in turns], error, "a pass failed that was shared by")
            return
        answered = [turn for turn in turns if turn.num_answers]
        verdicts = dict(zip(map(id, answered), self._verdicts(logits, answered), strict=True))
        for turn, own in zip(turns, states, strict=True):
            if turn.sequence.failure is not None:
                continue
            if turn.is_prefill:
                turn.sequence.num_settled += len(own)
                turn.sequence.deep_state = own[-1]
            verdict = verdicts.get(id(turn))
            if verdict is not None:
                attempt(turn.sequence, self._conclude, turn, own, verdict)

    def _deep_pass(self, turns: Rows[_Turn]) -> tuple[Rows[Tensor], Tensor | None]:
        """Per turn its states at depth L [T, D]; and the logits [N, V] of all answers, turn after turn, None where none is wanted."""
        states = settle([turn.chain for turn in turns], self.runner)
        settled: Rows[Tensor] = states.split_with_sizes([len(turn.chain.tokens) for turn in turns])
        wanted = [
            own[len(own) - turn.num_answers :]
            for turn, own in zip(turns, settled, strict=True)
            if turn.num_answers
        ]
        return settled, self.runner.logits(torch.cat(wanted)) if wanted else None

    def _verdicts(self, logits: Tensor | None, turns: Rows[_Turn]) -> Rows[Verdict | None]:
        """Together, which reads the device once; where that fails, each alone, so that only those fail that are to blame."""
        if logits is None:
            return []
        try:
            trials = [turn.trial for turn in turns]
            return verify(logits, trials, [turn.sequence.request.logprobs for turn in turns])
        except Exception:
            logger.warning("verification failed; each request is verified alone", exc_info=True)
        rows = logits.split_with_sizes([turn.num_answers for turn in turns])
        return [
            attempt(turn.sequence, self._verdict, turn, own)
            for turn, own in zip(turns, rows, strict=True)
        ]

    def _verdict(self, turn: _Turn, logits: Tensor) -> Verdict:
        [verdict] = verify(logits, [turn.trial], [turn.sequence.request.logprobs])
        return verdict

    def _conclude(self, turn: _Turn, states: Tensor, verdict: Verdict) -> None:
        sequence, chain = turn.sequence, turn.chain
        confirmed = self._tokens(turn, verdict)
        if not turn.is_prefill:
            num_confirmed = len(confirmed) - 1
            sequence.num_deep_passes += 1
            sequence.num_layer_executions += chain.num_layer_executions
            sequence.num_token_layers += chain.num_token_layers
            sequence.num_accepted += num_confirmed
            sequence.reliability.record(chain.drafts[chain.num_final :], num_confirmed)
            self.statistics.record_drafts(
                chain.drafts[chain.num_final :], num_confirmed, sequence.request.router_version
            )
            # Everything but the last token chosen has now been through every layer; rejected drafts are overwritten later.
            num_through = 1 + chain.num_final + num_confirmed
            sequence.num_settled = chain.base + num_through
            sequence.deep_state = states[num_through - 1]
        turn.chunks += sequence.emit(confirmed)

    def _tokens(self, turn: _Turn, verdict: Verdict) -> list[GeneratedToken]:
        """The drafts that were confirmed, as they were drafted, and the token that the full model chose after them."""
        tested = turn.chain.drafts[turn.chain.num_final :]
        origins = [(draft.depth, draft.rung) for draft in tested[: len(verdict.tokens) - 1]]
        origins.append((self.runner.num_layers, FULL))
        tokens = [
            GeneratedToken(token, depth, rung)
            for token, (depth, rung) in zip(verdict.tokens, origins, strict=True)
        ]
        if verdict.logprobs is None:
            return tokens
        return [
            replace(token, logprob=found.value, alternatives=found.alternatives)
            for token, found in zip(tokens, verdict.logprobs, strict=True)
        ]
